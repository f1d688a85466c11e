"""A CPU that claims to be GPUs: what has the host wait for them in a step, and at which line of the project.

Tensors "on cuda:0" are CPU tensors whose memory is labelled so, and DDP's reducer, gloo, pipelines and checkpoints run
for real. `Labels` tells Python the label, `Kernels` sees all that reaches a kernel, also from autograd and C++. It has
no streams and no GPU memory, and refuses only tensors on the wrong device. On a GPU, `errors_on_gpu` asks PyTorch.
"""

import contextlib
import os
import pkgutil
import shlex
import sys
import traceback
from types import SimpleNamespace
from unittest import mock

import run_many
import small_resnets
import torch
import torch._dynamo  # an optimizer imports it, and it refuses to among the stand-ins
from accelerate.state import AcceleratorState
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from utils.run import Run

ROOT = run_many.ROOT
FILE = run_many.FILE.with_name("lying_gpu")
CPU = torch.device("cpu")
WARM_UP = 2  # steps: the first fills caches, and DDP orders its buckets anew in the second
# Kinds of events: the host waits for the GPU, a copy from pageable memory, and kernels.
SYNC, COPY, KERNEL = "sync", "copy", "kernel"
# Of kernels whose result, or its shape, the host waits for.
WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
MOVES = {"to", "as_tensor", "asarray", "tensor"}  # of a tensor, or of numbers on the host
LAUNCHES_NOTHING = {"empty_like", "new_empty", "new_empty_strided", "_unsafe_view"}


def device_of(tensor: torch.Tensor) -> torch.device:
    return getattr(tensor.untyped_storage(), "claimed_device", CPU) if tensor.device.type == "cpu" else tensor.device


def put(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move a tensor, and all that shares its memory, without a copy."""
    tensor.untyped_storage().claimed_device = device
    return tensor


def tensors_in(value) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def as_device(value) -> torch.device | None:
    """What an argument says about a device; None if it is no device."""
    is_name = isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda", "meta")
    if not is_name and not isinstance(value, torch.device):
        return None
    return torch.device("cuda", torch.cuda.current_device()) if str(value) == "cuda" else torch.device(value)


class Events(list):
    """What happened, each with its phase, kind, name and line of the project."""

    phase = "outside"

    def add(self, kind: str, what: str) -> None:
        stack = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe()))
        others = (sys.prefix, __file__)  # the environment may lie in the project's folder
        own = ((file, line) for file, line in stack if file.startswith(str(ROOT)) and not file.startswith(others))
        lines = (f"{os.path.relpath(file, ROOT)}:{line}" for file, line in own)
        self.append(SimpleNamespace(phase=self.phase, kind=kind, what=what, line=next(lines, "?")))

    def waits_in_steps(self) -> list[SimpleNamespace]:
        return [event for event in self if event.phase == "step" and event.kind in (SYNC, COPY)]


class Labels(TorchFunctionMode):
    """What Python is told about devices, and every move between them."""

    events: Events

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), func.__name__
        if func == torch.Tensor.device.__get__:
            return device_of(args[0])
        if func == torch.Tensor.is_cuda.__get__:
            return device_of(args[0]).type == "cuda"
        if name == "pin_memory":
            return args[0]
        if name == "__deepcopy__":  # copies the memory unseen
            return put(func(*args), device_of(args[0]))
        if name in ("tolist", "numpy") and device_of(args[0]) != CPU:
            self.events.add(SYNC, name)
        if name in ("cpu", "cuda"):
            func, name, kwargs["device"] = torch.Tensor.to, "to", name
        kwargs.pop("pin_memory", None)
        asked = (as_device(value) for value in (*args, kwargs.get("device")))
        target = next((device for device in asked if device is not None), None)
        if target is None or target.type == "meta" or func in (torch.device, torch._C._nn._parse_to):
            return func(*args, **kwargs)
        args = [CPU if as_device(value) else value for value in args]
        if "device" in kwargs:
            kwargs["device"] = CPU
        result = func(*args, **kwargs)
        is_tensor = name in MOVES and isinstance(args[0], torch.Tensor)
        source = device_of(args[0]) if is_tensor else CPU
        if is_tensor and source == target:
            return result
        if name in MOVES and source != target and CPU in (source, target) and not kwargs.get("non_blocking"):
            self.events.add(SYNC if target == CPU else COPY, name)
        if is_tensor:
            with _disable_current_modes():
                result = result.clone()
        return put(result, target)


class Kernels(TorchDispatchMode):
    """What is computed where: results are where their tensors are."""

    events: Events

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            kwargs = kwargs or {}
            inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.device.type == "cpu"]
            places = [device_of(tensor) for tensor in inputs]
            device = next((place for place in places if place != CPU), None)
            if func.namespace == "c10d":
                if "barrier" in func.__name__:
                    self.events.add(SYNC, "barrier")
                elif CPU in places:
                    raise RuntimeError(f"{func.__name__} of a tensor on the CPU")
                elif func.__name__.startswith("_allgather_base_"):  # gloo wants shapes that fit, NCCL sizes
                    args = (*(tensor.view(-1) for tensor in args[:2]), *args[2:])
            elif device is not None:
                self.kernel(func, args, inputs, places)
            result = func(*args, **kwargs)
            if device is not None:
                for tensor in tensors_in(result):
                    if not any(tensor is known for known in inputs):
                        put(tensor, device)
            return result

    def kernel(self, func, args, inputs: list, places: list) -> None:
        name = func.overloadpacket.__name__
        in_backward = torch._C._current_graph_task_id() != -1
        # A number on the CPU, () of shape, is an argument of a kernel.
        shaped = {place for tensor, place in zip(inputs, places, strict=True) if tensor.ndim or place != CPU}
        if name in INDEXING:
            indices = [tensor for tensor in args[1] if tensor is not None]
            if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in indices):
                self.events.add(SYNC, f"{name} by a mask")
            elif any(tensor.ndim and device_of(tensor) == CPU for tensor in indices):
                self.events.add(COPY, f"{name} by an index on the CPU")
        elif not WAITS.isdisjoint(func.tags):
            self.events.add(SYNC, name)
        elif len(shaped) > 1 and in_backward and func._schema.is_mutable:
            for tensor in inputs:  # DDP's buckets, which C++ has made
                put(tensor, next(place for place in places if place != CPU))
        elif name == "copy_" and len(shaped) > 1:
            if True not in args[2:] and CPU in places:  # non_blocking
                self.events.add(SYNC if places[0] == CPU else COPY, name)
        elif len(shaped) > 1:
            raise RuntimeError(f"{name} of tensors on {sorted(map(str, shaped))}")
        if not func.is_view and torch.Tag.inplace_view not in func.tags and name not in LAUNCHES_NOTHING:
            self.events.add(KERNEL, name)


def grouped(lists: list[list], with_indices: bool = False) -> dict:
    """torch's own is C++, and does not ask Python for devices."""
    keys = [(tensor.device, tensor.dtype) for tensor in lists[0]]
    groups = {}
    for key in dict.fromkeys(keys):
        indices = [index for index, other in enumerate(keys) if other == key]
        groups[key] = [[column[index] for index in indices] if column else [] for column in lists], indices
    return groups


def replacements(events: Events, gpus: int) -> list:
    """Patches of what a CPU cannot answer, or does not have."""
    answers = {
        "torch.cuda.is_available": True,
        "torch.cuda.is_initialized": True,
        "torch.cuda.is_bf16_supported": True,
        "torch.cuda.device_count": gpus,
        "torch.cuda.current_device": int(os.environ.get("LOCAL_RANK", 0)),
        "torch.cuda.get_device_name": "lying GPU",
        "torch.cuda.mem_get_info": (2**34, 2**34),
        "torch.cuda.max_memory_allocated": 2**30,
        "torch.cuda.set_device": None,
        "torch.cuda.reset_peak_memory_stats": None,
        "torch.cuda._lazy_init": None,
        "torch.cuda.is_current_stream_capturing": False,  # asked up to torch 2.12
        "torch.accelerator.is_available": True,
        "torch.accelerator.current_accelerator": torch.device("cuda"),
        "torch.accelerator.current_stream": SimpleNamespace(is_capturing=lambda: False),
        "torch.distributed.Backend.__new__": "gloo",
        "torch.distributed.distributed_c10d._get_object_coll_device": "cuda",
        # DDP: collectives of tensors that C++ makes on the device of a parameter.
        "torch.distributed._verify_params_across_processes": None,
        "torch.distributed.Reducer._rebuild_buckets": False,
    }
    autocast, is_enabled, dtype = torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype
    generator, future = torch.Generator, torch.futures.Future.__init__
    stand_ins = {
        "torch.cuda.Stream": mock.MagicMock,
        "torch.cuda.synchronize": lambda *_: events.add(SYNC, "synchronize"),
        "torch.cuda.default_generators": (torch.Generator(),) * gpus,
        "torch.Generator": lambda device="cpu": generator(),
        "torch.autocast.__init__": lambda self, device_type, **options: autocast(self, "cpu", **options),
        "torch.is_autocast_enabled": lambda *_: is_enabled("cpu"),
        "torch.get_autocast_dtype": lambda *_: dtype("cpu"),
        "torch.futures.Future.__init__": lambda self, *, devices=None: future(self),
        "torch.Tensor.backward": torch.autograd.backward,  # for Labels to see what hooks do
        "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype": grouped,
        "torch.optim.optimizer._group_tensors_by_device_and_dtype": grouped,
    }
    stand_ins |= {name: mock.MagicMock(return_value=answer) for name, answer in answers.items()}
    patches = []
    for name, stand_in in stand_ins.items():
        owner, _, attribute = name.rpartition(".")  # not mock.patch(name), which finds no torch.optim.optimizer in 3.10
        patches.append(mock.patch.object(pkgutil.resolve_name(owner), attribute, stand_in))
    return patches


@contextlib.contextmanager
def phases(enter):
    """Tell `enter` when a run is in its first steps, "warm-up", in a further one, "step", or "outside" of any.

    The loading of a micro-batch is part of its step; log lines, checkpoints and tests between two steps are not.
    """
    steps, step_done = Run._steps, Run._step_done

    def told_steps(run, *args, **options):
        enter("step" if run.step >= WARM_UP else "warm-up")
        yield from steps(run, *args, **options)
        enter("outside")

    def told_step_done(run, epoch):
        enter("outside")
        step_done(run, epoch)
        enter("step" if run.step >= WARM_UP else "warm-up")

    with mock.patch.multiple(Run, _steps=told_steps, _step_done=told_step_done):
        yield


@contextlib.contextmanager
def lying_gpus(gpus: int = 1):
    """Have this process see GPUs that are not there; gives the Events."""
    gpus = max(gpus, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    kernels, labels = Kernels(), Labels()
    kernels.events = labels.events = events = Events()
    deterministic = torch.are_deterministic_algorithms_enabled()
    with contextlib.ExitStack() as stack:
        for patch in [*replacements(events, gpus), mock.patch.dict(os.environ)]:
            stack.enter_context(patch)
        stack.callback(torch.use_deterministic_algorithms, deterministic)
        stack.enter_context(phases(lambda phase: setattr(events, "phase", phase)))
        with kernels, labels:
            yield events


@contextlib.contextmanager
def errors_on_gpu():
    """The same question on a real GPU: whatever has the host wait in a step raises a RuntimeError there."""

    def enter(phase):
        torch.cuda.set_sync_debug_mode("error" if phase == "step" else "default")

    with phases(enter):
        try:
            yield Events()
        finally:
            enter("outside")


def count(run: list[str], gpus=lying_gpus) -> Events:
    """Run a script in this process.

    Args:
        run: the script and its flags; "--bf16", in front of them, is mixed_precision of a config file.
        gpus: lying_gpus, or errors_on_gpu, which gives no events and raises the first fault.
    """
    script, *flags = run
    precision, flags = ("bf16", flags[1:]) if flags[0] == "--bf16" else ("no", flags)
    AcceleratorState._reset_state()
    with mock.patch.dict(os.environ, ACCELERATE_MIXED_PRECISION=precision), gpus() as events:
        code = run_many.run(script, flags)
    assert code is None, f"{run}: {code}"
    return events


def main():
    """Words: lying or real, then one for each run, as of run_many.py. Fails where a step waits."""
    small_resnets.use_quick(setattr)
    for run in sys.argv[2:]:
        events = count(shlex.split(run), {"lying": lying_gpus, "real": errors_on_gpu}[sys.argv[1]])
        assert events.waits_in_steps() == [], events.waits_in_steps()
        assert any(event.phase == "step" for event in events) == (sys.argv[1] == "lying")


if __name__ == "__main__":
    main()
