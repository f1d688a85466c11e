"""Comparisons of states, which find what would silently make numbers depend on the topology, whatever has changed it.

What is prepared is saved; between two micro-batches of a step, what a checkpoint would hold stays as it is, and
gradients change by backward passes alone; all processes have the same weights and buffers.
"""

import contextlib
import itertools
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from ..agree import compare, same_on_all
from ..console import join, show, stop
from .shards import is_sharded, local_rows, plain_name

AVERAGE_BUFFERS = (
    "average it by BatchNorms of batch_norm.py and `with batch_norms.averaged():`, which also take layers of your own; "
    "or update it outside of forward, from the samples of all processes (gather_samples)"
)
ONCE = (
    "changed between two micro-batches of a step: clear, clip, step and average once per step, by what prepare "
    "returned or under `if accelerator.sync_gradients:`; a loop that means it takes run.steps"
)


def full_name(owner: str, name: str) -> str:
    """The name of a parameter or buffer of the model `owner`, without what its wrappers add."""
    return f"{owner}.{plain_name(name).removeprefix('module.')}"


def sum_bits(accelerator: Accelerator, tensors: dict) -> dict:
    """The sum of the bits of each tensor, of this process's rows; waits for the GPU once.

    Each value counts as an integer of its size: a sum of floating-point numbers would depend on the order of additions.
    """
    sums, integers = [], {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for tensor in map(torch.Tensor.detach, tensors.values()):
        tensor = local_rows(tensor.to_dense() if tensor.layout == torch.sparse_coo else tensor)[0]
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        sums.append(tensor.view(integers[tensor.element_size()]).sum(dtype=torch.int64).to(accelerator.device))
    return dict(zip(tensors, torch.stack(sums).tolist(), strict=True)) if sums else {}


def find_buffers(models: dict[str, nn.Module], is_saved: bool = True) -> dict[str, tuple[torch.Tensor, nn.Module]]:
    """The buffers that checkpoints have, or those that they lack, by `full_name`, and the module of each."""
    found = {}
    for owner, model in models.items():
        for path, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if (name in module._non_persistent_buffers_set) != is_saved:
                    found[full_name(owner, f"{path}.{name}".lstrip("."))] = buffer, module
    return found


def check_prepared(accelerator: Accelerator, checkpoints, is_meant: bool = False) -> list:
    """Stop if a gradient would not be averaged, or a resumed run would begin anew with a model that trains. Collective.

    Returns:
        The prepared optimizers and schedulers that no checkpoint has, unless that is meant. What an earlier run had is
        not asked for.
    """
    prepared = (*accelerator._models, *accelerator._optimizers, *accelerator._schedulers)
    new = [part for part in prepared if not any(part is earlier for earlier in accelerator.of_earlier_runs)]
    accelerator.of_earlier_runs = prepared
    models = [part for part in new if isinstance(part, nn.Module)]
    parts = [part.scheduler if hasattr(part, "scheduler") else part.optimizer for part in new if part not in models]
    known, is_trained = {id(parameter) for model in accelerator._models for parameter in model.parameters()}, {}
    for owner, optimizer in {**checkpoints.optimizers, **{type(part).__name__: part for part in parts}}.items():
        for parameter in itertools.chain(*(group["params"] for group in getattr(optimizer, "param_groups", []))):
            name = checkpoints.names.get(id(parameter), "a parameter")
            is_trained[f"{name}.requires_grad"] = parameter.requires_grad
            if parameter.requires_grad and id(parameter) not in known:
                stop(
                    f"{owner} trains {name} of shape {tuple(parameter.shape)}, which no model from accelerator.prepare "
                    "has, so processes would not average its gradient: make it a parameter of the model, or give "
                    "prepare the optimizer and the module that has it, too"
                )
    same_on_all(is_trained)  # otherwise they would wait for each other's gradients
    saved = {id(parameter) for model in checkpoints.models.values() for parameter in model.parameters()}
    objects = {name: checkpoints.entries[name].save()[0] or {} for name in checkpoints.objects}
    copies = sum_bits(accelerator, {(name, key): t for name in objects for key, t in objects[name].items()})
    for model in models:
        trained = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        is_saved = not trained or not saved.isdisjoint(map(id, trained.values()))
        if not is_saved and not {*sum_bits(accelerator, trained).values()} <= {*copies.values()}:
            stop(
                f"run.start(checkpoint=...) lacks a {type(model).__name__} from accelerator.prepare, which trains "
                f"{join([*trained])}: a resumed run would begin anew with it"
            )
    saved = [*checkpoints.optimizers.values(), *checkpoints.objects.values()]
    has_own = not all(type(part).__module__.startswith("torch.") for part in checkpoints.objects.values())
    return [] if has_own or is_meant else [part for part in parts if not any(part is other for other in saved)]


class StepRule:
    """What changes between two micro-batches of a step, compared in the first step of a launch.

    A loop that is right with one micro-batch per step is wrong with several, without an error, if it clears or clips
    gradients, steps a schedule or averages weights after each of them (github.com/huggingface/accelerate/issues/1299).

    Args:
        is_compared: whether this process has several micro-batches per step; set it to False after the first one.
        generators: that run.seeded seeds.
    """

    def __init__(self, accelerator: Accelerator, checkpoints, is_compared: bool, generators: Sequence):
        self.accelerator, self.checkpoints, self.is_compared = accelerator, checkpoints, is_compared
        self.generators = [generator for generator in generators if hasattr(generator, "get_state")]
        self.said, self.passes, self.after, self.batch = set(), 0, {}, None
        if accelerator.layout.num_slots > 1:
            accelerator.watch_backward = self.backward

    def begin(self, batch, is_first: bool, is_free: bool) -> None:
        """A micro-batch begins; is_first: of its step; is_free: of run.steps, with which a loop means what it does."""
        self.batch, self.is_free, self.passes, self.calls = batch, is_free, 0, type(batch).mean_loss_calls
        if is_first:
            self.had_backward, self.after = set(), {}
        self.start, self.before = self._state(), {}

    def leave(self) -> None:
        """Before the first micro-batch of a step, and between two, nothing is drawn for a backward pass."""
        self.batch = None
        if self.is_compared:
            self.random_states = [generator.get_state() for generator in self.generators]

    @contextlib.contextmanager
    def backward(self):
        """Wraps each backward pass."""
        self.passes += 1
        if self.is_compared and self.batch is None:
            states = zip(self.generators, self.random_states, strict=True)
            is_drawn = any(not torch.equal(generator.get_state(), state) for generator, state in states)
            said = "random numbers, as of dropout, are drawn outside of {}, so they depend on how a step is cut"
            self._say(["run.seeded(batches)"] if is_drawn else [], said, stops=False)
        if self.is_compared and self.passes == 1:
            self.before = now = self._state()
            self._say(changed(self.after, now, "gradient"), f"the gradient of {{}} {ONCE}")
            self._say(changed(self.after, now, "object"), f"{{}} {ONCE}")
            advice = "if it follows the steps, as averages do, update it under `if accelerator.sync_gradients:`"
            self._say(
                changed(self.after, now, "own object"), f"{{}} changed with each micro-batch: {advice}", stops=False
            )
        yield
        self.after = self._state()

    def end(self, is_last: bool) -> None:
        """The loop asks for the next micro-batch; is_last: which begins another step."""
        batch, layout = self.batch, self.accelerator.layout
        self.had_backward |= set() if batch.is_stand_in else {self.passes > 0}
        some = ["accelerator.backward"] if len(self.had_backward) > 1 else []
        self._say(some, "some micro-batches of a step had {}, and one had none: give it its loss, or 0 * loss")
        is_mean = self.calls < type(batch).mean_loss_calls or self.is_free
        given = [] if is_mean or not self.passes else ["batch.mean_loss"]
        self._say(given, "a loss is not from {}, so parts of a batch count equally, whatever their size", stops=False)
        if not self.is_compared:
            return
        now = self._state()
        # At the end of a step, an average of the model may take its buffers.
        names = changed(self.start, self.before if is_last else now, "buffer")
        reason = f"{{}} changed in one micro-batch, of {layout.num_slots} in a step, so numbers depend on their number"
        self._say(names, f"{reason}: {AVERAGE_BUFFERS}", stops=layout.virtual_processes > 0)
        if not self.passes:
            names = changed(self.start, now, "gradient")
            self._say(names, "the gradient of {} changed without accelerator.backward, which every loss needs")
        elif not is_last:
            names = changed(self.start, now, "weight")  # not those that are put back, as in sharpness-aware steps
            self._say([name for name in changed(self.after, now, "weight") if name in names], f"{{}} {ONCE}")
        self.leave()

    def _say(self, names: list[str], sentence: str, stops: bool = True) -> None:
        """Stop if there are names; if a loop means it, or not `stops`, a warning, once for each sentence."""
        if names and stops and not self.is_free:
            stop(sentence.format(join(names)))
        if names and sentence not in self.said and self.accelerator.is_main_process:
            show(f"warning: {sentence.format(join(names))}")
        self.said |= {sentence} if names else set()

    def _state(self) -> dict[tuple, object]:
        """Bits or JSON of what a checkpoint would hold, and of the gradients, by (kind, name, ...). No collective."""
        if not self.is_compared:
            return {}
        checkpoints, tensors, state = self.checkpoints, {}, {}
        optimizers = [*checkpoints.optimizers.values(), *self.accelerator._optimizers]
        for parameter in [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]:
            key = checkpoints.names.get(id(parameter), "a parameter"), id(parameter)
            tensors[("weight", *key)], state[("gradient", *key)] = parameter, None
            tensors |= {("gradient", *key): parameter.grad} if parameter.grad is not None else {}
        averages = [model for model in checkpoints.models.values() if isinstance(model, AveragedModel)]
        of_averages = {id(module) for average in averages for module in average.modules()}
        for name, (buffer, module) in find_buffers(checkpoints.models).items():
            is_mean = isinstance(module, nn.SyncBatchNorm) or getattr(module, "is_averaged", False)
            if module.training and not is_mean:
                tensors["object" if id(module) in of_averages else "buffer", name, buffer.shape] = buffer
        for owner, part in {**checkpoints.optimizers, **checkpoints.objects}.items():
            kind = "object" if owner in checkpoints.optimizers or isinstance(part, LRScheduler) else "own object"
            saved, state[kind, owner] = checkpoints.entries[owner].save()
            tensors |= {(kind, owner, key): tensor for key, tensor in (saved or {}).items()}
        return state | sum_bits(self.accelerator, tensors)


def changed(before: dict[tuple, object], now: dict[tuple, object], kind: str) -> list[str]:
    """The names of one kind that both states have, with different values: one of a new shape is a cache."""
    return [*dict.fromkeys(key[1] for key in now if key[0] == kind and before.get(key, now[key]) != now[key])]


def check(accelerator: Accelerator, models: dict[str, nn.Module], warned: set[str], is_first: bool) -> None:
    """Stop if parameters or buffers of models from `prepare` differ; sharded ones, between replicas. Collective.

    Buffers that DDP broadcasts are named in a warning: the next forward pass begins with rank 0's, which are saved.

    Args:
        warned: the buffers that were named before; is updated.
        is_first: also look at buffers that no checkpoint has: later they may depend on a test's samples.
    """
    tensors, mild, has_replicas = {}, {}, accelerator.layout.replicas > 1  # with HSDP, of each shard
    for owner, model in models.items():
        ddp = [part for part in model.modules() if isinstance(part, DistributedDataParallel) and part.broadcast_buffers]
        # With virtual processes, no forward pass changes a buffer.
        followed = {id(b) for part in ddp for b in part.buffers() if not accelerator.layout.virtual_processes}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor) and (has_replicas or not is_sharded(tensor)):
                (mild if id(tensor) in followed else tensors)[full_name(owner, name)] = tensor
    if is_first:
        mild |= {name: buffer for name, (buffer, _) in find_buffers(models, is_saved=False).items()}
    sums = sum_bits(accelerator, tensors)
    if any(map(is_sharded, tensors.values())):
        whole = torch.tensor([*sums.values()], device=accelerator.device)
        distributed.all_reduce(whole, group=accelerator.mesh.get_group("shards"))
        sums |= {name: s for name, s in zip(sums, whole.tolist(), strict=True) if is_sharded(tensors[name])}
    mild_sums = sum_bits(accelerator, {(name, tuple(buffer.shape)): buffer for name, buffer in mild.items()})
    _, ranks, differing = compare({"": accelerator.sharded_calls} | sums | mild_sums)
    if "" in differing:
        stop(
            f"{ranks[0]} has called other sharded layers than {ranks[1]}: FSDP needs the same calls on all processes, "
            "also of a layer without samples, such as an expert"
        )
    if names := [name for name in differing if name in tensors]:
        tensor = tensors[names[0]]
        if not isinstance(tensor, nn.Parameter):
            advice = f"This buffer depends on the process's own samples: {AVERAGE_BUFFERS}"
        else:
            advice = (
                "Gradients are averaged by accelerator.backward alone, once per forward pass of the prepared model, of "
                "parameters that required them at prepare; and nothing else may change a weight on one process, as "
                "nn.Embedding(max_norm=...) does"
            )
        stop(f"the processes have different weights: {names[0]} differs between rank 0 and {ranks[0]}. {advice}")
    # None: of another shape, so it is a cache.
    names = sorted({key[0] for key, pair in differing.items() if None not in pair} - warned)
    if names and accelerator.is_main_process:
        show(f"warning: {join(names)} differs between processes, so numbers depend on their number: {AVERAGE_BUFFERS}")
    warned.update(names)
