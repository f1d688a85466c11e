"""Threads against processes: the ratios of times that are given, and the files of a run."""

import pytest
import run_reader

from scripts.from_scratch import gil


def test_the_ratio_is_one_after_another_over_all_together(monkeypatch):
    """Forward passes that take no longer together, and backward passes that run one after another."""

    def best_times(name, seed, barrier):
        is_slow = barrier.wait(20) == 0  # one of them, and the slowest counts
        return [0.1, 0.1 * barrier.parties] if is_slow else [0.05, 0.05]

    monkeypatch.setattr(gil, "best_times", best_times)
    ratios = gil.measure(workers=3, rounds=2, seed=0)
    assert set(ratios) == {(name, which) for name in gil.MODELS for which in gil.PASSES}
    for (_, which), ways in ratios.items():
        for found in ways.values():
            assert found == pytest.approx([3 if which == "forward" else 1] * 2)


@pytest.mark.slow
def test_a_run_prints_and_draws(launcher):
    done = launcher("cpu", "--rounds", 2, "--output_dir", "run", script="from_scratch/gil")
    record = run_reader.record(launcher.folder / "run")
    assert len(record["results"]) == 4
    for name, ways in record["results"].items():
        assert name in done.stdout
        for found in ways.values():
            assert len(found) == 2
            assert min(found) > 0
            assert f"({min(found):.2f} to {max(found):.2f})" in done.stdout
    assert (launcher.folder / "run" / "gil.png").stat().st_size > 10_000
