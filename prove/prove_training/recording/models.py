"""Models, optimizers and steps: gradients, weights, learning rates, and the coefficient of each loss."""

import contextlib
import os
import re
import shutil
from collections import ChainMap

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler, optimizer

from ..records import MicroBatch
from ..tensors import MAX_ENTRIES, digest, local, sampled, whole
from .where import before, wrap

MOST_STEPS = 60
STEPS_WITHOUT_LOADER = 10
DISK = 0.5  # of the free space may be taken by shared weights
LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")
LOSSES += ("binary_cross_entropy_with_logits", "kl_div", "gaussian_nll_loss", "poisson_nll_loss")
WRAPPERS = re.compile(r"\b(_forward_module|_orig_mod|module)\.")  # in names of parameters
torch_load = torch.load  # before it is wrapped
MODAL = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)  # layers for which train() and eval() matter


class Models:
    """Models that the script calls, their optimizers, and their steps."""

    def __init__(self, recording):
        self.recording, self.plan, self.batches = recording, recording.plan, recording.batches
        self.models, self.names, self.optimizers, self.schedules, self.in_ddp = {}, {}, [], [], {}
        self.schedule_calls, self.depth, self.in_loss, self.in_backward = 0, 0, 0, False
        self.with_gradient = {}  # ids of parameters
        self.without_optimizer = 0  # backward passes
        self.stepping, self.stepped = None, []  # optimizers, which may call others in a step
        self.scalers, self.unscaled = [], set()  # ids of optimizers

    def begin_call(self, model: nn.Module, args: tuple, kwargs: dict) -> None:
        """The script itself calls a model, not another model."""
        recording, inputs = self.recording, [*args, *kwargs.values()]
        if not torch.is_grad_enabled():
            return recording.evaluations.begin(model, inputs)
        if recording.facts.has_saved:
            recording.end()
        if id(model) not in self.models:
            self.models[id(model)] = model
            self._note_shards(model)
            for name, parameter in model.named_parameters():
                self.names.setdefault(id(parameter), WRAPPERS.sub("", name))
            if not recording.record.initial and self.optimizers:
                recording.record.initial = self.tensors_of()
                self.share_weights(0, self.optimizers)
        if not recording.step.statistics:
            recording.step.statistics = {name: sampled(value) for name, value in self._statistics()}
            buffers = (entry for model in self.models.values() for entry in model.named_buffers())
            recording.step.buffers = {
                WRAPPERS.sub("", name): digest(local(value)) for name, value in buffers if value.numel() <= MAX_ENTRIES
            }
        if id(model) in self.in_ddp:
            recording.facts.around_ddp.append(recording.where.line())
        if isinstance(model, DistributedDataParallel):
            recording.step.syncs = model.require_backward_grad_sync
        self.batches.model_called(inputs)

    def modes(self, own: list[nn.Parameter]) -> dict[int, bool]:
        """For each model with some of these parameters, and layers for which it matters: whether any is training."""
        ids, found = set(map(id, own)), {}
        for number, model in enumerate(self.models.values()):
            layers = [each for each in model.modules() if isinstance(each, MODAL) and getattr(each, "p", 1) > 0]
            if layers and not ids.isdisjoint(map(id, model.parameters())):
                found[number] = any(each.training for each in (getattr(model, "module", model), *layers))
        return found

    def untrained(self) -> list[str]:
        """Parameters of called models that have had a gradient at a step, and are in no optimizer."""
        known = set(map(id, self.parameters()))
        return [self.names[number] for number in self.with_gradient if number not in known]

    def unused(self, error: str) -> list[str]:
        """Parameters that have no gradient, by an error of DistributedDataParallel, which gives their numbers."""
        numbers = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", error)
        named = [entry for model in self.in_ddp.values() for entry in model.named_parameters()]
        names = [name for name, parameter in named if parameter.requires_grad]
        return [names[int(number)] for number in numbers[1].split() if int(number) < len(names)] if numbers else []

    def _note_shards(self, model: nn.Module) -> None:
        facts, kinds = self.recording.facts, [type(module).__name__ for module in model.modules()]
        if "FullyShardedDataParallel" in kinds:
            line = self.recording.where.line()
            self.recording.stop(
                f"FullyShardedDataParallel keeps parts of flat parameters ({line}): fully_shard could be compared"
            )
        elif any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
            is_divided = any(kind.startswith("FSDP") for kind in kinds)  # the batch, and not only the layers
            (facts.ddp if is_divided else facts.layers).append(self.recording.where.line())
            facts.sharded = self.recording.where.line()

    def parameters(self) -> list[nn.Parameter]:
        found = [each for optimizer in self.optimizers for each in parameters_of(optimizer)]
        return list({id(parameter): parameter for parameter in found}.values())

    def tensors_of(self, parameters=None, value=lambda parameter: parameter) -> dict[str, torch.Tensor]:
        """A value of each parameter by name; parameters None: those of all optimizers."""
        return {
            self.names.get(id(parameter), f"parameter {number}"): sampled(value(parameter))
            for number, parameter in enumerate(self.parameters() if parameters is None else parameters)
            if value(parameter) is not None
        }

    def state_of(self, optimizer) -> dict[str, torch.Tensor]:
        return {
            f"{self.names.get(id(parameter), '?')}/{name}": sampled(value)
            for parameter, state in optimizer.state.items()
            for name, value in state.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        }

    def share_weights(self, number: int, optimizers: list) -> None:
        """Store weights and optimizer state after `number` steps in the reference; load them in other runs.

        So a difference cannot grow, and one found in a step does not show in the next. Weights of other optimizers stay
        as they are: a graph may still need them, as a generator's does while its discriminator steps.
        """
        if self.plan.is_resumed is not None:
            return
        parameters = [parameter for optimizer in optimizers for parameter in parameters_of(optimizer)]
        # An optimizer may call others, which hold the state.
        states = [ChainMap(*(each.state.get(parameter, {}) for each in self.optimizers)) for parameter in parameters]
        if self.plan.weights is None:
            entries = [*parameters, *(value for state in states for value in state.values())]
            size = sum(value.nbytes for value in entries if isinstance(value, torch.Tensor))
            if size < DISK * shutil.disk_usage(self.plan.output).free:
                file = os.path.join(self.plan.output, f"weights_{number}.pt")
                copies = [{name: to_cpu(value) for name, value in state.items()} for state in states]
                self.recording.torch_save(([to_cpu(parameter) for parameter in parameters], copies), file)
                self.recording.record.weights[number] = file
        elif number in self.plan.weights:
            weights, known = torch_load(self.plan.weights[number], "cpu", weights_only=False, mmap=True)
            if [each.shape for each in weights] == [each.shape for each in parameters] and len(known) == len(states):
                load_shared(parameters, states, weights, known)

    def begin_backward(self) -> None:
        recording, step = self.recording, self.recording.step
        if recording.is_ending:
            recording.end()
        if not self.optimizers:
            self.without_optimizer += 1
            if self.without_optimizer > STEPS_WITHOUT_LOADER:
                recording.stop(f"{STEPS_WITHOUT_LOADER} backward passes, and no optimizer of torch.optim")
        # Also from a generator of the script's own.
        draws = self.batches.draws() or not all(draw.is_repeated for draw in step.drawn)
        if not step.micro_batches:
            # Without a loader they may be of the evaluation.
            recording.evaluations.end(draws and not recording.facts.loaders)
            if len(recording.steps) >= (MOST_STEPS if recording.facts.loaders else STEPS_WITHOUT_LOADER):
                recording.end()
            step.holds = bool(recording.steps) and self._holds_gradients()
        micro = MicroBatch(self.batches.of_backward(), syncs=step.syncs)
        if step.micro_batches and not micro.samples and not self._holds_gradients():
            # A second look at the same samples, after a trial step: its gradient alone counts.
            micro.samples, step.zeroed = step.micro_batches.pop().samples, []
        passes = [[part.number for part in each.samples] for each in (*step.micro_batches[-1:], micro)]
        if passes[0] != passes[-1] and step.zeroed and step.zeroed[-1][0] == len(step.micro_batches):
            step.micro_batches, step.zeroed = [], []  # what was left at the end of an epoch is dropped
        micro.draws, micro.line = draws, recording.where.line()
        micro.scales = bool(re.search(r"[^*/][*/][^*/]", recording.where.source()))
        step.micro_batches.append(micro)

    def _holds_gradients(self) -> bool:
        return any(bool(local(each.grad).any()) for each in self.parameters() if each.grad is not None)

    def criterion(self, name: str, loss: torch.Tensor, reduction: str, args: tuple, kwargs: dict) -> None:
        """A loss was computed: record the coefficient of its mean in the gradient."""
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            return
        target = kwargs.get("target", args[1] if len(args) > 1 else None)
        count = loss.numel()
        if reduction != "none":
            count = target.numel() if isinstance(target, torch.Tensor) else 1
            if name in ("cross_entropy", "nll_loss") and not target.is_floating_point():
                count = int((target != kwargs.get("ignore_index", -100)).sum())
        step, line = self.recording.step, self.recording.where.line()

        def note(gradient: torch.Tensor) -> None:
            weights = gradient[gradient != 0]
            if len(weights) and not torch.allclose(weights, weights[0], rtol=1e-3, atol=0.0):
                return  # as with a weight for each time step
            total = float(gradient.detach().double().sum()) * (count if reduction == "sum" else 1)
            if step.micro_batches:
                step.micro_batches[-1].losses.append((total, count, line))

        loss.register_hook(note)

    def before_zero_grad(self, *_, **__) -> None:
        step = self.recording.step
        if step.micro_batches and any(each.grad is not None for each in self.parameters()):
            step.zeroed.append((len(step.micro_batches), self.recording.where.line()))

    def clip(self, parameters: list[nn.Parameter]) -> None:
        step, line = self.recording.step, self.recording.where.line()
        step.clips.append((len(step.micro_batches), line))
        step.clips_nothing = step.clips_nothing or ("" if parameters else line)
        scaled = [each for each in self.optimizers if id(each) not in self.unscaled] if self.unscaled else []
        if {id(parameter) for each in scaled for parameter in parameters_of(each)}.intersection(map(id, parameters)):
            step.scaler.clear()  # of another optimizer
        step.scaler.append("clip")
        step.gradients = self.tensors_of(value=lambda each: each.grad)

    def before_step(self, optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        """Record a step. Returns its arguments, with a closure that records the gradients that it computes."""
        recording = self.recording
        if recording.is_ending:
            recording.end()
        if self.stepping is not None:
            return None
        if not recording.steps:
            recording.facts.framework = recording.where.framework()
        self.stepping, is_called = optimizer, bool(recording.record.initial)
        self._note_weights(optimizer)
        self._note_gradients(optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            return None

        def closure_of_step():
            loss = closure()
            if not is_called:  # now the names of the parameters are known
                self._note_weights(optimizer)
            self._note_gradients(optimizer)
            return loss

        return args[:1], {**kwargs, "closure": closure_of_step}

    def _note_weights(self, optimizer) -> None:
        before, state = self.tensors_of(parameters_of(optimizer)), self.state_of(optimizer)
        scales = {f"GradScaler {n}/scale": sampled(torch.tensor([s.get_scale()])) for n, s in enumerate(self.scalers)}
        self.recording.step.before, self.recording.step.state_before = before, state | scales

    def _note_gradients(self, optimizer) -> None:
        recording, step, own = self.recording, self.recording.step, parameters_of(optimizer)
        if len(recording.steps) < 3:
            called = [parameter for model in self.models.values() for parameter in model.parameters()]
            self.with_gradient |= {id(parameter): parameter for parameter in called if parameter.grad is not None}
        gradients = self.tensors_of(own, lambda each: each.grad)
        step.line, step.at_step, step.schedule_calls = recording.where.line(), gradients, self.schedule_calls
        step.rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        step.bases = [float(group.get("initial_lr", 0.0)) for group in optimizer.param_groups if "lr" in group]
        step.options = [repr({**group, "params": None}) for group in optimizer.param_groups]
        if not step.clips or step.clips[-1][0] < len(step.micro_batches):
            step.gradients = gradients
        step.modes, step.is_pending = self.modes(own), self._is_pending()

    def _is_pending(self) -> bool:
        """Whether FSDP keeps gradients that it has not reduced."""
        with contextlib.suppress(AttributeError):  # no public API
            modules = [each for model in self.models.values() for each in model.modules() if is_fsdp(each)]
            groups = [group for each in modules for group in fsdp_groups(each)]
            return any(map(is_unreduced, (each for group in groups for each in group.fsdp_params)))
        return False

    def after_step(self, optimizer, *_) -> None:
        recording = self.recording
        if optimizer is self.stepping:
            self.stepping = None
            if optimizer not in self.stepped:
                self.stepped.append(optimizer)
                recording.facts.optimizers.append(type(optimizer).__name__)
            recording.step.weights = self.tensors_of(parameters_of(optimizer))
            recording.facts.has_state |= bool(optimizer.state)
            recording.steps.append(recording.step)
            self.share_weights(len(recording.steps), [optimizer])
            recording.new_step()

    def _statistics(self):
        """The running statistics of BatchNorm, before DistributedDataParallel overwrites them with those of rank 0."""
        for model in self.models.values():
            alike = {name for name, module in model.named_modules() if isinstance(module, nn.SyncBatchNorm)}
            for name, buffer in model.named_buffers():
                owner, _, kind = name.rpartition(".")
                if kind in ("running_mean", "running_var") and owner not in alike:
                    yield WRAPPERS.sub("", name), buffer


def is_fsdp(module: nn.Module) -> bool:
    return type(module).__name__.startswith("FSDP") and hasattr(module, "_get_fsdp_state")


def fsdp_groups(module: nn.Module) -> list:
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # from torch 2.13 on
    return several if several is not None else [state._fsdp_param_group] * (state._fsdp_param_group is not None)


def is_unreduced(parameter) -> bool:
    whole = getattr(parameter, "_unsharded_param", None)
    return parameter.unsharded_accumulated_grad is not None or getattr(whole, "grad", None) is not None


def parameters_of(optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def to_cpu(value):
    return whole(value).to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def copy_into(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if hasattr(tensor, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value.to(tensor.device), tensor.device_mesh, tensor.placements, src_data_rank=None)
    tensor.copy_(value)


@torch.no_grad()
def load_shared(parameters: list, states: list[dict], weights: list, known: list[dict]) -> None:
    for parameter, weight in zip(parameters, weights, strict=True):
        copy_into(parameter, weight)
    for state, values in zip(states, known, strict=True):
        for name, value in values.items():
            if name in state and isinstance(value, torch.Tensor) and state[name].shape == value.shape:
                copy_into(state[name], value)


def not_averaged(_state, bucket):
    """A hook of DistributedDataParallel that leaves each process its own gradients."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def install(recording) -> None:
    models = recording.models

    original = nn.Module.__call__

    def call(self, *args, **kwargs):  # torch.profiler looks for the code of nn.Module.__call__, and for `self` in it
        is_passed = models.depth or recording.is_ending or torch.jit.is_tracing()  # which compares two calls
        if not is_passed and next(self.parameters(), None) is not None:
            models.begin_call(self, args, kwargs)
        models.depth += 1
        try:
            return original(self, *args, **kwargs)
        finally:
            models.depth -= 1

    nn.Module.__call__ = call

    @wrap(DistributedDataParallel, "__init__")
    def init_ddp(original, ddp, module, device_ids=None, output_device=None, *args, **kwargs):
        original(ddp, module, None, None, *args, **kwargs)
        if recording.plan.own_gradients:
            ddp.register_comm_hook(None, not_averaged)
        models.in_ddp[id(module)] = module
        recording.facts.ddp.append(recording.where.line())

    @wrap(torch.autograd, "backward")
    def backward(original, *args, **kwargs):
        if models.in_backward:  # of a part that is checkpointed
            return original(*args, **kwargs)
        models.begin_backward()
        models.in_backward = True
        try:
            return original(*args, **kwargs)
        finally:
            models.in_backward = False

    facts, where = recording.facts, recording.where
    before(nn.DataParallel, "__init__", lambda *_, **__: setattr(facts, "data_parallel", where.line()))

    @wrap(nn.Module, "load_state_dict")
    def load_state_dict(original, module, state_dict, *args, **kwargs):
        result = original(module, state_dict, *args, **kwargs)
        if state_dict and len(getattr(result, "unexpected_keys", ())) == len(state_dict):
            recording.facts.loads_nothing, recording.facts.lost = recording.where.line(), next(iter(state_dict))
        return result

    for name in LOSSES:

        @wrap(F, name)
        def criterion(original, *args, name=name, **kwargs):
            models.in_loss += 1  # PyTorch calls it twice under a TorchFunctionMode
            try:
                loss = original(*args, **kwargs)
            finally:
                models.in_loss -= 1
            if not models.in_loss:
                models.criterion(name, loss, kwargs.get("reduction", "mean"), args, kwargs)
            return loss

    install_optimizers(models)


def install_optimizers(models: Models) -> None:
    before(optimizer.Optimizer, "__init__", lambda self, *_, **__: models.optimizers.append(self))
    optimizer.register_optimizer_step_pre_hook(models.before_step)
    optimizer.register_optimizer_step_post_hook(models.after_step)

    for owner in (optimizer.Optimizer, nn.Module):
        before(owner, "zero_grad", models.before_zero_grad)

    @wrap(torch.amp.GradScaler, "__init__")
    def init_scaler(original, scaler, device="cuda", *args, **kwargs):
        original(scaler, "cpu", *args, **kwargs)  # that of a GPU is not enabled without one
        scaler._init_scale = 1.0  # so that no step is skipped, and gradients have their size
        models.scalers += [scaler] * scaler.is_enabled()

    @wrap(torch.amp.GradScaler, "scale")
    def scale(original, scaler, outputs):
        scaled = original(scaler, outputs)
        if scaler.is_enabled() and isinstance(scaled, torch.Tensor):
            models.recording.step.scaler += ["scale twice"] * hasattr(outputs, "prove_is_scaled")
            scaled.prove_is_scaled = True
        return scaled

    for name in ("unscale_", "step"):

        @wrap(torch.amp.GradScaler, name)
        def scaler(original, scaler, optimizer, *args, name=name, **kwargs):
            if scaler.is_enabled():
                models.recording.step.scaler.append(name)
                (models.unscaled.add if name == "unscale_" else models.unscaled.discard)(id(optimizer))
            return original(scaler, optimizer, *args, **kwargs)

    for name in ("clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_"):

        @wrap(nn.utils, name)
        def clip(original, parameters, *args, **kwargs):
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            models.clip(parameters)
            return original(parameters, *args, **kwargs)

    def step_of_plateau(schedule, metrics, *_, **__) -> None:
        models.recording.record.plateaus.append((float(metrics), models.recording.where.line()))

    def step(schedule, *_, **__) -> None:
        models.schedule_calls += not getattr(schedule, "_is_initial", False)

    def take(kind: str):
        return lambda *_, **__: models.recording.facts.taken.add((kind, len(models.recording.steps)))

    schedules = [kind for kind in vars(lr_scheduler).values() if isinstance(kind, type) and "state_dict" in vars(kind)]
    for owner, kind in ((optimizer.Optimizer, "optimizer"), *((schedule, "schedule") for schedule in schedules)):
        before(owner, "state_dict", take(kind))
    before(lr_scheduler.LRScheduler, "__init__", lambda schedule, *_, **__: models.schedules.append(schedule))
    before(lr_scheduler.ReduceLROnPlateau, "step", step_of_plateau)
    before(lr_scheduler.LRScheduler, "step", step)
