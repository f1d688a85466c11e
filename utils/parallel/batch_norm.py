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

from ..console import stop
from ..sampler import GlobalSampler
from .virtual_processes import Node, current_slot, tree_over_all, tree_push


def check(models: list[nn.Module], sampler: GlobalSampler) -> None:
    """Stop if a model with BatchNorm would get micro-batches of different sizes, which it would weight equally."""
    layers = [layer for model in models for layer in model.modules() if isinstance(layer, _BatchNorm)]
    if sampler.batch_size % sampler.num_slots and any(layer.training for layer in layers):
        stop(
            f"--batch_size {sampler.batch_size} is not divisible by {sampler.num_slots} micro-batches, and the model "
            "has BatchNorm, which needs micro-batches of equal size"
        )


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
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator):
        self.accelerator = accelerator
        self.layers = [
            layer for layer in model.modules() if isinstance(layer, _BatchNorm) and layer.track_running_stats
        ]
        for layer in self.layers:
            layer.is_averaged = False  # not yet: for the checks of Run and of virtual processes
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
        counts = [layer.num_batches_tracked for layer in layers]
        statistics = [layer.running_mean for layer in layers] + [layer.running_var for layer in layers]
        counts_before, before = torch.stack(counts), torch.cat(statistics)
        yield
        self._add(torch.cat(statistics))
        if self.accelerator.sync_gradients:
            result = self._mean()
        else:  # the next micro-batch begins with the same statistics
            result = before
            torch._foreach_copy_(counts, list(counts_before))
        torch._foreach_copy_(statistics, result.split([len(tensor) for tensor in statistics]))

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
