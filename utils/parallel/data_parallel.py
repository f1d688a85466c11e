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
    """nn.DataParallel if one process has several GPUs, else the model unchanged. `accelerator.prepare` calls it.

    Raises:
        SystemExit: with several GPUs and a compiled model.
    """
    if data_parallel_gpus(accelerator) < 2 or isinstance(model, nn.DataParallel):
        return model
    if is_compiled_module(model) or model._compiled_call_impl is not None:  # each replica would call the original
        stop("torch.compile does not work with DataParallel, which runs here: leave it out, or use ddp.yaml")
    autocast = accelerator.autocast if accelerator.mixed_precision != "no" else None
    return DataParallel(model.to(accelerator.device), autocast)


class DataParallel(nn.DataParallel):
    """nn.DataParallel whose replicas compute in the precision of the config file.

    Autocast and its dtype belong to a thread, and each replica runs in a thread of its own: torch switches autocast on
    there, but in float16, whatever the dtype of the main thread is.

    Args:
        autocast: returns the context manager; None: full precision.
    """

    def __init__(self, module: nn.Module, autocast: Callable | None = None):
        super().__init__(module)
        self.autocast = autocast

    def replicate(self, module: nn.Module, device_ids: list) -> list[nn.Module]:
        replicas = super().replicate(module, device_ids)
        if self.autocast is not None:
            for replica in replicas:
                replica.forward = with_autocast(replica.forward, self.autocast)
        return replicas


def on_each_gpu(function):
    """Decorator: run a function of a model and a batch on each replica, with its part of the batch.

    nn.DataParallel gathers what the model's forward returns, the logits, on the first GPU, and the
    loss is computed there. With this decorator a function computes the losses where the logits are,
    and the first GPU gathers one number per sample:

        @on_each_gpu
        def losses_and_hits(model, images, labels):
            logits = model(images)
            return F.cross_entropy(logits, labels, reduction="none"), logits.argmax(1) == labels

    The first argument must be the model. If it is an nn.DataParallel with GPUs, the other arguments
    are scattered (tensors along the first dimension, everything else is passed on as it is) and the
    results are gathered in the order of the batch. With any other model the function is called as
    it stands.

    The function must return a tensor with one entry per sample, or a tuple, list or dict of such
    tensors. In the function `model` is a replica: the module inside nn.DataParallel.
    """

    @functools.wraps(function)
    def wrapped(model, *args, **kwargs):
        if not isinstance(model, nn.DataParallel) or not model.device_ids:
            return function(model, *args, **kwargs)
        # A batch with fewer samples than GPUs gives fewer parts. Scattered in one call, because
        # nn.DataParallel's own scatter makes a part for each GPU of keyword arguments without
        # tensors, whatever the number of parts of the others.
        parts = scatter((args, kwargs), model.device_ids, model.dim)
        replicas = model.replicate(model.module, model.device_ids[: len(parts)])
        functions = [functools.partial(function, replica) for replica in replicas]
        part_args, part_kwargs = zip(*parts, strict=True)
        results = model.parallel_apply(functions, part_args, part_kwargs)
        return model.gather(results, model.output_device)

    return wrapped


def with_autocast(forward, autocast):
    """`forward` as `accelerator.prepare` would have it: in autocast, with float32 outputs."""

    def forward_in_autocast(*args, **kwargs):
        with autocast():
            return forward(*args, **kwargs)

    return convert_outputs_to_fp32(forward_in_autocast)
