"""scripts/from_scratch/tutorial.py, and the programs of guides/torch_distributed.md."""

import re
import shlex

import pytest
import torch
from conftest import free_port

from scripts.from_scratch import tutorial
from tests.docs.pages import blocks, guide, section


@pytest.mark.slow
def test_processes_that_are_launched_or_spawned_find_each_other(launcher, tmp_path):
    """By the command in the first line of each program, both at the same time."""
    started = []
    for text in blocks(section(guide("torch_distributed"), "Start processes"), "python"):
        name, command = re.match(r"# (\w+\.py): (.+)\n", text).groups()
        port = str(free_port())
        (tmp_path / name).write_text(text.replace("29500", port))
        program, *words = shlex.split(command.replace("29500", port))
        module = {"python": [], "torchrun": ["-m", "torch.distributed.run"]}[program]
        started.append(launcher.start_python(*module, *words))
    for process in started:
        text = launcher.wait(process).stdout
        for rank in range(2):
            assert f"rank {rank} of 2: the ranks add up to 1" in text


def test_parts_have_each_sample_once_whatever_was_rounded():
    parts = tutorial.DataPartitioner(997).parts
    assert [len(part) for part in parts] == [699, 199, 99]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(997))


@pytest.mark.parametrize(
    ("fractions", "weighted", "is_right"),
    [
        ((0.7, 0.2, 0.1), True, True),
        ((0.7, 0.2, 0.1), False, False),
        ((0.25, 0.25, 0.25, 0.25), False, True),
        ((1.0,), True, True),
    ],
)
def test_unequal_parts_need_weights(threads, fractions, weighted, is_right):
    """Only with weights are the steps those of one process with the batches of all processes."""
    torch.manual_seed(3)
    images, labels = torch.randn(960, 6, dtype=torch.float64), torch.randint(4, (960,))  # 20 batches of equal parts
    models = [torch.nn.Linear(6, 4).double() for _ in fractions]  # all differ: rank 0's counts
    expected = torch.nn.Linear(6, 4).double()
    expected.load_state_dict(models[0].state_dict())

    def run(rank):
        losses = list(tutorial.train(models[rank], images, labels, fractions, 20, weighted))
        assert len(losses) == 1  # epochs
        return tutorial.partition_dataset(960, fractions, 20, seed=1234, epoch=0)

    batches_of_ranks = threads.run(len(fractions), run)

    indices = torch.cat([batch for batches in batches_of_ranks for batch in batches])
    assert torch.equal(indices.sort().values, torch.arange(960))
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.01, momentum=0.5)
    for batches in zip(*batches_of_ranks, strict=True):
        batch = torch.cat(batches)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(expected(images[batch]), labels[batch]).backward()
        optimizer.step()
    for model in models:
        difference = (model.weight - expected.weight).abs().max().item()
        assert difference < 1e-12 if is_right else difference > 1e-3
