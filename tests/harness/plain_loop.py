"""The loop that every PyTorch user knows, on whole batches: what a script must equal."""

import run_reader
import torch

from utils.sampler import GlobalSampler


def batches_of(length: int, batch_size: int, seed: int, epochs: int = 1):
    """The epoch and the indices of each step, in the order of a run."""
    for epoch in range(epochs):
        order, _ = GlobalSampler(length, batch_size, seed=seed).items(epoch)
        for indices in order.split(batch_size):
            yield epoch, indices


def assert_same_as_plain(run, model, losses, optimizer, schedule, before_step=lambda: None, rtol=1e-10, atol=1e-13):
    """Train `model` in the plain loop; a run must have its learning rates and weights.

    Args:
        run: the folder of the run.
        losses: yields the mean loss of each step, computed with the weights of then.
        before_step: called between the backward pass and the step.
    """
    rates = []
    for loss in losses:
        loss.backward()
        before_step()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert [line["lr"] for line in run_reader.lines(run, "train")] == rates
    weights = run_reader.weights(run)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=rtol, atol=atol)
