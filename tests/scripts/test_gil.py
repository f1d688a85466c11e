"""Threads against processes: how the ratios follow from the times, and the files of a run."""

import pytest
import run_reader

from scripts.from_scratch import gil


def test_the_ratio_is_the_time_of_one_after_another_over_the_time_of_all_at_once(monkeypatch):
    """Forward passes that take no longer at once, and backward passes that run one after another."""

    def best_times(name, seed, barrier):
        is_slow = barrier.wait(20) == 0  # one of them, and the slowest counts
        return [0.1, 0.1 * barrier.parties] if is_slow else [0.05, 0.05]

    monkeypatch.setattr(gil, "best_times", best_times)
    ratios = gil.measure(workers=3, rounds=2, seed=0)
    assert set(ratios) == {(name, which) for name in gil.MODELS for which in gil.PASSES}
    for (_, which), ways in ratios.items():
        for values in ways.values():
            assert values == pytest.approx([3 if which == "forward" else 1] * 2)


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
