"""A stand-in for test_topologies.py, whose report tests/harness/test_machine_report.py reads."""

from types import SimpleNamespace

import pytest

both = [SimpleNamespace(name="cpu"), SimpleNamespace(name="ddp, bf16")]


@pytest.fixture
def topology(request):
    if "bf16" in request.param.name:
        pytest.skip("needs 2 GPUs, and this machine has 0")
    return request.param


@pytest.mark.parametrize("topology", both, indirect=True)
@pytest.mark.parametrize("dtype", ["float32"])
def test_numbers_are_the_same(topology, dtype, record_property):
    record_property("figure", "loss 1.0e-07")
    record_property("tolerance", "1.0e-05")


@pytest.mark.parametrize("topology", both[:1], indirect=True)
def test_speed_is_reported(topology, record_property):
    record_property("speed", [1, 1, 12345.6, 7.89])
    record_property("figure", "12,346 images/s")
    assert 2 == 3, "a | b"


def test_of_no_topology():
    pass
