"""Watches the first step of a launch for what would make numbers depend on the number of processes.

DDP says nothing of a parameter that it does not know, of a buffer that follows the samples of rank 0 alone, or of a
weight that a forward pass overwrites: the processes train on, with different numbers.
"""

import functools
import itertools

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn
from torch.optim import Optimizer

from ..agree import compare
from ..console import show, stop
from .shards import plain_name

AVERAGE_BUFFERS = (
    "average it with BatchNorms of utils/parallel/batch_norm.py, which also takes the classes of your own layers; or "
    "update it outside of forward, from the samples of all processes (gather_samples of utils/sample_metrics.py)"
)


def check_parameters(accelerator: Accelerator, optimizers: dict[str, Optimizer], names: dict[int, str]) -> None:
    """Stop if gradients of a parameter to train would not be averaged over the processes; names: by id. Collective."""
    known, is_trained = {id(parameter) for model in accelerator._models for parameter in model.parameters()}, {}
    for name, optimizer in optimizers.items():
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            is_trained[names[id(parameter)]] = parameter.requires_grad
            if parameter.requires_grad and id(parameter) not in known:
                stop(
                    f"{name} trains {names[id(parameter)]} of shape {tuple(parameter.shape)}, which no model from "
                    "accelerator.prepare has, so processes would not average its gradient: make it a parameter of the "
                    "model, or give prepare the module that has it, too"
                )
    _, ranks, differing = compare(is_trained)
    for name, (on_other, _) in differing.items():
        trains, freezes = ranks if on_other else ranks[::-1]
        stop(f"{name} is trained on {trains}, and frozen or missing on {freezes}: freeze the same parameters on all")


def full_name(owner: str, name: str) -> str:
    """The name of a parameter or buffer of the model `owner`, without what its wrappers add."""
    return f"{owner}.{plain_name(name).removeprefix('module.')}"


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's values, each reinterpreted as an integer of the same size; int64, ()."""
    tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integers[tensor.element_size()]).sum(dtype=torch.int64)


class FirstStep:
    """Watches the forward passes of models in training until `end`.

    Args:
        models: by name, as `prepare` returned them.

    Attributes:
        called: the models whose forward pass ran.
        written: the parameters that a forward pass wrote into, by `full_name`.
        changed: the buffers that a forward pass changed, and their modules.
        unsaved: of these, the ones that are in no checkpoint.
    """

    def __init__(self, accelerator: Accelerator, models: dict[str, nn.Module]):
        self.accelerator = accelerator
        self.called: set[str] = set()
        self.written: set[str] = set()
        self.changed: dict[str, nn.Module] = {}
        self.unsaved: set[str] = set()
        self.before, self.handles = {}, []
        for owner, model in models.items():
            if model._compiled_call_impl is None:  # it would be compiled with the hooks, and again without them
                self.handles.append(model.register_forward_pre_hook(functools.partial(self._begins, owner)))
                self.handles.append(model.register_forward_hook(functools.partial(self._has_run, owner)))
            else:
                self.called.add(owner)

    def _begins(self, owner: str, model: nn.Module, _) -> None:
        self.before[owner] = self._bits(model), versions(model)

    def _has_run(self, owner: str, model: nn.Module, *_) -> None:
        self.called.add(owner)
        before = self.before.pop(owner, None)
        if before is None or not model.training:  # a model may call itself
            return
        bits_before, versions_before = before
        for (path, name, shape), now in self._bits(model).items():
            if bits_before.get((path, name, shape), now) != now:  # one of a new shape is a cache
                module, changed = model.get_submodule(path), full_name(owner, f"{path}.{name}".lstrip("."))
                self.changed[changed] = module
                if name in module._non_persistent_buffers_set:
                    self.unsaved.add(changed)
        now = versions(model)
        self.written |= {full_name(owner, name) for name in now if now[name] > versions_before.get(name, 0)}

    def _bits(self, model: nn.Module) -> dict[tuple, int]:
        """`sum_of_bits` of each buffer, by the path of its module, its name and its shape."""
        sums = {}
        for path, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                sums[path, name, buffer.shape] = sum_of_bits(buffer).to(self.accelerator.device)
        return dict(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True)) if sums else {}

    def end(self) -> None:
        """Stop watching; say what was found. Collective."""
        for handle in self.handles:
            handle.remove()
        layout, self.before, self.handles = self.accelerator.layout, {}, []
        gathered = gather_object([(self.written, self.not_averaged(), self.unsaved)])
        written, changed, unsaved = (sorted(set().union(*of_ranks)) for of_ranks in zip(*gathered, strict=True))
        if unsaved and self.accelerator.is_main_process:
            show(
                f"warning: the forward pass changes {join(unsaved)}, which no checkpoint has (persistent=False): after "
                "resuming it begins anew; register it with persistent=True",
                "yellow",
            )
        if written and layout.shards > 1:
            stop(
                f"the forward pass writes into {join(written)}: FSDP gathers a copy of a weight for it, so what is "
                "written there is lost; write after optimizer.step(), under torch.no_grad()"
            )
        if written and layout.processes == 1 < layout.num_slots:  # several processes stop if theirs differ
            advice = "if it depends on the samples, numbers depend on the micro-batches: write after optimizer.step()"
            show(f"warning: the forward pass writes into {join(written)}; {advice}", "yellow")
        if not changed or layout.num_slots == 1:
            return
        reason = f"the forward pass changes {join(changed)} by one micro-batch, of {layout.num_slots} in a step"
        if layout.virtual_processes:
            stop(f"{reason}, which --virtual_processes cannot add up: {AVERAGE_BUFFERS}")
        if self.accelerator.is_main_process:
            show(f"warning: {reason}, so numbers depend on the number of processes: {AVERAGE_BUFFERS}", "yellow")

    def not_averaged(self) -> set[str]:
        """The changed buffers that nothing makes the same on all processes."""
        own = {name: module for name, module in self.changed.items() if not isinstance(module, nn.SyncBatchNorm)}
        return {name for name, module in own.items() if not getattr(module, "is_averaged", False)}


def versions(model: nn.Module) -> dict[str, int]:
    """How often each parameter was written into; under FSDP, the gathered copy of each."""
    states = [module._get_fsdp_state() for module in model.modules() if hasattr(module, "_get_fsdp_state")]
    if not states:
        return {name: parameter._version for name, parameter in model.named_parameters()}
    # In older versions of torch a module has one group, or None.
    groups = [getattr(state, "_fsdp_param_groups", [getattr(state, "_fsdp_param_group", None)]) for state in states]
    parameters = [p for group in itertools.chain(*groups) if group for p in group.fsdp_params]
    # There is none before the first forward pass.
    return {p._param_fqn: p._unsharded_param._version for p in parameters if hasattr(p, "_unsharded_param")}


def join(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
