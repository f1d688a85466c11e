"""scripts/from_scratch/tutorial.py, and the programs of guides/torch_distributed.md."""

import datetime
import re
import shlex
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import run_many
import torch
import torch.distributed as dist
from conftest import ROOT, free_port

from scripts.from_scratch import tutorial

PAGE = (ROOT / "guides" / "torch_distributed.md").read_text()


def programs(title):
    text = re.search(rf"## {title}\n(.*?)(?:\n## |\Z)", PAGE, re.S)[1]
    return re.findall(r"```python\n(.*?)```", text, re.S)


STARTERS = programs("Start processes")
WAITS = programs(r"Before `wait\(\)`")


@pytest.mark.slow
def test_processes_that_are_launched_or_spawned_find_each_other(launcher, tmp_path):
    """By the command in the first line of each program, both at the same time."""
    started = []
    for text in STARTERS:
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


def make_data(count=997):
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return images, torch.randint(4, (count,), generator=generator)


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
    images, labels = make_data(960)  # 20 batches of equal parts
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


def test_rounding_loses_no_sample():
    parts = tutorial.DataPartitioner(997).parts
    assert [len(part) for part in parts] == [699, 199, 99]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(997))


def test_each_epoch_has_a_different_order_of_the_same_part(threads):
    def run(rank):
        return [torch.cat(tutorial.partition_dataset(100, (0.5, 0.5), 4, seed=0, epoch=epoch)) for epoch in (0, 1)]

    for first, second in threads.run(2, run):
        assert not torch.equal(first, second)
        assert torch.equal(first.sort().values, second.sort().values)


@pytest.mark.parametrize("fractions", [["0.5"], ["0.5", "0.5"], ["0"]])
def test_wrong_fractions_are_refused(tmp_path, capsys, fractions):
    flags = ["--fractions", *fractions, "--output_dir", tmp_path / "run"]
    assert run_many.run("from_scratch/tutorial", flags) == 2
    assert (
        "error: --fractions needs 1 number above 0, one for each process, that add up to 1" in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


class TwoThreads:
    """Gloo itself between two threads, instead of two processes."""

    def __init__(self, monkeypatch):
        self.here, self.rank_0_goes_on = threading.local(), threading.Event()
        store, timeout = dist.HashStore(), datetime.timedelta(seconds=20)
        self.groups = {}

        def join(rank):
            self.groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timeout)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(join, range(2)))
        monkeypatch.setattr(dist, "all_reduce", self.all_reduce)

    def group(self):
        return self.groups[self.here.rank]

    def all_reduce(self, x, async_op):
        assert async_op
        self.wait_if_rank_1()
        return self.group().allreduce([x])

    def wait_if_rank_1(self):
        if self.here.rank == 1:
            assert self.rank_0_goes_on.wait(20)

    def go_on(self):
        if self.here.rank == 0:
            self.rank_0_goes_on.set()
        self.wait_if_rank_1()

    def run(self, program):
        """The variables of both ranks after `program`, in which rank 1 is behind rank 0."""

        def start(rank):
            self.here.rank = rank
            gradient, weight = torch.full((3,), rank + 1.0), torch.zeros(3)
            scope = {"dist": dist, "rank": rank, "go_on": self.go_on}
            scope |= {"gradient": gradient, "weight": weight}
            exec(program, scope)
            return scope

        self.rank_0_goes_on.clear()
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(start, range(2)))


def test_a_tensor_used_before_wait_is_wrong(monkeypatch):
    """Ranks start with gradients 1 and 2."""
    ranks = TwoThreads(monkeypatch)
    results = []
    for program in WAITS:
        rank_0, rank_1 = ranks.run(program)
        results.append((program.splitlines()[0], rank_0["weight"][0], rank_1["gradient"][0]))
    assert results == [
        ("# wrong: a step with this process's own gradient", -1, 3),
        ("# right", -3, 3),
    ]
