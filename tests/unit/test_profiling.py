"""--profile: the parts of a step add up to it, and the numbers of the run stay the same."""

import gzip
import json
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from utils.extras import profiling
from utils.extras.profiling import mean_ms


def event(name, begin, end, device="CPU", is_user_annotation=False):
    kind, span = torch.autograd.DeviceType.__members__[device], SimpleNamespace(start=begin, end=end)
    return SimpleNamespace(name=name, device_type=kind, is_user_annotation=is_user_annotation, time_range=span)


CPU = [
    event("step", 0, 10_000),
    event("forward", 1_000, 3_000),
    event("backward", 3_000, 8_000),
    event("autograd::engine::evaluate_function: AddmmBackward0", 3_000, 6_000),
    event("gloo:all_reduce", 4_000, 7_000),
    event("gloo:all_reduce", 5_000, 7_500),  # overlaps the one before
    event("gloo:all_reduce", 21_000, 23_000),  # of a test between two steps: not counted
    event("step", 30_000, 34_000),
    event("forward", 30_000, 34_000),
]
GPU = [
    event("step", 0, 10_000),
    event("autograd::engine::evaluate_function: AddmmBackward0", 0, 9_000),  # only launches the kernels
    event("sgemm", 1_000, 5_000, "CUDA"),
    event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 4_000, 7_000, "CUDA"),
    event("nccl:all_reduce", 2_000, 9_000, "CUDA", is_user_annotation=True),
]


def test_parts_communication_and_overlap_of_a_trace():
    parts = {"forward": 3.0, "backward": 2.5, "other": 1.5, "step": 7.0}
    assert mean_ms(CPU, ["step", "forward", "backward"], 2) == parts | {"communication": 1.75, "  overlapped": 1.0}
    assert mean_ms(GPU, ["step"], 1) == {"other": 10.0, "step": 10.0, "communication": 3.0, "  overlapped": 1.0}


@pytest.mark.parametrize(("events", "is_blind"), [(GPU, False), (CPU, True)])
def test_a_gpu_without_recorded_kernels_is_said_to_be_so(monkeypatch, tmp_path, capsys, events, is_blind):
    """Otherwise the table shows a communication of 0 ms."""
    monkeypatch.setattr(profiling, "gather_object", lambda mine: mine)
    averages = SimpleNamespace(table=lambda sort_by, row_limit: "")
    recorder = SimpleNamespace(
        events=lambda: events, key_averages=lambda: averages, export_chrome_trace=lambda path: None
    )
    accelerator = SimpleNamespace(
        device=torch.device("cuda"), is_main_process=True, process_index=0, around_backward=[1]
    )
    profiler = SimpleNamespace(
        accelerator=accelerator, folder=tmp_path, steps=1, names=["step"], hooks=[], around_backward=1
    )
    profiling.Profiler._report(profiler, recorder)
    assert ("warning: no GPU events" in capsys.readouterr().out) == is_blind


@pytest.mark.parametrize("cut", [["--virtual_processes", 4], ["--gradient_accumulation_steps", 2]])
def test_a_profile_changes_no_bit_and_leaves_tests_out(train, tmp_path, capfd, cut):
    flags = ["--batch_size", 100, "--max_steps", 22, *cut]  # 11 steps in an epoch; the run goes on after the profile
    train("plain", *flags)
    capfd.readouterr()
    train("profiled", *flags, "--profile", 3)
    out, err = capfd.readouterr()
    assert "GetDeviceCount" not in err
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    assert (plain / "model.safetensors").read_bytes() == (profiled / "model.safetensors").read_bytes()
    table = (profiled / "profile" / "table.txt").read_text()
    assert table.partition("\n\n")[0] in out
    assert "aten::addmm" in table
    *parts, step = [float(ms) for ms in re.findall(r"^  \D+ (\d+\.\d+) ", table, re.M)[:6]]
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(step, abs=0.01)
    trace = json.loads(gzip.decompress((profiled / "profile" / "trace_rank0.json.gz").read_bytes()))
    counts = Counter(event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation")
    # Steps 11 to 13: an epoch ends after the 11th, and a test and a checkpoint follow.
    micro_batches = 3 * cut[1]
    assert (counts["forward"], counts["backward"], counts["optimizer"]) == (micro_batches, micro_batches, 3)


def test_fewer_steps_than_asked_for_are_recorded_near_the_end_and_then_none(train, tmp_path, capfd):
    train("run", "--batch_size", 100, "--max_steps", 12, "--profile", 5)
    assert "profile       2 steps after the first 10" in capfd.readouterr().out
    train("short", "--batch_size", 100, "--max_steps", 10, "--profile", 5)
    assert "warning: no profile: it needs 11 steps, and fewer are left" in capfd.readouterr().out
    assert (tmp_path / "short" / "summary.json").exists()


@pytest.mark.slow
def test_two_processes_record_their_all_reduce(launcher, tmp_path):
    flags = ["--profile", 5, "--max_steps", 20, "--batch_size", 64]
    done = launcher("cpu_ddp", *flags, "--output_dir", tmp_path / "run")
    assert re.search(r"  communication +(?!0\.000)\d+\.\d+ .* over 2 ranks", done.stdout)
    traces = sorted(path.name for path in (tmp_path / "run" / "profile").glob("trace*"))
    assert traces == ["trace_rank0.json.gz", "trace_rank1.json.gz"]
