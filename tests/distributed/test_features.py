"""The optional features of a training script together: the weights are those of the ones that matter alone."""

import itertools

import pytest
import run_many
import run_reader
from conftest import stopped_at

from utils.failures.signals import EXIT_REQUEUE

FLAGS = ["--hidden", 16, "--batch_size", 300, "--num_epochs", 5, "--log_every", 2, "--dropout", 0.1]
# What changes the numbers: the precision, and one of two ways to divide a step.
MATTERS = list(itertools.product(("no", "bf16"), ("", "--virtual_processes 4", "--gradient_accumulation_steps 2")))
DOES_NOT_MATTER = ["--save_best", "loss", "--patience", 50, "--log_with", "tensorboard", "--compile", "--ema"]
DOES_NOT_MATTER += ["--checkpoint_every", 1, "--keep_checkpoints", 3]


@pytest.mark.slow
def test_features_leave_the_weights_of_those_that_matter(small_mnist, tmp_path, monkeypatch):
    """Best model, patience, a tracker, compile, a moving average, checkpoints in the background, and a resume.

    One that fails here is found by leaving out halves of them.
    """
    references = set()
    for number, (precision, division) in enumerate(MATTERS):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        flags = [*FLAGS, "--dataset", small_mnist, *division.split()]
        alone, together = tmp_path / f"{number}_alone", tmp_path / f"{number}_together"
        assert run_many.run("mlp", [*flags, "--output_dir", alone]) is None
        flags += [*DOES_NOT_MATTER, "--output_dir", together]
        with stopped_at(8):
            assert run_many.run("mlp", flags) == EXIT_REQUEUE
        assert run_many.run("mlp", [*flags, "--resume"]) is None
        reference = run_reader.final_models(alone)["model"]
        found = run_reader.final_models(together)
        assert found.keys() == {"model", "model_best", "average", "average_best"}
        assert run_reader.launches(together)[-1]["from_step"] in range(5, 20)  # after the first test, of 4 steps each
        assert found["model"] == reference, (precision, division)
        references.add(reference)
    assert len(references) == len(MATTERS)  # otherwise this would compare nothing
