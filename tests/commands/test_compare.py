"""Two runs are compared: what differs, from which step on, and by how much."""

import json
import math
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from PIL import Image
from safetensors.torch import save_file

from utils import compare, flags
from utils.compare import differences
from utils.extras import curves as plots


def line(step, split="train", **metrics):
    return {"split": split, "step": step, "epoch": 1, **metrics}


LINES = [line(1, loss=2.0), line(2, loss=1.0), line(2, "test", loss=1.5, accuracy=0.5)]


def make_run(folder, lines=LINES, record=None, tail=""):
    """A run folder without checkpoints and summary."""
    folder.mkdir(parents=True)
    launch = {"from_step": 0, "num_processes": 1, "processes": [{"host": "h", "device": "cpu"}]}
    content = {
        "arguments": {"lr": 0.1, "output_dir": str(folder)},
        "total_steps": 2,
        "data": {"dataset": "/x/mnist", "train": 10, "fingerprint": "f"},
        "versions": {"torch": "2"},
        "git_commit": "0123456789abcdef",
        "launches": [launch],
    }
    (folder / "run.json").write_text(json.dumps(content | (record or {})))
    text = "".join(json.dumps(one) + "\n" for one in lines)
    (folder / "metrics.jsonl").write_text(text + tail)
    return folder


def add_checkpoint(run, step, models, state=None, optimizer=None):
    folder = run / "checkpoints" / f"step_{step:08d}"
    folder.mkdir(parents=True)
    for name, tensors in models.items():
        save_file(tensors, folder / f"{name}.safetensors")
    state = dict(state or {})
    if optimizer is not None:
        save_file(optimizer, folder / "optimizer.safetensors")
        state |= {"optimizer": {"groups": [{"lr": 0.1, "fused": True}], "numbers": {}}}
    (folder / "manifest.json").write_text(json.dumps({"step": step, "state": state}))
    return folder


def finish(run, step, **more):
    (run / "summary.json").write_text(json.dumps({"step": step, **more}))


@pytest.fixture
def pictures():
    """For tests that look at compare.png, which takes most of the time of a comparison."""


@pytest.fixture
def command(tmp_path, monkeypatch, capsys, request):
    """Runs the command on folders in tmp_path; returns its exit code and what it printed."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr(plots, "plot_comparison", lambda *arguments: None)

    def command(*words):
        words = [tmp_path / word if not str(word).startswith("-") else word for word in words]
        monkeypatch.setattr(sys, "argv", ["compare", *map(str, words)])
        try:
            code = compare.main()
        except SystemExit as stopped:
            code = stopped.code
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return command


# Real runs


def test_runs_of_the_same_seed_are_equal_bit_for_bit(train, tmp_path, command, pictures):
    assert train("a") is None
    assert train("b") is None
    code, text = command("a", "b")
    assert code == 0
    assert text.splitlines()[-1] == "b: bit for bit the same"
    assert "No difference in arguments, topology, data, versions, code" in text
    assert "model: 4 of 4 tensors bitwise equal" in text
    assert "optimizer: 12 of 12 tensors bitwise equal" in text
    with Image.open(tmp_path / "b" / "compare.png") as picture:
        assert picture.width > 1000


def test_another_seed_is_named_with_the_first_step(train, command):
    train("a")
    train("b", "--seed", 1)
    code, text = command("a", "b")
    assert code == 1
    reason = "what can explain it: arguments (seed)"
    assert text.splitlines()[-1] == f"b: different: first at step 3 in train loss; {reason}"
    assert "model: 0 of 4 tensors bitwise equal" in text


def test_a_run_that_was_stopped_is_equal_so_far_and_equal_after_its_resume(train, tmp_path):
    train("whole", "--checkpoint_every", 1, "--keep_checkpoints", 0)
    train("run", stop_at_call=10)
    found = compare.compare(tmp_path / "whole", tmp_path / "run")
    assert found["verdict"]["sentence"] == "bit for bit the same"
    assert found["tensors"]["step"] == compare.progress(tmp_path / "run")["checkpoint"] == 5
    assert found["metrics"]["last_step"] == 4
    assert not compare.progress(tmp_path / "run")["finished"]

    train("run", "--resume")
    found = compare.compare(tmp_path / "whole", tmp_path / "run")
    assert found["verdict"]["sentence"] == "bit for bit the same"
    assert found["tensors"]["step"] == 8
    assert found["facts"]["topology"] == {"launched at step": ["0", "0, 5"]}


def test_train_lines_that_are_means_over_other_steps_are_not_compared(train, tmp_path):
    train("a", "--log_every", 3)  # lines at 3, 4 (end of the epoch), 6, 8
    train("b", "--log_every", 2)
    found = compare.compare(tmp_path / "a", tmp_path / "b")
    assert found["verdict"]["bitwise"]
    assert found["metrics"]["other_means"] == 1
    assert found["metrics"]["lines_only"] == [1, 1]
    losses = found["metrics"]["metrics"][0]
    assert [step for step, _ in losses["differences"]] == [6, 8]


# Metrics


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        (2.0, 2.0, 0),
        (2.0, 1.0, 0.5),
        (1.0, 2.0, 0.5),
        (-1.0, 1.0, 2),
        (0.0, 1e-30, 1),
        (0, -0.0, 0),
        (math.nan, math.nan, 0),
        (math.nan, 1.0, math.inf),
        (math.inf, math.inf, 0),
        (math.inf, -math.inf, math.inf),
    ],
)
def test_relative_difference(first, second, difference):
    assert compare.number_difference(first, second) == difference


def test_the_first_step_beyond_the_tolerance_and_the_largest_difference(tmp_path):
    values = [1.0, 1.0 + 1e-9, 1.5, 1.25]
    make_run(tmp_path / "a", [line(step, loss=1.0) for step in range(1, 5)])
    make_run(tmp_path / "b", [line(step, loss=v) for step, v in enumerate(values, 1)])
    found = compare.compare_metrics(tmp_path / "a", tmp_path / "b")
    (loss,) = found["metrics"]
    assert loss["first"] == {"step": 3, "values": [1.0, 1.5]}
    assert (loss["largest"], loss["largest_step"]) == (1 / 3, 3)
    assert loss["lines"] == found["lines"] == 4
    exact = compare.compare_metrics(tmp_path / "a", tmp_path / "b", tolerance=0)
    assert exact["metrics"][0]["first"]["step"] == 2
    wide = compare.compare_metrics(tmp_path / "a", tmp_path / "b", tolerance=0.5)
    assert wide["metrics"][0]["first"] is None


def test_timings_are_not_compared_and_metrics_of_one_run_are_named(tmp_path, command):
    make_run(tmp_path / "a", [line(1, loss=1.0, samples_per_s=5, grad_norm=2.0)])
    make_run(tmp_path / "b", [line(1, loss=1.0, samples_per_s=9, error_px=2.0)])
    found = compare.compare_metrics(tmp_path / "a", tmp_path / "b")
    assert [entry["metric"] for entry in found["metrics"]] == ["loss"]
    assert found["only"] == [["train grad_norm"], ["train error_px"]]
    code, text = command("a", "b")
    assert code == 0
    assert "only in a: train grad_norm\n" in text
    assert "only in b: train error_px\n" in text
    assert "b: bit for bit the same in the metrics; no tensors were compared" in text


def test_several_lines_of_a_split_at_one_step_are_compared_in_their_order(tmp_path):
    make_run(tmp_path / "a", [line(1, "mine", x=1), line(1, "mine", x=2)])
    make_run(tmp_path / "b", [line(1, "mine", x=1), line(1, "mine", x=3)])
    (entry,) = compare.compare_metrics(tmp_path / "a", tmp_path / "b")["metrics"]
    assert entry["differences"] == [[1, 0.0], [1, 1 / 3]]


def test_a_half_written_last_line_is_left_out_and_the_rest_compared(tmp_path, command):
    make_run(tmp_path / "a", [*LINES, line(3, loss=0.5)])
    make_run(tmp_path / "b", tail='{"split": "train", "step": 3, "lo')
    code, text = command("a", "b")
    assert code == 0
    assert "3 lines up to step 2" in text
    assert "step 3 of 2, not finished: it goes on, or was stopped" in text


def test_another_damaged_line_is_an_error_with_its_number(tmp_path, command):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", tail='{"split": "tr\n{"split": "train", "step": 3}\n')
    code, text = command("a", "b")
    assert code == 2
    assert "b/metrics.jsonl is damaged: line 4 is not a JSON object" in text


def test_a_small_difference_is_the_same_within_the_tolerance(tmp_path, command):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", [line(1, loss=2.0 + 1e-9), *LINES[1:]], {"versions": {"torch": "3"}})
    code, text = command("a", "b")
    assert code == 0
    assert (
        "b: the same within the tolerance (largest difference 5.0e-10 in train loss at step 1); "
        "what can explain it: versions (torch)" in text
    )
    code, text = command("a", "b", "--tolerance", "-1")
    assert code == 2
    code, text = command("a", "b", "--tolerance=1e-12")
    assert code == 1
    assert "2.000000001" in text  # with the digits that show the difference


def accuracies(of_train, of_test):
    return [line(4, accuracy=of_train), line(4, "test", accuracy=of_test, samples=10_000)]


def test_a_prediction_that_rounding_flips_is_within_the_tolerance_and_several_are_not(tmp_path, command):
    # 4 steps of 30, of 100 items: the fourth has 10.
    record = {"arguments": {"batch_size": 30}, "data": {"train": 100}}
    make_run(tmp_path / "a", accuracies(50 / 100, 0.9), record)
    make_run(tmp_path / "flipped", accuracies(51 / 100, 0.9001), record)
    make_run(tmp_path / "two", accuracies(52 / 100, 0.9), record)
    make_run(tmp_path / "tests", accuracies(50 / 100, 0.9002), record)
    make_run(tmp_path / "no_count", accuracies(0.5003, 0.9), record)
    code, text = command("a", "flipped")
    assert code == 0, text
    assert "flipped: the same within the tolerance (largest difference 2.0e-02 in train accuracy at step 4)" in text
    assert "train accuracy: at most 1 sample of a line" in text
    for other in ("two", "tests", "no_count"):
        assert command("a", other)[0] == 1
    assert command("a", "flipped", "--tolerance=0")[0] == 1


# Facts


def test_with_the_same_virtual_processes_the_number_of_processes_explains_nothing(tmp_path, command):
    def launch(count, device="cpu"):
        processes = [{"host": "h", "device": device, "cpu_threads": 1}] * count
        return {"from_step": 0, "num_processes": count, "backend": "gloo" * (count > 1), "processes": processes}

    for name, virtual, launches in (
        ("a", 6, [launch(1)]),
        ("b", 6, [launch(3)]),
        ("c", 6, [launch(3, "cuda")]),
        ("d", 0, [launch(3)]),
    ):
        lines = LINES if name == "a" else [line(1, loss=3.0)]
        make_run(tmp_path / name, lines, {"arguments": {"virtual_processes": virtual}, "launches": launches})
    last = {name: command("a", name)[1].splitlines()[-1] for name in "bcd"}
    assert last["b"].endswith("; nothing that is recorded explains it")
    assert last["c"].endswith("; what can explain it: topology (devices)")
    assert last["d"].endswith(
        "; what can explain it: arguments (virtual_processes), topology (num_processes, backend, devices)"
    )


def test_what_differs_is_found_and_paths_are_no_difference(tmp_path):
    a = make_run(tmp_path / "a")
    assert not any(compare.compare_facts(a, make_run(tmp_path / "same")).values())
    arguments = {"lr": 0.2, "output_dir": "elsewhere", "dataset": "/y/mnist", "resume": True}
    record = {
        "arguments": arguments,
        "data": {"dataset": "other/mnist", "train": 11, "fingerprint": "g"},
        "versions": {"torch": "2", "numpy": "1"},
        "git_commit": "0123456789abcdef+",
        "total_steps": 3,
    }
    found = compare.compare_facts(a, make_run(tmp_path / "b", record=record))
    assert found == {
        "arguments": {"lr": [0.1, 0.2], "dataset": [None, "/y/mnist"], "total_steps": [2, 3]},
        "topology": {},
        "data": {"dataset": ["/x/mnist", "other/mnist"], "train": [10, 11], "fingerprint": ["f", "g"]},
        "versions": {"numpy": [None, "1"]},
        "code": {"git_commit": ["0123456789abcdef", "0123456789abcdef+"]},
    }
    record = {"arguments": {"lr": 0.1, "dataset": "/elsewhere/data"}}
    assert compare.compare_facts(a, make_run(tmp_path / "c", record=record))["arguments"] == {}


def test_the_topology_is_that_of_each_step(tmp_path):
    def launch(step, count):
        processes = [{"host": f"h{rank}", "device": "cpu"} for rank in range(count)]
        return {"from_step": step, "num_processes": count, "processes": processes}

    a = make_run(tmp_path / "a", record={"launches": [launch(0, 1)]})
    launches = [launch(0, 4), launch(0, 1), launch(20, 3), launch(10, 2), launch(30, 2)]
    b = make_run(tmp_path / "b", record={"launches": launches})
    assert compare.compare_facts(a, b)["topology"] == {
        "num_processes": [1, "1, from step 10: 2"],
        "devices": ["1 x cpu", "1 x cpu, from step 10: 2 x cpu"],
        "machines": [1, "1, from step 10: 2"],
        "launched at step": ["0", "0, 0, 20, 10, 30"],
    }


def test_flags_of_every_run_do_not_explain_a_difference():
    parser = flags.ArgumentParser("")
    parser.add_run_flags(log_every=1)
    names = vars(parser.parse_args([])).keys() - {"resume_invariants", "seed", "virtual_processes"}
    assert names <= {*compare.WITHOUT_EFFECT, *compare.NOT_COMPARED}
    facts = {"arguments": {"log_every": [1, 2]}, "topology": {}}
    assert compare.explain(facts) == "nothing that is recorded explains it"
    facts["arguments"]["lr"] = [1, 2]
    assert compare.explain(facts) == "what can explain it: arguments (lr)"


# Tensors


def test_differences_are_relative_to_the_largest_entry(tmp_path, command):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    weights = {f"w{number:02}": torch.tensor([[4.0, -8.0]]) for number in range(15)}
    moments = {"w00/exp_avg": torch.ones(2, dtype=torch.bfloat16), "w00/step": torch.tensor(2)}
    add_checkpoint(a, 2, {"model": weights}, optimizer=moments)
    add_checkpoint(a, 4, {"model": weights}, optimizer=moments)
    changed = {}
    for number, (name, tensor) in enumerate(weights.items()):
        changed[name] = tensor + number * 0.5
    moments = {**moments, "w00/exp_avg": torch.zeros(2, dtype=torch.bfloat16)}
    add_checkpoint(b, 2, {"model": changed}, optimizer=moments)
    found = compare.compare_tensors(a, b)
    assert (found["source"], found["step"]) == ("the checkpoint of step 2", 2)
    by_name = {entry["name"]: entry for entry in found["tensors"]}
    assert by_name["w03"]["difference"] == 1.5 / 8
    assert by_name["w00"]["bitwise"]
    assert by_name["w00/exp_avg"]["difference"] == 1
    assert {entry["kind"] for entry in found["tensors"]} == {"model", "optimizer"}

    code, text = command("a", "b")
    assert code == 1
    assert "model: 1 of 15 tensors bitwise equal" in text
    assert "optimizer: 1 of 2 tensors bitwise equal" in text
    shown = [text.split()[:2] for text in text.splitlines() if text.startswith("  model ")]
    assert shown == [["model", f"w{number:02}"] for number in range(14, 5, -1)]
    assert "and 5 more with smaller differences: --all shows them" in text
    assert "b: different: in the checkpoint of step 2, optimizer w00/exp_avg" in text
    _, text = command("a", "b", "--all")
    assert text.count("\n  model ") == 15
    assert "equal\n" in text


@pytest.mark.parametrize(
    ("first", "second", "difference", "bitwise"),
    [
        ([1.0, math.nan], [1.0, math.nan], 0, True),
        ([0.0, 1.0], [-0.0, 1.0], 0, False),
        ([1.0, math.nan], [1.0, 2.0], math.inf, False),
        ([math.inf, 2.0], [math.inf, 1.0], 0.5, False),
        ([0.0, 0.0], [0.0, 1.0], math.inf, False),
        ([True, False], [True, True], 1, False),
        ([2j], [1j], 0.5, False),
        ([], [], 0, True),
    ],
)
def test_special_entries(tmp_path, monkeypatch, first, second, difference, bitwise):
    monkeypatch.setattr(differences, "CHUNK", 1)
    for name, values in (("a", first), ("b", second)):
        add_checkpoint(make_run(tmp_path / name), 1, {"model": {"w": torch.tensor(values)}})
    (entry,) = compare.compare_tensors(tmp_path / "a", tmp_path / "b")["tensors"]
    assert (entry["difference"], entry["bitwise"]) == (difference, bitwise)


def test_what_is_missing_or_of_another_form_is_named(tmp_path, command):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    one = {"x": torch.ones(2), "y": torch.ones(2), "z": torch.ones(2), "mine": torch.ones(1)}
    two = {"x": torch.ones(3), "y": torch.ones(2).half(), "z": torch.ones(2), "yours": torch.ones(1)}
    add_checkpoint(a, 1, {"model": one, "ema": {"x": torch.ones(1)}})
    add_checkpoint(b, 1, {"model": two})
    code, text = command("a", "b")
    assert code == 1
    for sentence in (
        "model: x is float32 (2,) and float32 (3,)",
        "model: y is float32 (2,) and float16 (2,)",
        "model: mine is only in a",
        "model: yours is only in b",
        "ema.safetensors is only in a",
        "model: 1 of 1 tensor bitwise equal",
    ):
        assert f"  {sentence}\n" in text


def test_state_that_is_no_tensor_is_compared_but_not_how_an_optimizer_computes(tmp_path, command):
    for name, epoch, fused in (("a", 3, True), ("b", 4, None)):
        state = {
            "scheduler": {"dict": {"last_epoch": epoch, "kind": "cos"}},
            "optimizer": {"groups": [{"fused": fused, "lr": 0.1}]},
        }
        run = make_run(tmp_path / name)
        add_checkpoint(run, 1, {"model": {"w": torch.ones(1)}}, state)
    found = compare.compare_tensors(tmp_path / "a", tmp_path / "b")
    expected = {"name": "scheduler.last_epoch", "values": [3, 4], "difference": 0.25}
    assert found["state"] == [expected]
    code, text = command("a", "b")
    assert code == 1
    assert "b: different: in the checkpoint of step 1, scheduler.last_epoch" in text


def test_without_checkpoints_the_final_models_of_the_same_step_are_compared(tmp_path, command):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    save_file({"w": torch.ones(1)}, a / "net.safetensors")
    found = compare.compare_tensors(a, b)
    assert found["source"] is None
    for name in ("net", "net_best"):
        save_file({"w": torch.ones(1)}, b / f"{name}.safetensors")
    found = compare.compare_tensors(a, b)
    assert found["source"] == "the final models"
    assert found["mismatches"] == []
    assert [entry["bitwise"] for entry in found["tensors"]] == [True]
    finish(a, 2)
    finish(b, 3, stopped_early=True)
    assert "of different steps, 2 and 3" in compare.compare_tensors(a, b)["why"]
    _, text = command("a", "b")
    assert "step 2 of 2, finished " in text
    assert "step 3 of 2, stopped early" in text


def test_a_damaged_file_of_tensors_is_an_error(tmp_path, command):
    for name in ("a", "b"):
        folder = add_checkpoint(make_run(tmp_path / name), 1, {"model": {"w": torch.ones(1)}})
    (folder / "model.safetensors").write_bytes(b"none")
    code, text = command("a", "b")
    assert code == 2
    assert "b/checkpoints/step_00000001/model.safetensors cannot be read" in text


# The command


def test_several_runs_and_a_picture_elsewhere(tmp_path, command, pictures):
    make_run(tmp_path / "x" / "run")
    make_run(tmp_path / "y" / "run")
    make_run(tmp_path / "z", [line(1, loss=7.0)])
    code, text = command("x/run", "y/run", "z", "--picture", "curves.png")
    assert code == 1
    assert "y/run: bit for bit the same" in text
    assert "x/z: different" not in text
    assert "/z: different: first at step 1 in train loss" in text
    assert (tmp_path / "curves.png").is_file()
    assert not list(tmp_path.rglob("compare.png"))
    code, text = command("x/run", "y/run", "--picture", "missing/curves.png")
    assert code == 0
    assert "curves.png is missing, it cannot be drawn or written" in text


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(None, "b is not a run: it has no run.json"), ("{", "b/run.json is damaged"), ("[]", "b/run.json is damaged")],
)
def test_a_folder_without_a_run_is_one_sentence(tmp_path, command, content, sentence):
    make_run(tmp_path / "a")
    assert "b is not a run: there is no such folder" in command("a", "b")[1]
    (tmp_path / "b").mkdir()
    if content is not None:
        (tmp_path / "b" / "run.json").write_text(content)
    code, text = command("a", "b")
    assert code == 2
    assert sentence in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "run.json", "summary.json", "checkpoints/step_00000001/model.safetensors"]
)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_and_a_device_are_errors_and_not_waited_for(tmp_path, command, name, kind):
    for run in ("a", "b"):
        add_checkpoint(make_run(tmp_path / run), 1, {"model": {"w": torch.ones(1)}})
    path = tmp_path / "b" / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    code, text = command("a", "b")
    assert code == 2
    assert "is not a regular file" in text


ODD = [
    *[{name: odd} for name in ("arguments", "data", "versions") for odd in (3, [], "x", True)],
    *[{"launches": odd} for odd in ({}, 3, "x", [3], [[]], [None], [{"processes": 3}], [{"processes": [3]}])],
    *[{"launches": [{"from_step": odd}]} for odd in ("x", None, [], True)],
    *[{"git_commit": 3}, {"git_commit": []}, {"total_steps": "x"}, {"command": "x"}, {"command": 3}],
]


@pytest.mark.parametrize("odd", ODD, ids=json.dumps)
def test_a_record_of_odd_form_is_an_error(tmp_path, command, odd):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", record=odd)
    for runs in (("a", "b"), ("b", "a")):
        code, text = command(*runs)
        assert code == 2
        assert "b/run.json is damaged" in text
        assert "Traceback" not in text


@pytest.mark.parametrize(
    "odd",
    [
        {"launches": [{"processes": [{"host": [], "device": {}, "cpu_threads": []}]}]},
        {"launches": [{"from_step": 1e400, "x": [1]}, {"x": {}}]},
        {"command": [[]]},
        {"arguments": {"batch_size": 0, "x\ny": [[]]}, "data": {"train": "x"}},
        {"total_steps": 10**400},
    ],
    ids=json.dumps,
)
def test_what_is_odd_and_can_be_compared_is_no_error(tmp_path, command, odd):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", record=odd)
    assert command("a", "b")[0] == 0
    assert command("b", "a")[0] == 0


@pytest.mark.parametrize("content", ["[" * 100_000, '{"step": "x"}', "9" * 5000, "\x00"])
def test_a_summary_of_odd_form_is_an_error(tmp_path, command, content):
    make_run(tmp_path / "a")
    (make_run(tmp_path / "b") / "summary.json").write_text(content)
    code, text = command("a", "b")
    assert code == 2
    assert "b/summary.json is damaged" in text


@pytest.mark.parametrize("value", ["1" * 400, "[" * 100_000])
def test_a_number_that_is_none_is_a_damaged_line(tmp_path, command, value):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", tail=f'{{"split": "train", "step": 3, "x": {value}}}\n')
    code, text = command("a", "b")
    assert code == 2
    assert "line 4" in text


def test_control_characters_are_shown_as_their_escapes(tmp_path, command):
    make_run(tmp_path / "a")
    record = {"arguments": {"lr": "\x1b[31mred", "\x1b]0;title": "\x07"}, "versions": {"torch\x9b": "\x1b[2J"}}
    make_run(tmp_path / "b", [line(1, "\x1b[1m", loss=1.0), line(1, **{"x\x1b": 2.0})], record)
    _, text = command("a", "b")
    assert "\\x1b[31mred" in text
    assert not {"\x1b", "\x07", "\x9b"} & set(text)


def test_an_error_that_nobody_thought_of_does_not_mean_different(tmp_path, command, monkeypatch):
    make_run(tmp_path / "a")
    monkeypatch.setattr(compare, "judge", lambda *arguments, **options: 1 / 0)
    code, text = command("a", "a")
    assert code == 2
    assert "ZeroDivisionError" in text


def test_without_anything_in_common_the_exit_code_is_2(tmp_path, command):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", [], {"arguments": None, "launches": [], "data": None})
    (tmp_path / "b" / "metrics.jsonl").unlink()
    code, text = command("a", "b")
    assert code == 2
    assert "b: nothing to compare" in text


def test_importing_is_quick():
    check = "import sys, utils.compare; print({'torch', 'accelerate', 'matplotlib'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_picture_of_infinite_equal_and_missing_values(count):
    points = [(1, 1.0), (2, 0.5)]
    curves = {f"metric_{number}": {"train": points, "test": points[1:]} for number in range(count)}
    differences = {"metric_0": {"train": [[1, 0.0], [2, math.inf]]}}
    runs = {"a": (curves, {}), "b": ({"only": {"test": points}}, differences), "c": ({}, {})}
    figure = plots.draw_comparison(runs, 1e-6)
    figure.canvas.draw()
    assert len(figure.axes) == 2 * (count + 1)
    names = [axes.get_ylabel() for axes in figure.axes]
    assert names.count("relative difference") == count + 1
    assert plots.draw_comparison({"a": ({}, {}), "b": ({}, {})}, 0) is None
