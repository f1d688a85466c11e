"""The character error rate of a whole test: the metric in this folder, for `text.py --metrics`."""

import datasets
import evaluate


def edits(prediction: str, reference: str) -> int:
    """The insertions, deletions and substitutions that make one string the other."""
    row = list(range(len(reference) + 1))
    for i, letter in enumerate(prediction, 1):
        above, row[0] = row[0], i
        for j, other in enumerate(reference, 1):
            above, row[j] = row[j], min(above + (letter != other), row[j] + 1, row[j - 1] + 1)
    return row[-1]


class CharacterErrorRate(evaluate.Metric):
    """Edits over all characters of the references: not a mean over lines, which differ in length."""

    def _info(self):
        text = datasets.Value("string")
        features = datasets.Features({"predictions": text, "references": text})
        return evaluate.MetricInfo(description=self.__doc__, citation="", features=features)

    def _compute(self, predictions, references):
        pairs = zip(predictions, references, strict=True)
        return {"character_error_rate": sum(edits(*pair) for pair in pairs) / sum(map(len, references))}
