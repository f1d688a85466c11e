"""Threads against processes: how the ratios follow from the times, and the files of a run."""

import pytest
import run_reader


@pytest.mark.slow
def test_a_run_prints_and_draws(launcher):
    done = launcher("cpu", "--rounds", 2, "--output_dir", "run", script="from_scratch/gil")
    record = run_reader.record(launcher.folder / "run")
    assert len(record["results"]) == 4
    for name, ways in record["results"].items():
        assert name in done.stdout
        for values in ways.values():
            assert len(values) == 2
            assert min(values) > 0
            assert f"({min(values):.2f} to {max(values):.2f})" in done.stdout
    assert (launcher.folder / "run" / "gil.png").stat().st_size > 10_000
