"""Keeps on the CPU what a script puts on a GPU, and says that there is a GPU for each process.

All of torch.cuda that a script may call on a machine with a GPU is here: what can be answered is, and at the rest there
is no verdict, because it needs a GPU.
"""

import collections
import os
import sys
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

from .where import pretend

MEMORY = 80 * 2**30  # bytes
PROPERTIES = SimpleNamespace(name="pretended GPU", major=8, minor=0, total_memory=MEMORY, multi_processor_count=108)
NOTHING = ("set_device", "set_device_index", "set_device_idx", "set_stream", "synchronize", "empty_cache", "init")
NOTHING += ("reset_peak_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated", "ipc_collect")
NOTHING += ("set_per_process_memory_fraction", "set_sync_debug_mode", "set_rng_state", "set_rng_state_all")
INDICES = ("current_device", "current_device_index", "current_device_idx")
NUMBERS = ("memory_allocated", "max_memory_allocated")  # small, and none is 0: scripts divide by them
NUMBERS += ("memory_reserved", "max_memory_reserved", "utilization", "memory_usage", "temperature", "power_draw")
ANSWERS = dict.fromkeys(NOTHING) | dict.fromkeys(INDICES, 0) | dict.fromkeys(NUMBERS, 1)
ANSWERS |= {"get_device_name": PROPERTIES.name, "get_device_capability": (8, 0), "get_device_properties": PROPERTIES}
ANSWERS |= {"mem_get_info": (MEMORY, MEMORY), "get_memory_info": (MEMORY, MEMORY), "memory_summary": ""}
ANSWERS |= {"memory_stats": collections.defaultdict(lambda: 1), "get_arch_list": ["sm_80"], "get_rng_state_all": []}
ANSWERS |= {"is_bf16_supported": True, "is_tf32_supported": True, "can_device_access_peer": True}
ANSWERS |= {"is_current_stream_capturing": False, "get_sync_debug_mode": 0}
OF_NVTX = ("mark", "range_push", "range_pop", "range_start", "range_end")
GRAPHS = ("CUDAGraph", "graph", "make_graphed_callables", "graph_pool_handle", "cudart", "MemPool", "ExternalStream")


class Finished:
    """A stream, an event or a context of either: everything is done before a call returns."""

    def __init__(self, *_, **__):
        self.device, self.cuda_stream = torch.device("cpu"), 0

    def __enter__(self):
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event) -> float:
        return 1.0  # ms

    def record_event(self, event=None):
        return event or Finished()

    def record(self, *_, **__) -> None:
        pass

    __exit__ = wait = wait_stream = wait_event = synchronize = record


class Generator(torch.Generator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls, device="cpu")


class OnCpu(TorchFunctionMode):
    """Puts tensors on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if function is torch.Tensor.to:
            args = (args[0], *(on_cpu(each) for each in args[1:]))
        if "device" in kwargs:
            kwargs["device"] = on_cpu(kwargs["device"])
        try:
            return function(*args, **kwargs)
        except NotImplementedError as error:
            first = args[0] if args else None
            if "not implemented for '" not in str(error) or not is_of_integers(first):
                raise
            return function(first.double(), *args[1:], **kwargs).to(first.dtype)  # as GPUs do, for example torch.histc


def is_of_integers(value) -> bool:
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def on_cpu(device):
    """The CPU in place of a GPU; anything else as it is."""
    is_number = isinstance(device, int) and not isinstance(device, bool)
    is_gpu = isinstance(device, (str, torch.device)) and str(device).startswith("cuda")
    return torch.device("cpu") if is_number or is_gpu else device


def install(recording) -> None:
    cuda, accelerator = torch.cuda, torch.accelerator
    # One for each process, as mmengine counts them; none of them is visible.
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(["-1"] * recording.plan.processes)

    def stop_at(name: str):
        line = recording.where.line()
        recording.stop(f"it needs a GPU for torch.cuda.{name}{f' ({line})' if line else ''}")

    for owner in (cuda, accelerator):
        for name in ANSWERS.keys() & vars(owner).keys():
            setattr(owner, name, lambda *_, answer=ANSWERS[name], **__: answer)
        for name in {"current_stream", "default_stream", "Stream", "Event"} & vars(owner).keys():
            setattr(owner, name, Finished)
        pretend(owner, "is_available", True)
    pretend(accelerator, "current_accelerator", torch.device("cuda"))
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.stream = cuda.StreamContext = cuda.device = cuda.device_of = cuda.nvtx.range = Finished
    for name in OF_NVTX:
        setattr(cuda.nvtx, name, lambda *_, **__: None)
    cuda.profiler.start = cuda.profiler.stop = lambda *_, **__: None
    torch.Generator, torch.Tensor.record_stream = Generator, lambda *_, **__: None
    torch.set_default_device = lambda device, original=torch.set_default_device: original(on_cpu(device))
    for name in GRAPHS:  # a class, as some of them: torch.cuda.CUDAGraph | None
        setattr(cuda, name, type(name, (), {"__new__": lambda *_, name=name, **__: stop_at(name)}))
    for module in [module for name, module in list(sys.modules.items()) if name.startswith("torch.cuda")]:
        if hasattr(module, "_lazy_init"):  # what is left calls it first
            module._lazy_init = lambda: stop_at(sys._getframe(1).f_code.co_name)
    OnCpu().__enter__()
