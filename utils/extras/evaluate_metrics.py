"""Metrics of the library evaluate over all samples of a test (--metrics)."""

import evaluate
import torch
from accelerate.utils import gather_object

from ..console import stop


class EvaluateMetrics:
    """Each metric takes every sample of a test once, in the order of the dataset, on any topology.

    Args:
        names: of metrics on the Hub, or folders.
        example: a few predictions, on which each metric is tried before the training.
    """

    def __init__(self, names: list[str], example: list):
        self.metrics, self.parts = [], []
        for name in names:
            try:
                metric = evaluate.load(name, keep_in_memory=True)  # in a file, processes would wait for each other
                metric.compute(predictions=example, references=example)
            except Exception as error:  # no network, no such metric, one that needs other arguments, ...
                reason = " ".join(str(error).split())
                stop(f"--metrics {name} cannot be loaded, or not with predictions such as {example[-1]!r}: {reason}")
            self.metrics.append(metric)

    def add(self, batch, predictions, references) -> None:
        """Add a Batch's samples: tensors (n,), or lists of n."""
        if not batch.is_stand_in:
            self.parts.append((batch.indices, predictions, references))

    def compute(self) -> dict:
        """The values of all metrics by name, the same on every process; then start again. Collective."""
        parts, self.parts = [map(to_list, part) for part in self.parts], []
        rows = gather_object([row for part in parts for row in zip(*part, strict=True)])
        _, predictions, references = zip(*sorted(rows), strict=True)
        results = [metric.compute(predictions=predictions, references=references) for metric in self.metrics]
        return {name: value for result in results for name, value in result.items()}


def to_list(column) -> list:
    return column.tolist() if isinstance(column, torch.Tensor) else column
