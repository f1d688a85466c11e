"""BatchNorm statistics that do not depend on the number of processes.

P processes with k accumulation steps get exactly the weights and running statistics of one process with P x k
accumulation steps: all micro-batches of a step have the same weight. Each of them updates the running statistics that
the step began with, as PyTorch does, once per call of the layer; the step ends with the mean of the results. So on one
process without accumulation, this is PyTorch's BatchNorm. With C calls of a layer in each micro-batch:

    for call in 1 ... C: running = (1 - momentum) x running + momentum x mean of the micro-batches' statistics in it

Gradients still depend on the size of the micro-batches, because BatchNorm normalises each one by its own statistics.
(SyncBatchNorm normalises by the statistics of all processes' micro-batches.)
"""

import contextlib

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from .virtual_processes import Node, current_slot, tree_over_all, tree_push


class BatchNorms:
    """The BatchNorm layers of a model, whose running statistics are averaged over the micro-batches of each step.

        model, optimizer = accelerator.prepare(model, optimizer)
        batch_norms = BatchNorms(model, accelerator)  # before run.start
        ...
            with accelerator.accumulate(model), batch_norms.averaged():
                ...

    All micro-batches must have the same size: GlobalLoader(..., drop_last=True), and a batch size divisible by their
    number. DDP no longer replaces the model's buffers by rank 0's. Frozen layers (in evaluation mode) keep their
    statistics.

    Args:
        kinds: further classes of layers that have running statistics, such as a codebook of your own: their
            floating-point buffers are averaged over the micro-batches, so counts of samples are 1/P of a step's, and
            others, such as the number of steps, go on once per step.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator, *kinds: type[nn.Module]):
        self.accelerator = accelerator
        layers = [layer for layer in model.modules() if isinstance(layer, (_BatchNorm, *kinds))]
        self.layers = [layer for layer in layers if next(layer.buffers(recurse=False), None) is not None]
        for layer in self.layers:
            layer.is_averaged = False  # not yet: for StepRule
        for module in model.modules():
            if isinstance(module, DistributedDataParallel):
                module.broadcast_buffers = False
        self.tree = tree_over_all(accelerator) if accelerator.layout.virtual_processes else None
        self.sums = []  # over the micro-batches of this step, as nodes of the tree

    @contextlib.contextmanager
    def averaged(self):
        """Wrap each micro-batch in it, in `accelerator.accumulate`. Collective in the last micro-batch of a step."""
        layers = [layer for layer in self.layers if layer.training]
        if not layers:
            yield
            return
        for layer in layers:
            layer.is_averaged = True
        is_last = self.accelerator.sync_gradients
        before = [] if is_last else [buffer.clone() for layer in layers for buffer in layer.buffers(recurse=False)]
        yield
        now = [buffer for layer in layers for buffer in layer.buffers(recurse=False)]  # a layer may have replaced them
        statistics = [buffer for buffer in now if buffer.is_floating_point()]
        self._add(torch.cat([tensor.flatten() for tensor in statistics]))
        if is_last:
            parts = self._mean().split([tensor.numel() for tensor in statistics])
            torch._foreach_copy_(statistics, [part.view_as(old) for part, old in zip(parts, statistics, strict=True)])
        else:  # the next micro-batch begins with the same statistics and counts
            torch._foreach_copy_(now, before)

    def _add(self, flat: torch.Tensor) -> None:
        if self.tree is not None:
            tree_push(self.sums, Node(current_slot(self.accelerator), 1, flat), torch.Tensor.add_)
        elif self.sums:
            self.sums[0].value.add_(flat)
        else:
            self.sums.append(Node(0, 1, flat))

    def _mean(self) -> torch.Tensor:
        """The mean over all micro-batches of the step. Collective."""
        sums, self.sums = self.sums, []
        if self.tree is not None:
            return self.tree.total(sums).div_(self.accelerator.layout.virtual_processes)
        return self.accelerator.reduce(sums[0].value.div_(self.accelerator.gradient_accumulation_steps), "mean")
