"""BatchNorm statistics that do not depend on the number of processes.

P processes with k accumulation steps get exactly the weights and running statistics of one process with P x k
accumulation steps: all micro-batches of a step have the same weight, and each step updates the statistics once:

    running = (1 - momentum) x running + momentum x mean of the micro-batches' statistics

Gradients still depend on the size of the micro-batches, because BatchNorm normalises each one by its own statistics.
(SyncBatchNorm normalises by the statistics of all processes' micro-batches.)
"""

import contextlib

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from .virtual_processes import Node, TreeSum, current_logical_rank, tree_push


class BatchNorms:
    """The BatchNorm layers of a model, whose running statistics are updated once per optimizer step. Collective.

        batch_norms = BatchNorms(model, accelerator)
        ...
            with accelerator.accumulate(model), batch_norms.averaged():
                ...

    Set `model.forward_sync_buffers = False`: DDP would replace the statistics by rank 0's. Frozen layers (in
    evaluation mode) keep their statistics.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator):
        self.accelerator = accelerator
        layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        self.momentum = {layer: layer.momentum for layer in layers if layer.track_running_stats}
        self.tree = TreeSum(accelerator) if accelerator.virtual_processes else None
        self.sums = []  # over the micro-batches of this step, as nodes of the tree

    @contextlib.contextmanager
    def averaged(self):
        """Wrap each micro-batch in it, in `accelerator.accumulate`. Collective in the last micro-batch of a step."""
        layers = [layer for layer in self.momentum if layer.training]
        if not layers:
            yield
            return
        statistics = [layer.running_mean for layer in layers]
        statistics += [layer.running_var for layer in layers]
        if not self.sums:
            self.before = torch.cat(statistics)
        for layer in layers:
            layer.momentum = 1.0  # records the micro-batch's own statistics
            layer.is_averaged = True  # for the check of virtual processes
        yield
        for layer in layers:
            layer.momentum = self.momentum[layer]
        self._add(torch.cat(statistics))
        if self.accelerator.sync_gradients:
            self._step(layers, statistics)

    def _add(self, flat: torch.Tensor) -> None:
        if self.tree is not None:
            tree_push(self.sums, Node(current_logical_rank(self.accelerator), 1, flat), torch.Tensor.add_)
        elif self.sums:
            self.sums[0].value.add_(flat)
        else:
            self.sums.append(Node(0, 1, flat))

    @torch.no_grad()
    def _step(self, layers: list[nn.Module], statistics: list[torch.Tensor]) -> None:
        accumulation = self.accelerator.gradient_accumulation_steps
        if self.tree is not None:
            means = self.tree.total(self.sums).div_(self.accelerator.virtual_processes)
        else:
            means = self.accelerator.reduce(self.sums[0].value.div_(accumulation), "mean")
        self.sums = []
        before, means = (flat.split([len(tensor) for tensor in statistics]) for flat in (self.before, means))
        # Counts as one, however many micro-batches this process had.
        counts = [layer.num_batches_tracked for layer in layers]
        torch._foreach_sub_(counts, accumulation - 1)
        momentum = [self.momentum[layer] for layer in layers]
        # None: the mean over all steps
        momentum = [1 / int(count) if m is None else m for m, count in zip(momentum, counts, strict=True)] * 2
        torch._foreach_mul_(before, [1 - value for value in momentum])
        torch._foreach_add_(before, torch._foreach_mul(means, momentum))
        torch._foreach_copy_(statistics, before)
