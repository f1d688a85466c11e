"""The report of the tests on GPUs, made from results of two GPUs that are not here: what did not run never looks
passed."""

from types import SimpleNamespace

import machine_report
import pytest
import torch


def result(check, outcome="passed", text="", **properties):
    """What pytest hands over of a test."""
    known = {"place": 1, "config": "ddp", "check": check, **properties}
    longrepr = ("file.py", 1, f"Skipped: {text}") if outcome == "skipped" else text
    return SimpleNamespace(
        nodeid=check, outcome=outcome, longrepr=longrepr, when="call", duration=2.4, user_properties=list(known.items())
    )


SPEED = [2, 2, "transformer", 240000.0, "tokens", 103.0, 0.62, 5.1]
PASSED = result("numbers", figure="loss 4e-07", tolerance="1e-05", speed=[SPEED], machine="ddp.yaml: nccl by Class")
CRASHED = SimpleNamespace(
    nodeid="b.py::test_crash", outcome="failed", longrepr="worker 'gw0' crashed", when="???", user_properties=()
)
NOT_COLLECTED = SimpleNamespace(nodeid="c.py", outcome="failed", longrepr="ImportError: nothing")


@pytest.fixture
def two_gpus(monkeypatch):
    gpu = SimpleNamespace(name="NVIDIA GeForce RTX 4090", total_memory=24 * 2**30, major=8, minor=9)
    known = {"device_count": 2, "get_device_name": gpu.name, "get_device_properties": gpu}
    known |= {"can_device_access_peer": False, "get_arch_list": ["sm_80", "sm_120"]}
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    outputs = {"topo": "\tGPU0\tGPU1\nGPU0\t X \tPHB\n\nLegend: ...", None: "| CUDA Version: 13.2 |"}
    monkeypatch.setattr(machine_report, "output_of", lambda *words: outputs.get((*words, None)[1], "570.1, 450.00 W\n"))


def test_the_first_line_counts_what_passed_of_what_there_was_to_run(two_gpus):
    bits = [result("bits"), result("bits", "failed", "AssertionError: 3 | 4")]  # the second after the test
    results = [PASSED, *bits, result("faults", "skipped", "needs 4 GPUs")]
    collected = frozenset({"numbers", "bits", "faults", "never begun"})
    text = machine_report.render([*results, CRASHED, NOT_COLLECTED], collected, "-m gpu")
    print(text)
    verdict, *others = text.splitlines()
    assert verdict == (
        "# 2 x NVIDIA GeForce RTX 4090: 1 of 6 checks passed; 3 failed: b.py::test_crash, c.py, bits (ddp); "
        "1 skipped: 1 x needs 4 GPUs; 1 without a result: the session ended early"
    )
    rows = [line for line in others if line.startswith("| ")]
    assert [row.count(" | passed |") for row in rows].count(1) == 1
    assert "| ddp | numbers | loss 4e-07 | 1e-05 | 2 | passed |" in rows
    assert "| ddp | bits |  |  | 2 | **failed**: AssertionError: 3 \\| 4 |" in rows
    assert "| ddp | 2 | 2 | transformer | 240,000 | tokens | 103 | 62.0% | 5.10 |" in rows
    for part in ("pytest -m gpu", "capability 8.9", "sm_80 sm_120", "driver: 13.2", "- 0 / 0 -", "450.00 W", "PHB"):
        assert part in text
    assert "- ddp.yaml: nccl by Class" in others
    assert "Legend" not in text


def test_without_a_gpu_it_says_so_and_without_a_check_there_is_no_report():
    assert machine_report.render([result("bits", "skipped", "needs a CUDA GPU")]) is None
    assert machine_report.render([SimpleNamespace(nodeid="a", outcome="passed", user_properties=())]) is None
    tried = machine_report.render([PASSED], stand_ins=True)
    assert tried.startswith("# TRIAL OF THE TESTS, which says nothing about GPUs")
    if not torch.cuda.is_available():
        assert "; no GPU: 1 of 1 check passed\n" in tried


@pytest.mark.parametrize(
    ("gpu", "kind", "tflops"),
    [
        ("NVIDIA A100-SXM4-40GB", "tf32", 156),
        ("NVIDIA A10", "float32", 31.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("Tesla T4", "bf16", None),
    ],
)
def test_the_peak_of_an_unknown_gpu_is_unknown(gpu, kind, tflops):
    assert machine_report.peak_tflops(gpu, kind) == tflops
