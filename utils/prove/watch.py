"""Runs any script as `__main__`, and records what it does in each step: nothing that it sees has another type.

`main` is called in a process of its own, which `forked.py` has forked. Each process leaves a record, a dict:

    steps         of each optimizer.step(): its micro-batches (samples by their digests, coefficients of the losses,
                  whether gradients are reduced), gradients before clipping and at the step, learning rates, weights
    evaluations   samples, collectives and lines of output between two steps in which nothing was trained
    saves         what torch.save and save_state were given
    facts         what the script uses
"""

import collections
import contextlib
import functools
import itertools
import logging
import os
import runpy
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils import data as torch_data
from torch.utils.data import DataLoader, dataloader

from .same_work import TAG, OnCpu, SameData, SwitchedOff, generator_states, install_fetch
from .tensors import sampled

PACKAGE = __package__.partition(".")[0]
OWN_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep
PASSES = 2  # over the training data
STEPS_WITHOUT_LOADER = 10
MOST_STEPS = 60
LARGEST_MODEL = 5_000_000  # parameters; of a larger one no weights are handed on
SECONDS_TO_END = 3.0  # for what the script does after its last epoch
SHORT = 3  # batches of an evaluation that is made shorter on purpose
MOST_OUTPUT = 20_000  # characters of an evaluation
LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
LOSSES += ("binary_cross_entropy_with_logits", "kl_div", "gaussian_nll_loss", "poisson_nll_loss")
COLLECTIVES = ("all_reduce", "reduce", "all_gather", "gather", "all_gather_object", "gather_object")
COLLECTIVES += ("all_gather_into_tensor",)
OF_ACCELERATOR = ("gather", "gather_for_metrics", "reduce")


class Watch:
    """What happens in this process.

    Args:
        plan: of this run; see `forked.py`.
        rank: of this process.
    """

    def __init__(self, plan: dict, rank: int):
        self.plan, self.rank, self.root = plan, rank, plan["folder"]
        self.data = SameData(plan["processes"], plan["limit"], plan["own_batch_size"], plan.get("orders"))
        self.off = SwitchedOff()
        self.steps, self.evaluations, self.saves, self.weights = [], [], [], []
        self.facts = {"reads": [], "ddp": [], "around_ddp": [], "loaders": {}, "schedules": 0, "optimizers": []}
        self.facts |= {"has_saved": False, "refuses": False, "starts_processes": "", "local_sgd": ""}
        self.models, self.names, self.optimizers, self.in_ddp = {}, {}, [], {}
        self.fresh, self.used = [], []  # batches that no model has seen yet; that the next backward pass is of
        self.step, self.evaluation, self.initial = new_step(), None, None
        self.schedule_calls, self.train_passes, self.depth, self.in_library = 0, collections.Counter(), 0, 0
        self.in_loss, self.in_backward = 0, False
        self.is_ending, self.has_ended = False, False
        self.expected_draws = generator_states()
        # What a process has called stands there also when it dies.
        self.calls = open(Path(plan["output"], f"calls_{rank}.txt"), "w", buffering=1)  # noqa: SIM115  until the end
        self.lock, self.torch_save = threading.Lock(), torch.save

    # Where

    def is_own(self, file: str) -> bool:
        """Whether it is a file of the script's folder: neither installed there, nor of this package."""
        is_inside = file.startswith(self.root + os.sep) and not file.startswith(OWN_FOLDER)
        return is_inside and "site-packages" not in file

    def line(self) -> str:
        """The innermost line of the script's own files, as "train.py:64"."""
        return next(self._frames(), ("", 0))[0]

    def place(self) -> str:
        """Tells apart two calls in one line, two calls of a function that makes a loader, and those of a library."""
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", PACKAGE):
            frame = frame.f_back
        names = [f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"]
        names += [f"{line}:{column}" for line, column in itertools.islice(self._frames(), 3)]
        return " < ".join(names)

    def _frames(self) -> Iterator[tuple[str, int]]:
        frame = sys._getframe(1)
        while frame is not None:
            name, code = frame.f_code.co_filename, frame.f_code
            if self.is_own(name):
                column = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None))[2]
                yield f"{os.path.relpath(name, self.root)}:{frame.f_lineno}", column
            frame = frame.f_back

    # Data

    def new_loader(self, loader: DataLoader, given: int | None) -> None:
        loader.prove_key = key = self.place()
        sampler = loader.sampler
        kind = type(sampler).__name__
        self.facts["loaders"][key] = {
            "given": given,
            "length": self.data.lengths.get(id(loader.dataset)),
            "sampler": kind,
            "line": self.line(),
            "drop_last": bool(loader.drop_last),
            "shuffles": getattr(sampler, "shuffle", kind == "RandomSampler"),
            "is_iterable": isinstance(loader.dataset, torch_data.IterableDataset),
            "has_own_batches": given is None,
        }
        with contextlib.suppress(AttributeError):
            sampler.prove_key = key

    def begin_pass(self, loader) -> dict:
        return {"key": getattr(loader, "prove_key", "?"), "number": None, "in_training": False}

    def deliver(self, current: dict, content) -> object:
        """A batch is given to the script; returns what the script gets of it."""
        digests = None
        if has_digests(content):
            _, content, digests, is_random = content
            if is_random:
                self.off.switched_off.add("random augmentation, which is drawn by sample,")
        # What the script has left out, or has only looked at without a gradient.
        self.fresh = [batch for batch in self.fresh if batch["pass"] is not current and not batch["is_tested"]]
        self.fresh.append({"pass": current, "digests": digests, "is_tested": False})
        return content

    def expect_draws(self) -> None:
        """What was drawn until now is no draw of the training loop."""
        self.expected_draws = generator_states()

    def draws(self) -> bool:
        """Whether the loop itself has drawn random numbers since it was asked last."""
        before, self.expected_draws = self.expected_draws, generator_states()
        return before != self.expected_draws

    # Models

    def begin_call(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """A model is called by the script itself, and not by another model."""
        if not torch.is_grad_enabled():
            return self.evaluate()
        if id(model) not in self.models:
            self.models[id(model)] = model
            for name, parameter in model.named_parameters():
                name = name.replace("_orig_mod.", "").removeprefix("module.")
                self.names.setdefault(id(parameter), name)
            if self.initial is None and self.optimizers:
                self.begin_training()
        if id(model) in self.in_ddp:
            self.facts["around_ddp"].append(self.line())
        if isinstance(model, DistributedDataParallel):
            self.step["syncs"] = model.require_backward_grad_sync
        if not self.facts["loaders"]:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor) and value.ndim]
            self.used += [{"pass": None, "digests": rows(tensors[0])}] if tensors else []
        self.used, self.fresh = self.used + self.fresh, []

    def evaluate(self) -> None:
        if self.evaluation is None:
            self.evaluation = {"after": len(self.steps), "line": self.line(), "samples": {}, "collectives": []}
            self.evaluation |= {"said": [], "draws": False}
        for batch in self.fresh:
            if not batch["is_tested"]:
                samples = self.evaluation["samples"].setdefault(batch["pass"]["key"], [])
                samples += batch["digests"] or []
                batch["is_tested"] = True  # and may still be trained on, as where a teacher looks at it first

    def end_evaluation(self) -> None:
        """The next training step begins."""
        if self.evaluation is not None:
            self.evaluation["draws"] = self.draws() or self.evaluation["draws"]
            self.evaluations.append(self.evaluation)
            self.evaluation = None

    def collective(self, name: str) -> None:
        if not self.in_library:
            where = self.step if self.evaluation is None else self.evaluation
            where["collectives"].append((name, self.line()))
            self.calls.write(f"{len(self.steps)} {name} {self.line()}\n")

    def said(self, text: str) -> None:
        if self.evaluation is None or self.is_ending:
            return
        if sum(map(len, self.evaluation["said"])) < MOST_OUTPUT:
            self.evaluation["said"].append(text[:500])

    def begin_training(self) -> None:
        """Before the first step: note the weights, and begin with those of the reference."""
        self.initial = self.tensors_of(self.parameters())
        self.hand_on(0)

    def parameters(self) -> list[nn.Parameter]:
        found = [each for optimizer in self.optimizers for group in optimizer.param_groups for each in group["params"]]
        return list({id(parameter): parameter for parameter in found}.values())

    def tensors_of(self, parameters, value=lambda parameter: parameter) -> dict[str, torch.Tensor]:
        found = {}
        for number, parameter in enumerate(parameters):
            if value(parameter) is not None:
                found[self.names.get(id(parameter), f"parameter {number}")] = sampled(value(parameter))
        return found

    def hand_on(self, number: int) -> None:
        """Weights and state of the optimizers after `number` steps: kept in the reference, and taken over later.

        A difference then cannot grow, and what is found in one step does not show in the next.
        """
        if self.plan["is_resumed"] is not None:
            return
        parameters = self.parameters()
        if sum(parameter.numel() for parameter in parameters) > LARGEST_MODEL:
            return
        states = [optimizer.state.get(parameter, {}) for optimizer in self.optimizers for parameter in parameters]
        if self.plan.get("weights") is None:
            states = [{name: copied(value) for name, value in state.items()} for state in states]
            self.weights.append(([parameter.detach().clone() for parameter in parameters], states))
        elif number < len(self.plan["weights"]):
            weights, known = self.plan["weights"][number]
            if [each.shape for each in weights] == [each.shape for each in parameters] and len(known) == len(states):
                with torch.no_grad():
                    for parameter, weight in zip(parameters, weights, strict=True):
                        parameter.copy_(weight)
                    for state, values in zip(states, known, strict=True):
                        for name, value in values.items():
                            if name in state and isinstance(value, torch.Tensor):
                                state[name].copy_(value)

    # Steps

    def criterion(self, name: str, loss: torch.Tensor, reduction: str, args: tuple, kwargs: dict) -> None:
        """A loss was computed: note with which coefficient its mean enters the gradient."""
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            return
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        count = loss.numel()
        if reduction != "none":
            count = target.numel() if isinstance(target, torch.Tensor) else 1
            if name in ("cross_entropy", "nll_loss") and not target.is_floating_point():
                count = int((target != kwargs.get("ignore_index", -100)).sum())
        step, line = self.step, self.line()

        def note(gradient: torch.Tensor) -> None:
            total = float(gradient.detach().double().sum()) * (count if reduction == "sum" else 1)
            if step["micro_batches"]:
                step["micro_batches"][-1]["losses"].append((total, count, line))

        loss.register_hook(note)

    def begin_backward(self) -> None:
        if self.is_ending:
            self.end()
        if not self.step["micro_batches"]:
            self.end_evaluation()
            if len(self.steps) >= (MOST_STEPS if self.facts["loaders"] else STEPS_WITHOUT_LOADER):
                self.end()
            held = [each.grad for each in self.parameters() if each.grad is not None]
            self.step["holds"] = bool(self.steps) and any(bool(gradient.any()) for gradient in held)
        for batch in self.used:
            if batch["pass"] is not None and not batch["pass"]["in_training"]:
                key = batch["pass"]["key"]
                batch["pass"] |= {"in_training": True, "number": self.train_passes[key]}
                self.train_passes[key] += 1
        self.step["micro_batches"].append(
            {
                "samples": [
                    {"key": batch["pass"] and batch["pass"]["key"], "pass": batch["pass"] and batch["pass"]["number"]}
                    | {"digests": batch["digests"]}
                    for batch in self.used
                ],
                "losses": [],
                "syncs": self.step.get("syncs"),
                "draws": self.draws(),
                "line": self.line(),
            }
        )
        self.used = []

    def clip(self) -> None:
        self.step["clips"].append((len(self.step["micro_batches"]), self.line()))
        self.step["gradients"] = self.tensors_of(self.parameters(), lambda each: each.grad)

    def before_step(self, optimizer, *_) -> None:
        if self.is_ending:
            self.end()
        if optimizer not in self.optimizers:
            return
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = self.tensors_of(own, lambda each: each.grad)
        self.step |= {"line": self.line(), "optimizer": self.optimizers.index(optimizer), "at_step": gradients}
        self.step["rates"] = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        self.step["options"] = [repr({**group, "params": None}) for group in optimizer.param_groups]
        self.step["schedule_calls"] = self.schedule_calls
        if not self.step["clips"] or self.step["clips"][-1][0] < len(self.step["micro_batches"]):
            self.step["gradients"] = gradients
        self.step["before"] = self.tensors_of(own)
        self.step["state_before"] = state_of(optimizer, self.names) if self.plan["is_resumed"] is not None else {}

    def after_step(self, optimizer, *_) -> None:
        if optimizer not in self.optimizers:
            return
        own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.step["weights"] = self.tensors_of(own)
        self.steps.append(self.step)
        self.hand_on(len(self.steps))
        self.step = new_step()

    # Files

    def save(self, content, file) -> None:
        path = str(file) if isinstance(file, (str, os.PathLike)) else "?"
        self.saves.append({"after": len(self.steps), "path": path, "line": self.line(), "kind": "torch.save"})
        self.saves[-1] |= described(content)
        self.saves[-1]["epoch_over"] = self.evaluation is not None
        self.stop_after_save()

    def save_state(self, accelerator, folder) -> None:
        prepared = [scheduler.scheduler for scheduler in accelerator._schedulers]
        lacks = [each for each in self.facts.get("live_schedules", []) if not any(each is one for one in prepared)]
        registered = [type(each).__name__ for each in accelerator._custom_objects]
        self.saves.append({"after": len(self.steps), "path": str(folder), "line": self.line(), "kind": "save_state"})
        self.saves[-1] |= {"lacks_schedule": bool(lacks) and not registered, "prefix": "", "has": []}
        self.stop_after_save()

    def stop_after_save(self) -> None:
        if self.plan["stop_after_save"] and self.steps:
            self.facts["has_saved"] = True
            self.end()

    # The end

    def is_short(self, iterator) -> bool:
        """Whether this is a pass over test data, and the plan says to leave some of them out."""
        key = getattr(iterator, "prove_pass", {}).get("key")
        return key in self.plan["shorter"] and iterator._num_yielded >= SHORT

    def end_passes(self, loader) -> bool:
        """Whether the script has trained enough on these data: from then on the loader has no batches any more."""
        is_over = self.train_passes[getattr(loader, "prove_key", None)] >= PASSES
        if is_over and not self.is_ending:
            self.begin_to_end()
        return is_over

    def begin_to_end(self) -> None:
        self.end_evaluation()
        self.is_ending = True
        start_timer(SECONDS_TO_END, self.end)

    def end_waiting(self) -> None:
        """The time is over: end, and say where the script stands."""
        frame = sys._current_frames()[threading.main_thread().ident]
        stack = traceback.extract_stack(frame)
        own = [each for each in stack if self.is_own(each.filename)]
        where = f"{os.path.relpath(own[-1].filename, self.root)}:{own[-1].lineno}" if own else "?"
        self.end(waits=None if self.is_ending else where)

    def end(self, error: str | None = None, waits: str | None = None) -> None:
        """Write the record, and end this process."""
        with self.lock:
            if not self.has_ended:
                self.has_ended = True
                self.write(error, waits)
            sys.stdout.flush()
            os._exit(1 if error else 0)

    def write(self, error: str | None, waits: str | None) -> None:
        self.end_evaluation()
        self.facts.pop("live_schedules", None)
        self.facts |= {"switched_off": sorted(self.off.switched_off), "is_complete": self.is_ending}
        self.facts["optimizers"] = [type(optimizer).__name__ for optimizer in self.optimizers]
        record = {"rank": self.rank, "error": error, "waits": waits, "facts": self.facts, "steps": self.steps}
        record |= {"evaluations": self.evaluations, "saves": self.saves, "initial": self.initial or {}}
        if self.rank == 0 and self.plan.get("weights") is None:
            record |= {"orders": self.data.recorded, "weights": self.weights}
        path = Path(self.plan["output"], f"record_{self.rank}.pt")
        self.torch_save(record, path.with_suffix(".part"))
        os.replace(path.with_suffix(".part"), path)


def has_digests(content) -> bool:
    return isinstance(content, tuple) and len(content) == 4 and isinstance(content[0], str) and content[0] == TAG


def start_timer(seconds: float, function) -> None:
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()


def new_step() -> dict:
    return {"micro_batches": [], "clips": [], "gradients": {}, "collectives": []}


def copied(value):
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def rows(tensor: torch.Tensor) -> list[str]:
    from_rows = tensor.detach().cpu().reshape(len(tensor), -1)
    return [str(hash(row.numpy().tobytes())) for row in from_rows]


def state_of(optimizer, names: dict) -> dict[str, torch.Tensor]:
    return {
        f"{names.get(id(parameter), '?')}/{name}": sampled(value)
        for parameter, state in optimizer.state.items()
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    }


def described(content) -> dict:
    """What a file that torch.save writes has in it, by what it looks like."""
    parts = {"": content} | ({str(name): part for name, part in content.items()} if isinstance(content, dict) else {})
    has, prefix, counters = set(), "", []
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            has.add("module")
        elif isinstance(part, dict) and {"state", "param_groups"} <= part.keys():
            has.add("optimizer")
        elif isinstance(part, dict) and "last_epoch" in part:
            has.add("schedule")
        elif isinstance(part, dict) and part and all(isinstance(each, torch.Tensor) for each in part.values()):
            has.add("model")
            for start in ("module.", "_orig_mod."):
                if all(str(key).startswith(start) for key in part):
                    prefix = start
        elif name and isinstance(part, (int, float)) and not isinstance(part, bool):
            counters.append(name)
    return {"has": sorted(has), "prefix": prefix, "counters": counters}


class Listener:
    """stdout, of which the lines after an evaluation are noted; more than a megabyte is not kept."""

    def __init__(self, stream, watch: Watch):
        self.stream, self.watch, self.rest, self.left = stream, watch, "", 1_000_000

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + text[:MOST_OUTPUT]).split("\n")
        self.rest = self.rest[-MOST_OUTPUT:]
        for line in lines:
            if line.strip():
                self.watch.said(line)
        if self.left > 0:
            self.left -= len(text)
            self.stream.write(text[: self.left])
        return len(text)


def wrap(owner, name: str):
    """A decorator: `function(original, *args, **kwargs)` in place of `owner.name`."""
    original = getattr(owner, name)

    def decorate(function):
        @functools.wraps(original)
        def replacement(*args, **kwargs):
            return function(original, *args, **kwargs)

        setattr(owner, name, replacement)
        return function

    return decorate


def install(watch: Watch) -> None:
    """Put the wrappers in place."""
    install_fetch()
    watch.off.install()
    watch_data(watch)
    watch_models(watch)
    watch_steps(watch)
    watch_processes(watch)
    watch_files(watch)
    with contextlib.suppress(ImportError):
        watch_accelerate(watch)


def watch_data(watch: Watch) -> None:
    same = watch.data
    for name in ("RandomSampler", "SequentialSampler", "DistributedSampler"):

        @wrap(getattr(torch_data, name), "__init__")
        def init(original, sampler, *args, **kwargs):
            for word in ("data_source", "dataset"):
                if word in kwargs:
                    kwargs[word] = same.cut(kwargs[word])
            original(sampler, *map(same.cut, args[:1]), *args[1:], **kwargs)
            sampler.prove_generator = kwargs.get("generator") is not None

    for name in ("RandomSampler", "SubsetRandomSampler"):

        @wrap(getattr(torch_data, name), "__iter__")
        def order(original, sampler):
            if not hasattr(sampler, "prove_generator"):
                sampler.prove_generator = getattr(sampler, "generator", None) is not None
            return iter(same.order(sampler, lambda: list(original(sampler))))

    @wrap(DataLoader, "__init__")
    def init_loader(original, loader, dataset, batch_size=1, *args, **kwargs):
        is_own = not sys._getframe(2).f_globals.get("__name__", "").startswith("accelerate.")
        given = batch_size if kwargs.get("batch_sampler") is None and len(args) < 3 else None
        if is_own:
            dataset = same.cut(dataset)
            if given is not None:
                batch_size = same.batch_size(given)
            if kwargs.get("num_workers", 0) > 1:
                kwargs["num_workers"] = 1
        original(loader, dataset, batch_size, *args, **kwargs)
        if is_own:
            watch.new_loader(loader, given)

    @wrap(DataLoader, "__iter__")
    def iterate(original, loader):
        if watch.end_passes(loader):
            return iter(())
        if watch.train_passes and not watch.step["micro_batches"] and watch.evaluation is not None:
            watch.evaluation["draws"] = watch.draws() or watch.evaluation["draws"]
        watch.fresh = [batch for batch in watch.fresh if batch["pass"] is None]
        watch.expect_draws()
        iterator = original(loader)
        iterator.prove_pass = watch.begin_pass(loader)
        iterator.prove_later = getattr(loader, "prove_later", None)
        watch.expect_draws()
        return iterator

    @wrap(dataloader._BaseDataLoaderIter, "__next__")
    def next_batch(original, iterator):
        if watch.is_short(iterator):
            raise StopIteration
        draws = watch.draws()
        content = original(iterator)
        watch.expected_draws = None if draws else generator_states()
        if not hasattr(iterator, "prove_pass"):
            return watch.deliver(watch.begin_pass(None), content)
        if iterator.prove_later is None:
            return watch.deliver(iterator.prove_pass, content)
        iterator.prove_later.append((iterator.prove_pass, content))
        return content[1] if has_digests(content) else content


def watch_models(watch: Watch) -> None:
    @wrap(nn.Module, "__call__")
    def call(original, model, *args, **kwargs):
        if watch.depth == 0 and not watch.is_ending and next(model.parameters(), None) is not None:
            watch.begin_call(model, args, kwargs)
        watch.depth += 1
        try:
            return original(model, *args, **kwargs)
        finally:
            watch.depth -= 1

    @wrap(DistributedDataParallel, "__init__")
    def init_ddp(original, ddp, module, device_ids=None, output_device=None, **kwargs):
        original(ddp, module, **kwargs)
        watch.in_ddp[id(module)] = module
        watch.facts["ddp"].append(watch.line())

    for name in LOSSES:

        @wrap(F, name)
        def criterion(original, *args, name=name, **kwargs):
            watch.in_loss += 1  # PyTorch calls it once more where a TorchFunctionMode is on
            try:
                loss = original(*args, **kwargs)
            finally:
                watch.in_loss -= 1
            if not watch.in_loss:
                watch.criterion(name, loss, kwargs.get("reduction", "mean"), args, kwargs)
            return loss


def watch_steps(watch: Watch) -> None:
    from torch.optim import lr_scheduler, optimizer

    @wrap(optimizer.Optimizer, "__init__")
    def init(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        if self not in watch.optimizers:
            watch.optimizers.append(self)

    @wrap(torch.autograd, "backward")
    def backward(original, *args, **kwargs):
        if watch.depth or watch.in_backward:  # in a model's forward, or of a checkpointed part of it
            return original(*args, **kwargs)
        watch.begin_backward()
        watch.in_backward = True
        try:
            return original(*args, **kwargs)
        finally:
            watch.in_backward = False

    optimizer.register_optimizer_step_pre_hook(watch.before_step)
    optimizer.register_optimizer_step_post_hook(watch.after_step)

    for name in ("clip_grad_norm_", "clip_grad_value_"):

        @wrap(nn.utils, name)
        def clip(original, *args, **kwargs):
            watch.clip()
            return original(*args, **kwargs)

    @wrap(lr_scheduler.LRScheduler, "__init__")
    def init_schedule(original, schedule, *args, **kwargs):
        original(schedule, *args, **kwargs)
        watch.facts["schedules"] += 1
        watch.facts.setdefault("live_schedules", []).append(schedule)

    @wrap(lr_scheduler.LRScheduler, "step")
    def step(original, schedule, *args, **kwargs):
        watch.schedule_calls += not getattr(schedule, "_is_initial", False)
        return original(schedule, *args, **kwargs)


def watch_processes(watch: Watch) -> None:
    @wrap(torch.multiprocessing, "start_processes")
    def start(original, *args, **kwargs):
        watch.facts["starts_processes"] = watch.line()
        watch.end()

    torch.multiprocessing.spawn = torch.multiprocessing.start_processes

    @wrap(dist, "init_process_group")
    def init(original, backend=None, *args, **kwargs):
        kwargs.pop("device_id", None)
        original("gloo", *args, **kwargs)
        watch.facts["group"] = watch.line()

    for name in COLLECTIVES:

        @wrap(dist, name)
        def collective(original, *args, name=name, **kwargs):
            watch.collective(name)
            return original(*args, **kwargs)


def watch_files(watch: Watch) -> None:
    @wrap(torch, "save")
    def save(original, obj, f, *args, **kwargs):
        watch.in_library += 1
        try:
            original(obj, f, *args, **kwargs)
        finally:
            watch.in_library -= 1
        if not watch.in_library:
            watch.save(obj, f)

    @wrap(torch, "load")
    def load(original, f, *args, **kwargs):
        watch.facts["reads"].append(watch.line())
        if watch.plan["without_gpu"]:
            args, kwargs = (), kwargs | {"map_location": "cpu"}
        return original(f, *args, **kwargs)

    @wrap(logging.Logger, "callHandlers")
    def log(original, logger, record):
        with contextlib.suppress(Exception):
            watch.said(record.getMessage())
        return original(logger, record)


def watch_accelerate(watch: Watch) -> None:
    import accelerate
    from accelerate import accelerator, data_loader, local_sgd, state

    @wrap(state.PartialState, "__init__")
    def init_state(original, self, *args, **kwargs):
        if watch.plan["processes"] > 1:
            return original(self, *args, **kwargs)
        with mock.patch.dict(os.environ):  # as without a launcher
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                os.environ.pop(name, None)
            return original(self, *args, **kwargs)

    @wrap(accelerate.Accelerator, "__init__")
    def init(original, self, *args, **kwargs):
        if kwargs.get("mixed_precision") not in (None, "no"):
            kwargs["mixed_precision"] = "no"
            watch.off.switched_off.add("mixed precision")
        original(self, *args, **kwargs)
        watch.facts["accelerate"] = watch.line()
        watch.data.splits_batches = bool(self.split_batches)

    for module in (accelerator, data_loader):
        for name in ("prepare_data_loader", "skip_first_batches"):

            @wrap(module, name)
            def prepared(original, *args, **kwargs):
                result = original(*args, **kwargs)
                loader = args[0] if args else kwargs["dataloader"]
                with contextlib.suppress(AttributeError):
                    result.prove_key = loader.prove_key
                    base = getattr(result, "base_dataloader", None)
                    if base is not None:
                        base.prove_key, base.prove_later = loader.prove_key, collections.deque()
                return result

    accelerate.skip_first_batches = data_loader.skip_first_batches

    @wrap(data_loader.DataLoaderShard, "__iter__")
    def iterate(original, loader):
        if watch.end_passes(loader):
            return
        waiting = loader.base_dataloader.__dict__.setdefault("prove_later", collections.deque())
        waiting.clear()
        watch.expect_draws()
        for content in original(loader):
            if waiting:
                watch.deliver(*waiting.popleft())
            yield content

    for name in OF_ACCELERATOR:

        @wrap(accelerate.Accelerator, name)
        def collective(original, *args, name=name, **kwargs):
            watch.collective(name)
            watch.in_library += 1
            try:
                return original(*args, **kwargs)
            finally:
                watch.in_library -= 1

    @wrap(local_sgd.LocalSGD, "__init__")
    def init_local_sgd(original, self, *args, **kwargs):
        watch.facts["local_sgd"] = watch.line()
        original(self, *args, **kwargs)

    @wrap(accelerate.Accelerator, "save_state")
    def save_state(original, self, output_dir=None, *args, **kwargs):
        watch.in_library += 1
        try:
            result = original(self, output_dir, *args, **kwargs)
        finally:
            watch.in_library -= 1
        watch.save_state(self, output_dir)
        return result

    @wrap(accelerate.Accelerator, "load_state")
    def load_state(original, self, *args, **kwargs):
        watch.facts["reads"].append(watch.line())
        return original(self, *args, **kwargs)


def main(plan: dict, rank: int, script: str, flags: list[str]) -> None:
    """Run a script, leave a record, and end this process.

    Args:
        script: its path in the copy of the user's folder, which is the working directory.
    """
    watch = Watch(plan, rank)
    sys.argv = [script, *flags]
    sys.path[0] = os.path.dirname(script)
    torch.set_num_threads(1)
    torch.manual_seed(100 + rank)
    install(watch)
    if plan["without_gpu"]:
        OnCpu().install()
    start_timer(plan["timeout_s"] - 1, watch.end_waiting)
    sys.stdout = Listener(sys.stdout, watch)
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]  # the script may have a module of this name
    error = None
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as stopped:
        if stopped.code not in (None, 0):
            error = f"it ends with {stopped.code}"
    except BaseException as raised:  # whatever it is, it goes into the record
        traceback.print_exc()
        frames = traceback.extract_tb(raised.__traceback__)
        own = [frame for frame in frames if watch.is_own(frame.filename)]
        where = f"{os.path.relpath(own[-1].filename, watch.root)}:{own[-1].lineno}: " if own else ""
        words = str(raised).strip().splitlines() or [""]
        error = f"{where}{type(raised).__name__}: {words[0][:300]}"
        # The script itself has raised it, and on purpose.
        is_meant = isinstance(raised, (AssertionError, ValueError, RuntimeError)) and frames[-1] in own
        watch.facts["refuses"] = is_meant
    watch.end(None if watch.is_ending else error)
