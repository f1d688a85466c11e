"""Every two optional features of a training script together: the weights are those of the ones that matter alone."""

import itertools

import pytest
import run_many
import run_reader
from conftest import stopped_at

from utils.failures.signals import EXIT_REQUEUE

FLAGS = ["--hidden", 16, "--batch_size", 300, "--num_epochs", 5, "--log_every", 2, "--dropout", 0.1]
# What changes the numbers; each of them alone is the reference of its pairs.
MATTERS = {
    "virtual processes": ["--virtual_processes", 4],
    "accumulation": ["--gradient_accumulation_steps", 2],
    "bf16": [],
}
DOES_NOT_MATTER = {
    "best model": ["--save_best", "loss"],
    "patience": ["--patience", 50],
    "trackers": ["--log_with", "tensorboard"],
    "checkpoints in the background": ["--checkpoint_every", 1, "--keep_checkpoints", 3],
    "compile": ["--compile"],
    "moving average": ["--ema"],
    "resume": [],
}
FEATURES = {**MATTERS, **DOES_NOT_MATTER}
REFUSED = {frozenset({"virtual processes", "accumulation"})}


def train(names, folder, data) -> dict[str, str]:
    """Run the program with these features; returns the SHA-256 of each model that it leaves."""
    flags = [*FLAGS, "--dataset", data, *itertools.chain(*(FEATURES[name] for name in names)), "--output_dir", folder]
    if "resume" in names:
        with stopped_at(2):
            assert run_many.run("mlp", flags) == EXIT_REQUEUE
        flags.append("--resume")
    assert run_many.run("mlp", flags) is None
    return run_reader.final_models(folder)


@pytest.fixture(scope="module")
def references(tmp_path_factory, small_mnist):
    """What each set of features that matter leaves alone, trained once."""
    known = {}

    def reference(names):
        if names not in known:
            folder = tmp_path_factory.mktemp("reference") / "run"
            known[names] = train(names, folder, small_mnist)["model"]
        return known[names]

    return reference


@pytest.fixture(autouse=True)
def _precision(monkeypatch, request):
    names = request.node.callspec.params["pair"] if hasattr(request.node, "callspec") else ()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16" if "bf16" in names else "no")


@pytest.mark.slow
@pytest.mark.parametrize("pair", list(itertools.combinations(FEATURES, 2)), ids=" and ".join)
def test_two_features_leave_the_weights_of_those_that_matter(pair, references, small_mnist, tmp_path, capsys):
    if frozenset(pair) in REFUSED:
        flags = [*FEATURES[pair[0]], *FEATURES[pair[1]], "--dataset", small_mnist, "--output_dir", tmp_path / "run"]
        assert run_many.run("mlp", flags) == 2
        assert "leave --gradient_accumulation_steps out" in capsys.readouterr().err
        return
    found = train(pair, tmp_path / "run", small_mnist)
    matters = tuple(name for name in pair if name in MATTERS)
    assert found["model"] == references(matters)
    assert ("average" in found) == ("moving average" in pair)
    assert ("model_best" in found) == ("best model" in pair)


def test_the_features_that_matter_do(references, small_mnist, tmp_path, monkeypatch):
    """Otherwise the pairs above would compare nothing."""
    found = [references(())]
    for name in MATTERS:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16" if name == "bf16" else "no")
        found.append(train((name,), tmp_path / name, small_mnist)["model"])
    assert len(set(found)) == len(found)
