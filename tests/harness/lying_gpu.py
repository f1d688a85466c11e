"""A CPU that claims to be GPUs: what would stop the host, counted by phase of a run and line of the project.

    python tests/harness/lying_gpu.py    # per script: kernels, synchronisations and copies per step

Tensors "on cuda:0" are CPU tensors whose memory is labelled so, and DDP's reducer, gloo, pipelines and checkpoints run
for real. `Labels` tells Python the label, `Kernels` sees all that reaches a kernel, also from autograd and C++. It does
not see streams, GPU memory, or what NCCL and CUDA refuse. On a real GPU, `errors_on_gpu` asks PyTorch the same.
"""

import contextlib
import functools
import importlib
import json
import os
import shlex
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import run_many
import small_resnets
import torch
import torch._dynamo  # an optimizer imports it, and it refuses to among the stand-ins
import torch.distributed as dist
from accelerate.state import AcceleratorState
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_suffix("")  # as `launcher(script=...)` takes it
CPU = torch.device("cpu")
# Events: the host waits for the GPU, a copy from pageable memory, an expression over two devices, a collective of a CPU
# tensor; kernels, and those that autograd calls.
FAULTS = SYNC, COPY, MIXED, CPU_COLLECTIVE = ("sync", "copy", "mixed", "cpu_collective")
KERNEL, BACKWARD = "kernel", "backward"
WARM_UP = 2  # steps: the first fills caches, and DDP orders its buckets anew in the second
READS = {"tolist", "numpy", "__array__", "__repr__", "__format__"}  # of Tensor: what the host gets to see
# Kernels whose result, or its shape, the host waits for.
WAITS = {"_local_scalar_dense", "bincount", "equal", "masked_select", "nonzero", "unique_consecutive", "unique_dim"}
WAITS |= {"_unique", "_unique2", "repeat_interleave", "histc", "is_nonzero", "masked_scatter"}
MAKERS = {"as_tensor", "asarray", "tensor"}  # of a tensor, from numbers on the host
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
LAUNCHES_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh"}
LAUNCHES_NOTHING |= {"_unsafe_view", "_reshape_alias", "resize_", "set_", "_local_scalar_dense", "is_same_size"}


def device_of(tensor: torch.Tensor) -> torch.device:
    with torch._C.DisableTorchFunction():
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return tensor.device
        return getattr(tensor.untyped_storage(), "claimed_device", CPU)


def put(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Move a tensor, and all that shares its memory, without a copy."""
    with torch._C.DisableTorchFunction():
        if tensor.device.type == "cpu" and tensor.layout == torch.strided:
            tensor.untyped_storage().claimed_device = device
    return tensor


def tensors_in(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for part in value for tensor in tensors_in(part)]


def as_device(value) -> torch.device | None:
    """What an argument says about a device; None if it is no device."""
    is_name = isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda", "meta")
    if is_name or isinstance(value, torch.device):
        device = torch.device(value)
        return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device
    return None


# What is counted, of one process: 2 + 3 steps. The data and the number of steps are added by `with_data`.
RUNS = [
    "mnist_mlp --batch_size 8",
    "mnist_mlp --bf16 --batch_size 8 --gradient_accumulation_steps 2",
    "mnist_mlp --batch_size 8 --virtual_processes 4",
    "gradient_accumulation --batch_size 8",
    "gradient_accumulation --batch_size 8 --variable_length --gradient_accumulation_steps 2",
    "transformer --layers 2 --dim 32",
    "transformer --bf16 --separate_documents --layers 2 --dim 32 --gradient_accumulation_steps 2",
    "resnet50 --batch_size 8 --mixup 0.2 --cutmix 1.0 --ema_decay 0.9",
    "model_split --batch_size 8",
]
STEPS = 3


def with_data(script: str, flags: list, images: Path) -> list:
    """The flags of a short run. images: a folder of parquet files."""
    flags = [*flags, "--dataset", ROOT / "accelerate_configs" if script == "transformer" else images]
    flags += ["--max_steps", WARM_UP + STEPS]
    if script == "transformer":
        flags += ["--vocabulary", 257, "--num_tokens", 3]
    if script == "resnet50":
        flags += ["--image_size", 16, "--num_workers", 0]
    if script == "model_split":
        flags += ["--num_microbatches", 2, "--max_test_samples", 8]
    return flags


def is_own(file: str) -> bool:
    """Whether a file is the project's: not the environment's, which may lie in its folder, and not this one."""
    return file.startswith(str(ROOT)) and not file.startswith(sys.prefix) and file != __file__


class Events(Counter):
    """How often what happened where: (phase, kind, what, line of the project)."""

    phase = "outside"

    def add(self, kind: str, what: str) -> None:
        frame = sys._getframe(1)
        while frame and not is_own(frame.f_code.co_filename):
            frame = frame.f_back
        line = f"{os.path.relpath(frame.f_code.co_filename, ROOT)}:{frame.f_lineno}" if frame else "?"
        self[self.phase, kind, what, line] += 1

    def of(self, phase: str, *kinds: str) -> list[tuple[int, str]]:
        """The events of these kinds: how often, and "kind what line"."""
        found = [(count, " ".join(key[1:])) for key, count in self.items() if key[0] == phase and key[1] in kinds]
        return sorted(found, reverse=True)

    def total(self, phase: str, *kinds: str) -> int:
        return sum(count for count, _ in self.of(phase, *kinds))


class Labels(TorchFunctionMode):
    """What Python is told about devices, and every move between them."""

    def __init__(self, events: Events, kernels: "Kernels"):
        super().__init__()
        self.events, self.kernels = events, kernels

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), func.__name__
        if name == "__get__":
            return self.attribute(func, args)
        if func is torch.Tensor.backward:  # with this mode on in the hooks, too
            kwargs["grad_tensors"] = kwargs.pop("gradient", None)
            with self:
                return torch.autograd.backward(*args, **kwargs)
        if name in READS and device_of(args[0]) != CPU:
            self.events.add(SYNC, name)
            with self.kernels.paused():
                return func(*args, **kwargs)
        if name == "get_device":
            return device_of(args[0]).index if device_of(args[0]) != CPU else -1
        if func in (torch.device, torch._C._nn._parse_to):
            return func(*args, **kwargs)
        if name == "pin_memory":
            return args[0]
        if name in ("cpu", "cuda"):
            func, name, kwargs = torch.Tensor.to, "to", {**kwargs, "device": name}
        kwargs.pop("pin_memory", None)
        asked = [as_device(value) for value in (*args, kwargs.get("device"))]
        asked += [device_of(value) for value in args[1:2] if name == "to" and isinstance(value, torch.Tensor)]
        target = next((device for device in asked if device is not None), None)
        if name == "__deepcopy__":  # copies the memory unseen
            return put(func(*args, **kwargs), device_of(args[0]))
        if target is None or target.type == "meta":
            return func(*args, **kwargs)
        args = [CPU if as_device(value) else value for value in args]
        if kwargs.get("device") is not None:
            kwargs["device"] = CPU
        is_move = name == "to" or (name in MAKERS and isinstance(args[0], torch.Tensor))
        source = device_of(args[0]) if is_move else CPU
        result = func(*args, **kwargs)
        if is_move and source == target:
            return result
        is_waiting = not (kwargs.get("non_blocking") or (len(args) > 2 and args[-1] is True))
        if (is_move or name in MAKERS) and is_waiting and CPU in (source, target) and source != target:
            self.events.add(SYNC if target == CPU else COPY, name)
        for tensor in tensors_in(result):
            if is_move:
                with self.kernels.paused():
                    result = tensor = tensor.clone()
            put(tensor, target)
        return result

    def attribute(self, func, args):
        name = func.__self__.__name__
        if name == "device":
            return device_of(args[0])
        if name in ("is_cuda", "is_cpu"):
            return device_of(args[0]).type == name[3:]
        return func(*args)


class Kernels(TorchDispatchMode):
    """What is computed where: results are where their tensors are."""

    is_paused = in_reducer = False

    def __init__(self, events: Events):
        super().__init__()
        self.events = events

    @contextlib.contextmanager
    def paused(self):
        with mock.patch.object(self, "is_paused", True):
            yield

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            kwargs = kwargs or {}
            inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.device.type == "cpu"]
            places = [device_of(tensor) for tensor in inputs]
            device = next((place for place in places if place != CPU), None)
            if not self.is_paused:
                if func.namespace == "c10d":
                    self.collective(func, places)
                    if func.__name__.startswith("_allgather_base_"):  # gloo wants shapes that fit, NCCL sizes
                        args = (*(tensor.view(-1) for tensor in args[:2]), *args[2:])
                elif device is not None:
                    self.kernel(func, args, inputs, places)
            result = func(*args, **kwargs)
            if device is not None:
                for tensor in tensors_in(result):
                    if device_of(tensor) == CPU and not any(tensor is known for known in inputs):
                        put(tensor, device)
            return result

    def told(self, function):
        """A function of DDP's reducer that asks C++ for a device, and makes tensors there."""

        def call(*args):
            with mock.patch.object(self, "in_reducer", True):
                return function(*args)

        return call

    def collective(self, func, places) -> None:
        if "barrier" in func.__name__:
            self.events.add(SYNC, "barrier")
        elif CPU in places and not self.in_reducer:
            self.events.add(CPU_COLLECTIVE, func.__name__)

    def kernel(self, func, args, inputs, places) -> None:
        name, events = func.overloadpacket.__name__, self.events
        in_backward = self.in_reducer or torch._C._current_graph_task_id() != -1
        # A number on the CPU, () of shape, is an argument of a kernel.
        shaped = {place for tensor, place in zip(inputs, places, strict=True) if tensor.ndim or place != CPU}
        if name in WAITS:
            events.add(SYNC, name)
        elif name in INDEXING:
            indices = [tensor for tensor in args[1] if tensor is not None]
            if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in indices):
                events.add(SYNC, f"{name} by a mask")
            elif any(tensor.ndim and device_of(tensor) == CPU for tensor in indices):
                events.add(COPY, f"{name} by an index on the CPU")
        elif len(shaped) > 1 and in_backward and func._schema.is_mutable:
            for tensor in inputs:  # DDP's buckets, which C++ has made
                put(tensor, next(place for place in places if place != CPU))
        elif name == "copy_" and len(shaped) > 1:
            if True not in args[2:] and CPU in places:  # non_blocking
                events.add(SYNC if places[0] == CPU else COPY, name)
        elif len(shaped) > 1:
            events.add(MIXED, name)
        if not func.is_view and name not in LAUNCHES_NOTHING:
            events.add(BACKWARD if in_backward else KERNEL, name)


class Stream:
    """A stream, or an event: CPU tensors are ready as soon as one has them."""

    def __init__(self, *_, **__):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __getattr__(self, name):
        return lambda *_, **__: None


class Generator(torch.Generator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls)


def replacements(events: Events, kernels: Kernels, gpus: int):
    """What a CPU cannot answer, as (object, name, stand-in)."""
    nothing, rank = (lambda *_, **__: None), int(os.environ.get("LOCAL_RANK", 0))
    properties = SimpleNamespace(name="lying GPU", total_memory=2**34, major=9, minor=0, multi_processor_count=100)
    waits = lambda *_, **__: events.add(SYNC, "synchronize")  # noqa: E731
    answers = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": True,
        "device_count": gpus,
        "current_device": rank,
        "get_device_name": properties.name,
        "get_device_properties": properties,
        "get_device_capability": (9, 0),
        "mem_get_info": (2**34, 2**34),
        "memory_allocated": 0,
        "max_memory_allocated": 2**30,
        "is_current_stream_capturing": False,
        "current_stream": Stream(),
    }
    for name, answer in answers.items():
        yield torch.cuda, name, lambda *_, answer=answer, **__: answer
    for name in ("set_device", "manual_seed", "manual_seed_all", "reset_peak_memory_stats", "_lazy_init"):
        yield torch.cuda, name, nothing
    yield torch.cuda, "synchronize", waits
    yield torch.cuda, "Stream", Stream
    yield torch.cuda, "Event", Stream
    yield torch.cuda, "stream", lambda stream: stream
    yield torch.cuda, "default_generators", (torch.Generator(),) * gpus
    yield torch.cuda, "get_rng_state", lambda *_: torch.get_rng_state()
    yield torch.cuda, "set_rng_state", nothing
    yield torch.cuda.nccl, "version", lambda: (2, 30, 7)
    yield torch.accelerator, "is_available", lambda: True
    yield torch.accelerator, "device_count", lambda: gpus
    yield torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cuda")
    yield torch.accelerator, "current_device_index", lambda: rank
    yield torch.accelerator, "set_device_index", nothing
    yield torch.accelerator, "current_stream", lambda *_: Stream()
    yield torch.accelerator, "synchronize", waits
    yield torch, "Generator", Generator
    future = torch.futures.Future.__init__
    yield torch.futures.Future, "__init__", lambda self, *, devices=None: future(self)
    yield torch.Tensor, "record_stream", nothing
    autocast = torch.autocast.__init__

    def autocast_on_cpu(self, device_type, *args, **kwargs):
        autocast(self, device_type.replace("cuda", "cpu"), *args, **kwargs)

    yield torch.autocast, "__init__", autocast_on_cpu
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        original = getattr(torch, name)
        yield torch, name, lambda kind="cuda", original=original: original(kind.replace("cuda", "cpu"))
    start, new_group = dist.init_process_group, dist.new_group
    yield dist, "init_process_group", lambda backend, **kwargs: start("gloo", **kwargs)

    def new_gloo_group(ranks=None, timeout=None, backend=None, *args, **kwargs):
        return new_group(ranks, timeout, backend and "gloo", *args, **kwargs)

    yield dist.distributed_c10d, "new_group", new_gloo_group
    for owner, name in ((dist.Reducer, "_rebuild_buckets"), (dist, "_verify_params_across_processes")):
        yield owner, name, kernels.told(getattr(owner, name))
    yield dist.distributed_c10d, "_get_object_coll_device", lambda *_: "cuda"

    def grouped(lists, with_indices=False):  # torch's is C++
        groups = {}
        for index, first in enumerate(lists[0]):
            group, indices = groups.setdefault((device_of(first), first.dtype), ([[] for _ in lists], []))
            for column, tensors in zip(group, lists, strict=True):
                column += tensors[index : index + 1]
            indices += [index] * with_indices
        return groups

    for module in ("utils._foreach_utils", "nn.utils.clip_grad", "optim.optimizer"):
        yield importlib.import_module(f"torch.{module}"), "_group_tensors_by_device_and_dtype", grouped


@contextlib.contextmanager
def phases(enter):
    """Tell `enter` when a run is in its first steps, "warm-up", in a further one, "step", or "outside" of any.

    The loading of a micro-batch is part of its step; log lines, checkpoints and tests between two steps are not.
    """
    from utils.run import Run

    loop = Run._loop

    def told_loop(run, items, items_per_step, *args):
        first = run.step + WARM_UP

        def in_step():
            enter("step" if run.step >= first else "warm-up")

        def loaded():
            iterator = iter(items)
            while True:
                in_step()
                try:
                    yield next(iterator)
                except StopIteration:
                    return

        for item in loop(run, loaded(), items_per_step, *args):
            yield item
            enter("outside")
        enter("outside")

    with mock.patch.object(Run, "_loop", told_loop):
        yield


@contextlib.contextmanager
def lying_gpus(gpus: int = 1):
    """Have this process see GPUs that are not there; gives the Events."""
    gpus = max(gpus, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    events = Events()
    kernels = Kernels(events)
    deterministic = torch.are_deterministic_algorithms_enabled()
    with contextlib.ExitStack() as stack:
        for owner, name, stand_in in replacements(events, kernels, gpus):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        stack.enter_context(mock.patch.dict(os.environ))
        stack.callback(torch.use_deterministic_algorithms, deterministic)
        stack.enter_context(phases(lambda phase: setattr(events, "phase", phase)))
        stack.enter_context(kernels)
        stack.enter_context(Labels(events, kernels))
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


def count(script: str, flags: list, gpus=lying_gpus) -> Events:
    """Run a script in this process.

    Args:
        flags: of the script; "--bf16", in front, is mixed_precision of a config file.
        gpus: lying_gpus, or errors_on_gpu, which gives no events and raises the first fault.
    """
    precision, flags = ("bf16", flags[1:]) if flags[0] == "--bf16" else ("no", flags)
    AcceleratorState._reset_state()
    with mock.patch.dict(os.environ, ACCELERATE_MIXED_PRECISION=precision), gpus() as events:
        code = run_many.run(script, flags)
    assert code is None, f"{script} {flags}: {code}"
    return events


def make_small(setattr) -> None:
    """Use small ResNets, whose blocks are measured once. `setattr` is pytest's, to undo it, or Python's."""
    from scripts import model_split

    small_resnets.use_narrow(setattr)
    small_resnets.draw_nothing(setattr)
    setattr(model_split, "measure_blocks", functools.partial(model_split.measure_blocks, rounds=1))


def table(folder: Path) -> None:
    """Print what each script does in a step of one process, and how often it waits outside of the steps, in all."""
    sys.path.insert(0, str(ROOT / "tests"))
    from conftest import first_images

    make_small(setattr)
    data = first_images(folder, 203, 23)
    print(f"{'':75}" + "".join(f"{name:>10}" for name in ("kernels", "autograd", "syncs", "copies", "outside")))
    for number, run in enumerate(RUNS):
        script, *flags = run.split()
        flags = with_data(script, flags, data)
        gpus = functools.partial(lying_gpus, 2 if script == "model_split" else 1)
        with contextlib.redirect_stdout(None):
            events = count(script, [*flags, "--output_dir", folder / str(number)], gpus)
        steps = [events.total("step", kind) / STEPS for kind in (KERNEL, BACKWARD, SYNC, COPY)]
        print(f"{run:75}" + "".join(f"{number:10.0f}" for number in [*steps, events.total("outside", SYNC, COPY)]))


def main():
    """Run scripts one after the other, as run_many.py does; each leaves its events in its --output_dir.

    The words: lying or real, then a word for each run.
    """
    gpus = {"lying": lying_gpus, "real": errors_on_gpu}[sys.argv[1]]
    make_small(setattr)
    for words in map(shlex.split, sys.argv[2:]):
        script, *flags = words
        events = count(script, flags, gpus)
        file = Path(flags[flags.index("--output_dir") + 1], f"events_{os.environ.get('RANK', 0)}.json")
        file.write_text(json.dumps([[*key, number] for key, number in events.items()]))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main()
    else:
        with tempfile.TemporaryDirectory() as folder:
            table(Path(folder))
