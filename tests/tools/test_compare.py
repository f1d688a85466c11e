"""Two runs are compared: are they the same, and if not, what differs first?"""

import hashlib
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from run_folders import LAUNCH, LINES, line, make_run
from run_tool import run_tool
from safetensors.torch import save_file

from tools import compare
from utils.checkpoint.folder import FORMAT, write_files, write_manifest

NAN, INF = math.nan, math.inf


def add_checkpoint(run, step, tensors, state=None, file="model"):
    """Write a file of a checkpoint, and the manifest anew."""
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    write_files(folder, {f"{file}.safetensors": tensors})
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}
    manifest = {"format": FORMAT, "step": step, "state": state or {}, "sha256": digests}
    write_manifest(folder / "manifest.json", manifest)


@pytest.fixture
def command(tmp_path, capsys):
    """Runs the command on folders in tmp_path; returns its exit code and what it printed."""

    def command(*words):
        words = [tmp_path / word if not str(word).startswith("-") else word for word in words]
        return run_tool(compare.main, capsys, *words)

    return command


def verdict(printed):
    return printed[1].splitlines()[-1].partition(": ")[2]


def test_runs_of_one_seed_are_equal_and_others_are_not(train, tmp_path, command):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert train(name, "--seed", seed) is None
    before = {path.name for path in (tmp_path / "b").iterdir()}
    code, text = command("a", "b", "c")
    assert code == 1
    last = text.splitlines()[-2:]
    assert last[0] == "b compared with a: the same bit for bit"
    assert last[1].startswith("c compared with a: different, first in train accuracy at step 3 (")
    assert last[1].endswith("; settings that differ: seed")
    assert command("a", "b")[0] == 0
    assert {path.name for path in (tmp_path / "b").iterdir()} == before


def test_sums_in_another_order_are_the_same_up_to_rounding(train, command):
    train("a")
    train("b", "--gradient_accumulation_steps", 3)
    assert verdict(command("a", "b")) == "the same up to rounding"
    assert command("a", "b", "--tolerance=0")[0] == 1


def test_train_lines_that_are_means_over_other_steps_are_not_compared(tmp_path, command):
    for name, log_every, loss in (("a", 3, 1.0), ("b", 2, 1.0), ("c", 2, 2.0)):
        lines = [line(log_every, loss=log_every), line(4, loss=log_every), line(6, loss=loss)]
        make_run(tmp_path / name, lines, {"arguments": {"log_every": log_every}}, finished=6)
    _, text = command("a", "b", "c")
    assert "1 logged numbers up to step 6: all are equal" in text
    assert "c compared with a: different, first in train loss at step 6 (1.0 and 2.0)" in text


def test_relative_difference_of_numbers():
    pairs = {(1, 2): 0.5, (2, 1): 0.5, (-1, 1): 2, (0, -0.0): 0, (NAN, NAN): 0, (NAN, 1): INF, (INF, -INF): INF}
    for pair, difference in pairs.items():
        assert compare.number_difference(*pair) == difference


def test_the_first_step_beyond_the_tolerance_is_named(tmp_path, command):
    value = 0.6062934763391878
    values = [value, math.nextafter(value, 1), 0.7, 0.65]  # pandas.read_json would round the second to the first
    make_run(tmp_path / "a", [line(step, loss=value) for step in range(1, 5)], finished=4)
    make_run(tmp_path / "b", [line(step, loss=value) for step, value in enumerate(values, 1)], finished=4)
    assert verdict(command("a", "b")).startswith(f"different, first in train loss at step 3 ({value} and 0.7)")
    assert verdict(command("a", "b", "--tolerance=0")).startswith("different, first in train loss at step 2 ")
    assert command("a", "b", "--tolerance=0.5")[0] == 0
    assert command("a", "b", "--tolerance=-1")[0] == 2


def test_a_run_that_lacks_numbers_is_different(tmp_path, command):
    make_run(tmp_path / "a")
    make_run(tmp_path / "first", LINES[1:])
    make_run(tmp_path / "accuracy", [*LINES[:2], line(2, "test", loss=1.5)])
    for other, place in (("first", "train loss at step 1"), ("accuracy", "test accuracy at step 2")):
        for words in (("a", other), (other, "a")):
            printed = command(*words)
            assert printed[0] == 1
            assert verdict(printed).startswith(f"different, first in {place} (only in a)")


def test_a_nan_is_equal_to_a_nan_and_not_to_a_missing_number(tmp_path, command):
    make_run(tmp_path / "a", [line(1, loss=1.0, norm=math.nan, samples_per_s=5)])
    make_run(tmp_path / "b", [line(1, loss=1.0, norm=math.nan, samples_per_s=9)])  # timings always differ
    make_run(tmp_path / "c", [line(1, loss=1.0)])
    assert verdict(command("a", "b")).startswith("the same bit for bit")
    assert "train norm at step 1 (only in a)" in verdict(command("a", "c"))


def test_of_a_killed_run_the_last_lines_may_be_missing(tmp_path, command):
    make_run(tmp_path / "a", [*LINES, line(3, loss=0.5)], finished=3)
    make_run(tmp_path / "killed", LINES[:2], tail='{"split": "test", "step": 2, "lo', finished=None)
    make_run(tmp_path / "gap", [*LINES[:2], line(3, loss=0.5)], finished=None)
    assert command("a", "killed")[0] == command("killed", "a")[0] == 0
    assert verdict(command("a", "killed")).startswith(
        "the same bit for bit (only logged numbers could be compared) up to step 2"
    )
    assert command("a", "gap")[0] == 1


def test_one_prediction_that_rounding_flips_counts_as_equal_and_two_do_not(tmp_path, command):
    """Of an unknown number of samples, the accuracy must be the same."""
    accuracies = {"a": (0.5, 0.9), "flipped": (0.6, 0.91), "train": (0.7, 0.9), "test": (0.5, 0.92)}
    for name, (of_train, of_test) in accuracies.items():
        make_run(tmp_path / name, [line(2, accuracy=of_train), line(2, "test", accuracy=of_test, samples=100)])
        make_run(tmp_path / "unknown" / name, [line(2, "test", accuracy=of_test)])
    assert command("a", "flipped")[0] == 0
    assert command("a", "flipped", "--tolerance=0")[0] == 1
    assert command("a", "train")[0] == command("a", "test")[0] == command("unknown/a", "unknown/flipped")[0] == 1


def differing(tmp_path, **record):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", record=record)]
    table = compare.compare_settings(*(compare.read_run(folder, folder.name) for folder in runs))
    return {row.setting: (row.reference, row.other) for row in table.itertuples()}


def test_settings_that_differ_but_not_where_equal_data_lie(tmp_path):
    arguments = {"lr": 0.2, "output_dir": "elsewhere", "cache_dir": "/tmp/cache", "resume": True, "batch_size": 5}
    found = differing(tmp_path / "arguments", arguments=arguments, versions={"torch": "2", "numpy": "1"})
    assert found == {"lr": (0.1, 0.2), "numpy": (None, "1")}
    data = {"dataset": "/y/mnist", "train": 10, "fingerprint": "f"}
    assert differing(tmp_path / "same", data=data) == {}
    changed = differing(tmp_path / "other", data=data | {"fingerprint": "g"})
    assert changed == {"dataset": ("/x/mnist", "/y/mnist"), "fingerprint": ("f", "g")}


def test_a_topology_that_changed_when_resuming_is_shown_without_repeated_launches(tmp_path):
    steps_and_counts = ((0, 4), (0, 1), (20, 3), (10, 2))
    launches = [LAUNCH | {"from_step": step, "num_processes": count} for step, count in steps_and_counts]
    assert differing(tmp_path, launches=launches) == {"num_processes": ("1", "1, then 2")}


@pytest.mark.parametrize(("virtual_processes", "differ"), [(0, "num_processes"), (6, "none")])
def test_with_virtual_processes_the_number_of_processes_explains_nothing(tmp_path, command, virtual_processes, differ):
    for name, count, lines in (("a", 1, LINES), ("b", 3, LINES[:1])):
        launch = LAUNCH | {"num_processes": count}
        record = {"arguments": {"virtual_processes": virtual_processes}, "launches": [launch]}
        make_run(tmp_path / name, lines, record)
    assert verdict(command("a", "b")).endswith(f"settings that differ: {differ}")


def two_checkpoints(tmp_path, first, second, **states):
    for name, tensors in (("a", first), ("b", second)):
        run = make_run(tmp_path / name)
        add_checkpoint(run, 1, {"w": torch.tensor(tensors)}, states.get(name))
    return compare.compare_tensors(*(compare.read_run(tmp_path / name, name) for name in "ab"))


PAIRS = [([4.0, -8.0], [5.0, -8.0], 0.125, False), ([0.0, 0.0], [0.0, 1.0], INF, False), ([2j], [1j], 0.5, False)]
PAIRS += [([1.0, NAN], [1.0, NAN], 0, True), ([1.0, NAN], [1.0, 2.0], INF, False), ([INF, 2.0], [INF, 1.0], 0.5, False)]
PAIRS += [([0.0, 1.0], [-0.0, 1.0], 0, False), ([True, False], [True, True], 1, False), ([], [], 0, True)]
PAIRS += [([1.0], [1.0, 1.0], INF, False), ([1.0], [1], INF, False)]  # not of the same form


@pytest.mark.parametrize(("first", "second", "difference", "exact"), PAIRS)
def test_difference_of_tensors(tmp_path, first, second, difference, exact):
    (row,) = two_checkpoints(tmp_path, first, second).itertuples()
    assert (row.place, row.difference, row.exact) == ("model w", difference, exact)


def test_the_newest_common_checkpoint_is_compared_and_the_largest_difference_named(tmp_path, command):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    for run, small, large in ((a, 1.0, 1.0), (b, 1.0001, 1.5)):
        add_checkpoint(run, 1, {"x": torch.tensor(9.0 * large)})
        add_checkpoint(run, 2, {"small": torch.tensor(small), "large": torch.tensor(1.0)})
        add_checkpoint(run, 2, {"exp_avg": torch.tensor(large)}, file="optimizer")
    add_checkpoint(a, 3, {"x": torch.ones(1)})
    printed = command("a", "b")
    assert printed[0] == 1
    assert verdict(printed).startswith("different, first in optimizer exp_avg of the checkpoint of step 2")
    assert "3 tensors of the checkpoint of step 2: 1 are equal, and the largest difference is 5.0e-01" in printed[1]
    add_checkpoint(b, 2, {"exp_avg": torch.tensor(1.0)}, file="optimizer")
    assert verdict(command("a", "b")) == "the same up to rounding"
    add_checkpoint(b, 2, {"exp_avg": torch.tensor(1.0), "more": torch.ones(1)}, file="optimizer")
    assert "optimizer more of the checkpoint of step 2 (missing and torch.float32 (1,))" in verdict(command("a", "b"))


def test_the_parts_of_a_sharded_tensor_are_joined(tmp_path, command):
    whole = torch.arange(12.0).reshape(4, 3)
    for name in ("ddp", "fsdp", "changed"):
        make_run(tmp_path / name)
    add_checkpoint(tmp_path / "ddp", 1, {"w": whole})
    for name, changed in (("fsdp", 0), ("changed", 1)):
        add_checkpoint(tmp_path / name, 1, {"w": whole[2:] + changed}, file="model.rank_1")
        add_checkpoint(tmp_path / name, 1, {"w": whole[:2]}, file="model")
    assert verdict(command("ddp", "fsdp")) == "the same bit for bit"
    assert verdict(command("fsdp", "ddp")) == "the same bit for bit"
    printed = command("ddp", "changed")
    assert printed[0] == 1
    assert "1 tensors of the checkpoint of step 1: 0 are equal, and the largest difference is 9.1e-02" in printed[1]


def test_final_models_are_compared_too_but_not_the_best_ones(tmp_path, command):
    for name, value in (("a", 1.0), ("b", 2.0)):
        run = make_run(tmp_path / name)
        add_checkpoint(run, 1, {"w": torch.ones(1)})
        save_file({"w": torch.tensor([value])}, run / "model_best.safetensors")
        save_file({"w": torch.ones(1)}, run / "model.safetensors")
    assert command("a", "b")[0] == 0
    save_file({"w": torch.zeros(1)}, run / "model.safetensors")
    assert verdict(command("a", "b")).startswith("different, first in model w of the final model")


def test_state_besides_tensors_is_compared_but_not_how_an_optimizer_computes(tmp_path):
    a = {"scheduler": {"last_epoch": 3}, "optimizer": {"groups": [{"fused": True, "lr": 0.1}]}}
    b = {"scheduler": {"last_epoch": 4}, "optimizer": {"groups": [{"fused": None, "lr": 0.1}]}}
    row, tensor = two_checkpoints(tmp_path, [1.0], [1.0], a=a, b=b).itertuples()
    assert (row.place, row.difference, row.beyond) == ("state.scheduler.last_epoch", 0.25, True)
    assert tensor.exact


@pytest.mark.slow
def test_it_runs_from_any_folder(tmp_path):
    for name in "ab":
        make_run(tmp_path / name)
    words = [sys.executable, ROOT / "tools" / "compare", "a", "b"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


DAMAGES = [("run.json", "{"), ("summary.json", "[]"), ("checkpoints/step_00000001/model.safetensors", "none")]
DAMAGES += [("metrics.jsonl", '{"split": "tr\n{"split": "train", "step": 3}\n')]


@pytest.mark.parametrize(("file", "content"), DAMAGES)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path, command, file, content):
    for name in "ab":
        run = make_run(tmp_path / name)
        add_checkpoint(run, 1, {"w": torch.ones(1)})
    (run / file).write_text(content)
    code, text = command("a", "b")
    assert code == 2
    assert all(part in text for part in (str(run), *Path(file).parts))


def test_where_there_is_nothing_to_compare_the_exit_code_is_2(tmp_path, command, monkeypatch):
    make_run(tmp_path / "a")
    make_run(tmp_path / "empty", [], finished=None)
    for other, words in (("missing", "missing is not a run: it has no run.json"), ("empty", "nothing to compare")):
        code, text = command("a", other)
        assert (code, words in text) == (2, True)
    monkeypatch.setattr(compare, "judge", lambda *tables: 1 / 0)  # an unexpected error is not "different"
    assert command("a", "a")[0] == 2
