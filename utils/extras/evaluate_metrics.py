"""Metrics of the library evaluate over all samples of a test (--metrics)."""

import evaluate
from accelerate.utils import gather_object

from ..console import stop


class EvaluateMetrics:
    """Gives each metric, by name or folder, every test sample once, in order; tried on `example` before training."""

    def __init__(self, names: list[str], example: list):
        self.metrics, self.rows = [], []
        for name in names:
            try:
                self.metrics.append(evaluate.load(name, keep_in_memory=True))  # processes would wait for a file
                self.metrics[-1].compute(predictions=example, references=example)
            except Exception as error:  # no network, no such metric, one that needs other arguments, ...
                stop(f"--metrics {name} fails with predictions like {example[-1]}: {' '.join(f'{error}'.split())}")

    def add(self, batch, predictions: list, references: list) -> None:
        self.rows += [] if batch.is_stand_in else zip(batch.indices.tolist(), predictions, references, strict=True)

    def compute(self) -> dict:
        """The values of all metrics by name, the same on every process; then start again. Collective."""
        rows, self.rows = sorted(gather_object(self.rows)), []
        _, predictions, references = zip(*rows, strict=True)
        results = [metric.compute(predictions=predictions, references=references) for metric in self.metrics]
        return {name: value for result in results for name, value in result.items()}
