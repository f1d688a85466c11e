"""--profile: the table and the trace have the steps asked for, and the numbers of the run stay the same."""

import gzip
import json
import re

import pytest


@pytest.mark.parametrize("cut", [["--virtual_processes", 4], ["--gradient_accumulation_steps", 2]])
def test_a_profile_changes_no_bit(train, tmp_path, capfd, cut):
    flags = ["--batch_size", 100, "--max_steps", 22, *cut]  # 11 steps in an epoch; the run goes on after the profile
    train("plain", *flags)
    capfd.readouterr()
    train("profiled", *flags, "--profile", 3)
    out, err = capfd.readouterr()
    assert "GetDeviceCount" not in err
    plain, profiled = tmp_path / "plain", tmp_path / "profiled"
    assert (plain / "model.safetensors").read_bytes() == (profiled / "model.safetensors").read_bytes()
    table = (profiled / "profile" / "table.txt").read_text()
    assert "aten::addmm" in table
    assert re.search(r"^ +Optimizer.step#AdamW.step .* 3 *$", table, re.M)
    assert "Optimizer.step#AdamW.step" in out
    trace = json.loads(gzip.decompress((profiled / "profile" / "trace_rank0.json.gz").read_bytes()))
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert [name for name in names if name.startswith("ProfilerStep")] == [f"ProfilerStep#{n}" for n in (10, 11, 12)]


def test_fewer_steps_than_asked_for_are_recorded_near_the_end_and_then_none(train, tmp_path, capfd):
    train("run", "--batch_size", 100, "--max_steps", 12, "--profile", 5)
    table = (tmp_path / "run" / "profile" / "table.txt").read_text()
    assert re.search(r"^ +Optimizer.step#AdamW.step .* 2 *$", table, re.M)
    capfd.readouterr()
    train("short", "--batch_size", 100, "--max_steps", 10, "--profile", 5)
    assert "warning: no profile: it needs 11 steps, and fewer are left" in capfd.readouterr().out
    assert (tmp_path / "short" / "summary.json").exists()


@pytest.mark.slow
def test_two_processes_record_their_all_reduce(launcher, tmp_path):
    flags = ["--profile", 5, "--max_steps", 20, "--batch_size", 64]
    launcher("cpu_ddp", *flags, "--output_dir", tmp_path / "run")
    assert "gloo:all_reduce" in (tmp_path / "run" / "profile" / "table.txt").read_text()
    traces = sorted(path.name for path in (tmp_path / "run" / "profile").glob("trace*"))
    assert traces == ["trace_rank0.json.gz", "trace_rank1.json.gz"]
