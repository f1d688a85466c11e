"""nn.DataParallel: several GPUs in one process (dp.yaml), with the loss computed on each of them."""

import functools
from collections.abc import Callable

from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32, is_compiled_module
from torch import nn
from torch.nn.parallel.scatter_gather import scatter

from ..console import stop
from ..topology import data_parallel_gpus


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


def on_each_gpu(function):
    """Decorator: runs a function of a model and a batch on each GPU, with a replica and a part of the batch.

    nn.DataParallel gathers the logits on the first GPU and the loss is computed there. With this decorator the losses
    are computed where the logits are, and the first GPU gathers only one number per sample:

        @on_each_gpu
        def losses_and_hits(model, images, labels):
            logits = model(images)
            return F.cross_entropy(logits, labels, reduction="none"), logits.argmax(1) == labels

    The first argument must be the model. If it is an nn.DataParallel on GPUs, tensors among the other arguments are
    split along the first dimension and the results are gathered in the order of the batch; with any other model the
    function is simply called. It must return a tensor with one entry per sample, or a tuple, list or dict of such
    tensors.
    """

    @functools.wraps(function)
    def wrapped(model, *args, **kwargs):
        if not isinstance(model, nn.DataParallel) or not model.device_ids:
            return function(model, *args, **kwargs)
        # A batch with fewer samples than GPUs has fewer parts. Args and kwargs are scattered in one call: on its own,
        # nn.DataParallel makes one part per GPU of keyword arguments without tensors.
        parts = scatter((args, kwargs), model.device_ids, model.dim)
        replicas = model.replicate(model.module, model.device_ids[: len(parts)])
        functions = [functools.partial(function, replica) for replica in replicas]
        part_args, part_kwargs = zip(*parts, strict=True)
        results = model.parallel_apply(functions, part_args, part_kwargs)
        return model.gather(results, model.output_device)

    return wrapped
