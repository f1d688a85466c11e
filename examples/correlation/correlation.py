"""Pearson's r: the metric in this folder, for evaluate.load."""

import datasets
import evaluate
import numpy as np


class Correlation(evaluate.Metric):
    """Not a mean over samples, so that no average of processes or batches gives it."""

    def _info(self):
        number = datasets.Value("float64")
        features = datasets.Features({"predictions": number, "references": number})
        return evaluate.MetricInfo(description=self.__doc__, citation="", features=features)

    def _compute(self, predictions, references):
        return {"correlation": float(np.corrcoef(predictions, references)[0, 1])}
