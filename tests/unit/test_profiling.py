"""--profile: the parts of a step add up to it, and the numbers of the run stay the same."""

import gzip
import json
from collections import Counter

import pytest
import run_reader

from utils.extras.profiling import summarize, total_length


def span(name, begin, end, cat="user_annotation"):
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": end - begin, "tid": 1}


CPU = [
    span("step", 0, 10_000),
    span("data wait", 0, 1_000),
    span("forward", 1_000, 3_000),
    span("backward", 3_000, 8_000),
    span("autograd::engine::evaluate_function: AddmmBackward0", 3_000, 6_000, "cpu_op"),
    span("gloo:all_reduce", 4_000, 7_000),
    span("gloo:all_reduce", 5_000, 7_500),  # overlaps the one before
    span("optimizer", 8_000, 9_500),
    span("step", 20_000, 20_000),  # the wait that finds the end of the data
    span("gloo:all_reduce", 21_000, 23_000),  # of a test between two steps: not counted
    span("step", 30_000, 34_000),
    span("forward", 30_000, 34_000),
    {"ph": "M", "name": "process_name"},
]
GPU = [
    span("step", 0, 10_000),
    span("backward", 0, 10_000),
    # The CPU only launches the kernels.
    span("autograd::engine::evaluate_function: AddmmBackward0", 0, 9_000, "cpu_op"),
    span("sgemm", 1_000, 5_000, "kernel"),
    span("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 4_000, 7_000, "kernel"),
]
PARTS = ["step", "data wait", "forward", "backward", "optimizer"]


def test_parts_communication_and_overlap_of_a_trace():
    table = summarize(CPU, PARTS, steps=2)
    assert table["mean_ms"] == {
        "data wait": 0.5,
        "forward": 3.0,
        "backward": 2.5,
        "optimizer": 0.75,
        "other": 0.25,
        "step": 7.0,
    }
    assert (table["communication_ms"], table["overlapped_ms"]) == (1.75, 1.0)
    table = summarize(GPU, ["step", "backward"], steps=1)
    assert (table["communication_ms"], table["overlapped_ms"]) == (3.0, 1.0)


def test_overlapping_intervals_count_once():
    assert total_length([]) == 0
    assert total_length([(5, 7), (0, 2), (1, 3), (1, 2), (7, 8)]) == 6


def losses(folder):
    return [(line["split"], line["step"], line["loss"]) for line in run_reader.lines(folder)]


def test_a_profile_changes_no_number_and_leaves_tests_out(train, tmp_path, capfd):
    # 11 steps in an epoch.
    flags = ["--batch_size", 100, "--gradient_accumulation_steps", 2, "--max_steps", 26]
    train("plain", *flags)
    capfd.readouterr()
    train("profiled", *flags, "--profile", 3)
    out, err = capfd.readouterr()
    assert losses(tmp_path / "plain") == losses(tmp_path / "profiled")
    assert "GetDeviceCount" not in err
    folder = tmp_path / "profiled" / "profile"
    (table,) = json.loads((folder / "table.json").read_text())
    parts = table["mean_ms"]
    total = parts.pop("step")
    assert list(parts) == ["data wait", "forward", "backward", "optimizer", "other"]
    assert min(parts.values()) > 0
    assert sum(parts.values()) == pytest.approx(total, abs=1e-3)
    assert f"{total:.3f}" in out
    trace = json.loads(gzip.decompress((folder / "trace_rank0.json.gz").read_bytes()))
    annotations = [e["name"] for e in trace["traceEvents"] if e.get("cat") == "user_annotation"]
    counts = Counter(annotations)
    spans = {name: [] for name in ("forward", "backward")}
    gradients = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X":
            begin_and_end = event["ts"], event["ts"] + event["dur"]
            if event.get("cat") == "user_annotation" and event["name"] in spans:
                spans[event["name"]].append(begin_and_end)
            elif event["name"].startswith("autograd::engine::evaluate_function: AddmmBackward"):
                gradients.append(begin_and_end)
    assert gradients
    for begin, end in gradients:
        assert any(first <= begin and end <= last for first, last in spans["backward"])
        assert not any(first <= begin and end <= last for first, last in spans["forward"])
    for name in spans:
        total_ms = sum(end - begin for begin, end in spans[name]) / 1000
        assert parts[name] == pytest.approx(total_ms / 3, rel=1e-3)
    # Steps 11 to 13: an epoch ends after the 11th, and a test and a checkpoint follow.
    assert (counts["forward"], counts["backward"], counts["optimizer"]) == (6, 6, 3)


@pytest.mark.parametrize("parts", [["--virtual_processes", 4], ["--gradient_accumulation_steps", 2]])
def test_a_profile_leaves_the_weights_their_bits_also_after_it_has_ended(train, tmp_path, parts):
    flags = ["--batch_size", 100, "--max_steps", 22, *parts]
    train("plain", *flags)
    train("profiled", *flags, "--profile", 2)  # ends 10 steps before the run
    plain, profiled = (tmp_path / name / "model.safetensors" for name in ("plain", "profiled"))
    assert plain.read_bytes() == profiled.read_bytes()


def test_too_few_steps_are_an_error_before_the_first(train, tmp_path, capfd):
    assert train("short", "--profile", 3, "--max_steps", 12) == 2
    sentence = "--profile 3 takes 13 steps, 10 of them to warm up, and this run has 12 to go"
    assert sentence in capfd.readouterr().err
    assert not (tmp_path / "short" / "metrics.jsonl").exists()


def test_a_table_that_cannot_be_written_is_a_warning(train, tmp_path, capfd):
    (tmp_path / "run" / "profile" / "table.json").mkdir(parents=True)
    assert train("run", "--profile", 1, "--batch_size", 100, "--max_steps", 12) is None
    warning = f"warning: {tmp_path}/run/profile/table.json cannot be written: Is a directory"
    assert warning in capfd.readouterr().out
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow
def test_two_processes_record_their_all_reduce(launcher, tmp_path):
    flags = ["--profile", 5, "--max_steps", 20, "--batch_size", 64]
    done = launcher("cpu_ddp", *flags, "--output_dir", tmp_path / "run")
    tables = json.loads((tmp_path / "run" / "profile" / "table.json").read_text())
    assert len(tables) == 2
    for table in tables:
        assert table["mean_ms"]["backward"] >= table["overlapped_ms"]
        assert table["mean_ms"]["step"] > table["communication_ms"] > 0
    assert done.stdout.count("over 2 ranks") == 1
    assert sorted(path.name for path in (tmp_path / "run" / "profile").glob("trace*")) == [
        "trace_rank0.json.gz",
        "trace_rank1.json.gz",
    ]
