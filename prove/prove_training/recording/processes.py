"""The collective calls that the script makes."""

import contextlib
import os
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from ..tensors import local
from .where import before, wrap

COLLECTIVES = ("all_reduce", "reduce", "all_gather", "gather", "all_gather_object", "gather_object")
COLLECTIVES += ("all_gather_into_tensor", "all_gather_single", "gather_into_tensor", "gather_single")
COLLECTIVES += ("all_gather_coalesced", "all_reduce_coalesced")
IN_OPTIMIZERS = ("reduce_scatter", "reduce_scatter_tensor", "broadcast", "all_to_all", "all_to_all_single")
IN_OPTIMIZERS += ("reduce_scatter_single",)
OF_ACCELERATOR = ("gather", "gather_for_metrics", "reduce")
OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Processes:
    """The collective calls of the script, in the step or the evaluation in which they are made."""

    def __init__(self, recording):
        self.recording, self.depth = recording, 0
        # A file, so that the calls are known even if the process dies.
        path = Path(recording.plan.output, f"calls_{recording.rank}.txt")
        self.calls = open(path, "w", buffering=1)  # noqa: SIM115  until the end

    @contextlib.contextmanager
    def calling(self, name: str = "", args: tuple = ()):
        """Record a collective call `name`, if any. Calls that a library makes within it are not the script's."""
        recording = self.recording
        if name and not self.depth:
            self.note_in_step()
            line = recording.where.line()
            (recording.evaluations.current or recording.step).collectives.append((name, line))
            tensors = [value for value in args if isinstance(value, torch.Tensor)]
            shapes = " and ".join("x".join(map(str, tensor.shape)) or "1" for tensor in tensors)
            self._note_weights(name, line, tensors)
            self._note_own_gradients()
            self.write(name, line, shapes)
            is_of_loss = torch.is_grad_enabled() and not recording.step.micro_batches  # and not for a log
            has_gradient = any(each.ndim > 1 and each.requires_grad for each in tensors)
            if is_of_loss and has_gradient and ("gather" in name or name.startswith("all_reduce")):
                recording.step.gathers.append((name, line))
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def _note_weights(self, name: str, line: str, tensors: list[torch.Tensor]) -> None:
        """Weights that are averaged or exchanged after a step."""
        recording = self.recording
        if name.startswith(("all_reduce", "all_gather", "broadcast")) and not recording.step.micro_batches:
            own = {local(parameter).data_ptr() for parameter in recording.models.parameters()}
            if recording.steps and own.intersection(tensor.data_ptr() for tensor in tensors):
                recording.facts.averages_weights = line

    def _note_own_gradients(self) -> None:
        """Those of a step that averages by hand."""
        models, step = self.recording.models, self.recording.step
        is_by_hand = step.micro_batches and not (step.own or models.in_backward or self.recording.facts.ddp)
        if is_by_hand and torch.distributed.is_initialized() and models.stepping is None:
            step.own = models.tensors_of(value=lambda each: each.grad)

    def write(self, name: str, line: str, shapes: str = "") -> None:
        self.calls.write(f"{len(self.recording.steps)} {name} {line} {shapes}\n")

    def note_broadcast(self, tensor: torch.Tensor, *_, **__) -> None:
        """In an evaluation it may be the name of a folder, in which all put their results, as mmengine does."""
        line = self.recording.where.line()
        self._note_weights("broadcast", line, [tensor])
        if self.recording.evaluations.current:
            self.recording.evaluations.current.collectives.append(("broadcast", line))

    def note_in_step(self, *_, **__) -> None:
        """The optimizer itself makes a collective call, as one whose state is divided over the processes does."""
        if self.recording.models.stepping is not None:
            self.recording.step.in_step = True

    def watch(self, owner, names: tuple[str, ...]) -> None:
        for name in filter(vars(owner).__contains__, names):  # some are new

            @wrap(owner, name)
            def collective(original, *args, name=name, **kwargs):
                extreme = {dist.ReduceOp.MAX: "(MAX)", dist.ReduceOp.MIN: "(MIN)"}
                operation = "".join(extreme.get(each, "") for each in (*args, *kwargs.values()) if is_operation(each))
                with self.calling(name + operation, (*args, *kwargs.values())):
                    return original(*args, **kwargs)


def is_operation(value) -> bool:
    return isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType))


def install(recording) -> None:
    recording.processes.watch(dist, COLLECTIVES)
    before(dist, "broadcast", recording.processes.note_broadcast)
    for name in filter(vars(dist).__contains__, IN_OPTIMIZERS):
        before(dist, name, recording.processes.note_in_step)
    before(  # also in an evaluation
        DistributedDataParallel,
        "_sync_buffers",
        lambda _: recording.processes.write("DistributedDataParallel.forward", recording.where.line()),
    )
    before(Join, "__enter__", lambda _: setattr(recording.facts, "join", recording.where.line()))

    with contextlib.suppress(ImportError):
        install_accelerate(recording)


def install_accelerate(recording) -> None:
    import accelerate
    from accelerate import local_sgd, state

    recording.processes.watch(accelerate.Accelerator, OF_ACCELERATOR)

    @wrap(state.PartialState, "__init__")
    def init_state(original, self, *args, **kwargs):
        if recording.plan.processes > 1 or state.PartialState._shared_state:  # it is made once
            return original(self, *args, **kwargs)
        with mock.patch.dict(os.environ):  # as without a launcher
            for name in OF_LAUNCHERS:
                os.environ.pop(name, None)
            return original(self, *args, **kwargs)

    @wrap(state.PartialState, "set_device")
    def set_device(original, self):
        original(self)
        if self.device.type == "cpu":
            self.device = torch.device("cpu")  # a tensor that is moved to "cpu:0" is copied

    @wrap(accelerate.Accelerator, "__init__")
    def init(original, self, *args, **kwargs):
        if kwargs.get("mixed_precision") not in (None, "no"):
            kwargs["mixed_precision"] = "no"
            recording.facts.switched_off.add("mixed precision")
        original(self, *args, **kwargs)
        recording.facts.accelerate = recording.where.line()
        recording.batches.splits_batches = bool(self.split_batches)

    # Else join_uneven_inputs does nothing on CPUs.
    accelerate.Accelerator.multi_device = property(lambda self: self.num_processes > 1)
    before(
        local_sgd.LocalSGD, "__init__", lambda *_, **__: setattr(recording.facts, "local_sgd", recording.where.line())
    )
