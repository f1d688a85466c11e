"""A body that is frozen for an epoch, then learns more slowly than the head: examples/fine_tune.py."""

import pytest
import run_many
import run_reader
import safetensors.torch
import torch

# 3 steps per epoch, the last one of 10 images; the checkpoints of steps 2 and 4 are within an epoch.
FLAGS = ["--batch_size", 20, "--num_epochs", 2, "--log_every", 1, "--checkpoint_every", 2, "--keep_checkpoints", 0]


def test_the_body_keeps_given_weights_until_it_is_unfrozen_and_has_a_rate_of_its_own(tiny_mnist, tmp_path):
    flags = ["--dataset", tiny_mnist, *FLAGS]
    assert (
        run_many.run("fine_tune", [*flags, "--num_epochs", 1, "--frozen_epochs", 0, "--output_dir", tmp_path / "a"])
        is None
    )
    given = run_reader.weights(tmp_path / "a")
    given["head.weight"], given["head.bias"] = torch.zeros(7, 512), torch.zeros(7)  # of other classes: left out
    safetensors.torch.save_file(given, tmp_path / "given.safetensors")
    flags += ["--weights", tmp_path / "given.safetensors"]
    assert run_many.run("fine_tune", [*flags, "--output_dir", tmp_path / "b"]) is None
    for step, is_frozen in ((2, True), (4, False)):
        _, files = run_reader.checkpoint(tmp_path / "b" / "checkpoints" / f"step_{step:08d}")
        for name, tensor in files["model.safetensors"].items():
            if name.startswith("body."):
                assert torch.equal(tensor, given[name]) == is_frozen


@pytest.mark.slow
def test_every_topology_trains_the_same_model_and_resumes_before_and_after_unfreezing(runs, tiny_mnist):
    flags = ["--float64", "--dataset", tiny_mnist, *FLAGS]
    one = runs("fine_tune", *flags)
    for on in (("cpu_ddp",), ("cpu_fsdp", "--fsdp_min_num_params", 500)):
        two = runs("fine_tune", *flags, on=on)
        resumed = [runs("fine_tune", *flags, on=on, resumes=two, at=step) for step in (2, 4)]
        assert two.differs_from(one) <= 1e-9
        assert [again.bits for again in resumed] == [two.bits] * 2
