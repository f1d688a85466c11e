"""Data on the disk: each step has the same samples on any number of processes and workers, killed and resumed.

pytest tests/distributed/test_samples_by_step.py -n 0 -rP -m slow    # the table
"""

import collections
import itertools

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import run_reader
from tars import write_tar

from utils.sampler import GlobalSampler

BATCH_SIZE, ITEMS, EPOCHS = 6, 100, 2  # the last of 17 steps has 4 samples

# (data, window, config) and its launches: processes, workers, and the step in which all are killed with -9.
KILLS = [(1, 0, 2), (3, 3, 16), (2, 1, 17), (4, 0, 0)]
SHORT = [(2, 1, 4), (3, 0, 17), (1, 3, 0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same data in files of each kind."""
    folder = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (ITEMS, 8), np.uint8)
    for number, part in enumerate(np.split(np.arange(ITEMS), [1, 30, 31, 90])):
        write_tar(folder / f"{number}.tar", [(f"{n}.bin", rows[n].tobytes()) for n in part])
    table = pyarrow.table({"x": rows.astype(np.float32).tolist()})
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=7)
    (folder / "text").mkdir()
    for number in range(40):
        (folder / "text" / f"{number}.txt").write_text(f"{rows[number].tolist()}\n")
    return folder


def samples(run):
    """{(epoch, step): {samples of one launch in order}} of what all processes of all launches have read."""
    by_launch = collections.defaultdict(list)
    for path in sorted(run.glob("samples_*.txt")):
        for line in path.read_text().splitlines():
            epoch, step, slot, place, index, digest = line.split()
            by_launch[path.name.split("_")[1], int(epoch), int(step)].append(
                (int(slot), int(place), int(index), digest)
            )
    found = collections.defaultdict(list)
    for (_, epoch, step), rows in by_launch.items():
        found[epoch, step].append([(index, digest) for _, _, index, digest in sorted(rows)])
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "config", "launches"),
    [
        ("tar", "cpu_ddp", KILLS),
        ("tokens", "cpu_fsdp", SHORT),
        ("parquet", "cpu_ddp", SHORT),
    ],
)
def test_killed_and_resumed_on_others_each_step_has_the_same_samples(
    launcher, tmp_path, folder, data, config, launches
):
    flags = ["--data", data, "--folder", folder, "--checkpoint_every", 1]
    for number, (processes, workers, dies) in enumerate(launches):
        own = ["--launch", number, "--num_workers", workers, "--die_after", dies, "--output_dir", "run", "--resume"]
        topology = ["--num_processes", processes]
        done = launcher(config, *flags, *own, script="samples_by_step", launch_flags=topology, check=not dies)
        assert (done.returncode != 0) == bool(dies)
    run = tmp_path / "run"
    assert [launch["num_processes"] for launch in run_reader.launches(run)] == [each[0] for each in launches]
    found = samples(run)
    length = {"tar": ITEMS, "parquet": ITEMS, "tokens": None}[data]
    if length is None:
        length = len({index for rows in found.values() for index, _ in rows[0]})
    steps = -(-length // BATCH_SIZE)
    assert sorted(found) == [(step // steps, step) for step in range(EPOCHS * steps)]
    sampler, digests = GlobalSampler(length, BATCH_SIZE, seed=0), {}
    for (epoch, step), readings in sorted(found.items()):
        (expected,) = itertools.islice(sampler.micro_batches(epoch, step % steps), 1)
        assert any([index for index, _ in rows] == expected.indices.tolist() for rows in readings)
        for index, digest in itertools.chain(*readings):
            assert digests.setdefault(index, digest) == digest  # of what was read, the same each time
            assert index in expected.indices
    assert len(set(digests.values())) == len(digests) == length
    print(f"{data}, {config}: {len(launches)} launches, {len(found)} steps of the same samples")
