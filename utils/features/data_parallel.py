"""nn.DataParallel: several GPUs in one process, with the loss computed on each of them."""

import functools

from accelerate import Accelerator
from accelerate.utils import convert_outputs_to_fp32
from torch import nn
from torch.nn.parallel.parallel_apply import get_a_var
from torch.nn.parallel.scatter_gather import scatter

from ..console import stop
from ..sampler import virtual_processes
from ..topology import data_parallel_gpus


def data_parallel(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """nn.DataParallel if one process has several GPUs (dp.yaml), else the model unchanged.

    Call it before `accelerator.prepare`, which replaces `model.forward` by a method of the object
    that it is given: replicas of a prepared model would all call the first one.

    Raises:
        SystemExit: with several GPUs and --virtual_processes.
    """
    if data_parallel_gpus(accelerator) < 2:
        return model
    if virtual_processes(accelerator):
        stop("--virtual_processes works with DDP, and DataParallel runs here: use ddp.yaml")
    model = nn.DataParallel(model.to(accelerator.device))
    # For `on_each_gpu`, whose replicas have the forward from before `prepare`.
    model.autocast = accelerator.autocast if accelerator.mixed_precision != "no" else None
    return model


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
        first_tensor = get_a_var(parts[0])
        if first_tensor is not None and len(first_tensor) == 0:
            parts = parts[:1]  # an empty batch gives an empty part for each GPU: one is enough
        replicas = model.replicate(model.module, model.device_ids[: len(parts)])
        autocast = getattr(model, "autocast", None)
        if autocast is not None:
            for replica in replicas:
                replica.forward = with_autocast(replica.forward, autocast)
        functions = [functools.partial(function, replica) for replica in replicas]
        part_args, part_kwargs = zip(*parts, strict=True)
        results = model.parallel_apply(functions, part_args, part_kwargs)
        return model.gather(results, model.output_device)

    return wrapped


def with_autocast(forward, autocast):
    """`forward` as `accelerator.prepare` would have it: in autocast, with float32 outputs.

    Autocast and its dtype belong to a thread, and each replica runs in a thread of its own.
    """

    def forward_in_autocast(*args, **kwargs):
        with autocast():
            return forward(*args, **kwargs)

    return convert_outputs_to_fp32(forward_in_autocast)
