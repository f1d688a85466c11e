"""nn.DataParallel: several GPUs in one process (dp.yaml)."""

from collections.abc import Callable

from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32, is_compiled_module
from torch import nn

from ..console import stop
from ..launched import data_parallel_gpus


def data_parallel(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Wrap the model in nn.DataParallel if this process has several GPUs. `accelerator.prepare` calls it."""
    if data_parallel_gpus(accelerator) < 2 or isinstance(model, nn.DataParallel):
        return model
    if is_compiled_module(model) or model._compiled_call_impl is not None:  # replicas would run the original module
        stop("torch.compile does not work with DataParallel (dp.yaml): leave it out, or use ddp.yaml")
    autocast = accelerator.autocast if accelerator.mixed_precision != "no" else None
    return DataParallel(model.to(accelerator.device), autocast)


class DataParallel(nn.DataParallel):
    """nn.DataParallel whose replicas compute in the precision of the config file.

    Autocast is a setting of each thread, and each replica has its own thread. torch enables autocast there, but with
    float16, whatever the main thread uses.

    Args:
        autocast: returns a context manager that is also a decorator; None: full precision.
    """

    def __init__(self, module: nn.Module, autocast: Callable | None = None):
        super().__init__(module)
        self.autocast = autocast

    def replicate(self, module: nn.Module, device_ids: list) -> list[nn.Module]:
        replicas = super().replicate(module, device_ids)
        if self.autocast is not None:
            for replica in replicas:
                replica.forward = convert_outputs_to_fp32(self.autocast()(replica.forward))  # as `prepare`
        return replicas
