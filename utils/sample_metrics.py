"""Metrics that are neither means nor counts: from the values of all samples."""

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object


def gather_samples(accelerator: Accelerator, parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate the (n, ...) tensors of all processes to (N, ...), in rank order; n may differ. Collective.

    Raises:
        ValueError: if a tensor requires grad: no gradient would go through.

    Accelerate's `gather_for_metrics` needs a loader that Accelerate prepared, and drops the last samples of the last
    batch on whichever rank they are.
    """
    if any(part.requires_grad for part in parts):
        raise ValueError(
            "gather_samples passes on no gradient, but a tensor requires grad: detach it, or use torch.no_grad()"
        )
    return torch.cat([part.to(accelerator.device) for part in gather_object([torch.cat(parts).cpu()])])


class EvaluateMetrics:
    """Computes each metric (Hub name or folder) over all test samples, once each and in order.

    Each is tried on `example` before training.
    """

    def __init__(self, names: list[str], example: list):
        import evaluate  # slow, and not every script's

        self.metrics, self.rows = [], []
        for name in names:
            self.metrics.append(evaluate.load(name, keep_in_memory=True))  # processes would wait for a file
            self.metrics[-1].compute(predictions=example, references=example)

    def add(self, batch, predictions: list, references: list) -> None:
        self.rows += [] if batch.is_stand_in else zip(batch.indices.tolist(), predictions, references, strict=True)

    def compute(self) -> dict:
        """The values of all metrics by name, the same on every process; then start again. Collective."""
        rows, self.rows = sorted(gather_object(self.rows)), []
        _, predictions, references = zip(*rows, strict=True)
        results = [metric.compute(predictions=predictions, references=references) for metric in self.metrics]
        return {name: value for result in results for name, value in result.items()}
