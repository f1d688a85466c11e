"""How far two runs of the same training are apart."""

from pathlib import Path

import run_reader

TOLERANCE = {"float32": 1e-5, "float64": 1e-12}


def differences(run: Path, other: Path, steps: int) -> tuple[float, float]:
    """The largest relative difference of a loss, and of a weight; all else must be equal.

    That of a weight is relative to the largest one of its tensor.

    Args:
        steps: of each run, all logged.
    """
    lines, other_lines = run_reader.lines(run), run_reader.lines(other)
    weights, other_weights = run_reader.weights(run), run_reader.weights(other)
    assert len([line for line in lines if line["split"] == "train"]) == steps
    exact = ("split", "step", "epoch", "lr", "accuracy")
    assert [[line.get(n) for n in exact] for line in other_lines] == [[line.get(n) for n in exact] for line in lines]
    losses = max(abs(b["loss"] / a["loss"] - 1) for a, b in zip(lines, other_lines, strict=True))
    assert weights.keys() == other_weights.keys()
    largest = max(float((other_weights[name] - w).abs().max() / w.abs().max()) for name, w in weights.items())
    return losses, largest


def largest_difference(one, other) -> float:
    """Of all logged numbers and all weights of two runs, relative to them (to the largest of a tensor).

    Those below 1e-3 count as 1e-3: BERT's key biases have no gradient but rounding errors.
    """
    largest = 0.0
    for line, expected in zip(run_reader.lines(other), run_reader.lines(one), strict=True):
        assert line.keys() == expected.keys()
        assert line["split"] == expected["split"]
        for name in line.keys() - {"split"}:
            largest = max(largest, abs(line[name] - expected[name]) / max(abs(expected[name]), 1e-3))
    models = run_reader.final_models(one).keys()
    assert models == run_reader.final_models(other).keys()
    for model in models:
        weights, expected = run_reader.weights(other, model), run_reader.weights(one, model)
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            difference = (weights[name] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-3)
            largest = max(largest, float(difference))
    return largest
