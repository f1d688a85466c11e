"""The rows of a sharded tensor that a process has."""

import pytest
import torch

from utils.parallel.shards import local_rows


class Mesh:
    """The mesh of FSDP, (shards,), or of HSDP, (replicas, shards), as one process sees it."""

    def __init__(self, shape: tuple, place: tuple):
        self.shape, self.place, self.ndim = shape, place, len(shape)

    def get_local_rank(self, dim: int) -> int:
        return self.place[dim]


class Sharded(torch.Tensor):
    def to_local(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).chunk(self.device_mesh.shape[-1])[self.device_mesh.place[-1]]


@pytest.mark.parametrize(("shape", "place"), [((3,), (2,)), ((2, 3), (1, 2)), ((3, 2), (2, 1)), ((2, 3), (1, 0))])
def test_the_first_row_is_the_one_that_torch_gives_this_process(shape, place):
    whole = torch.arange(14.0).view(7, 2)
    tensor = whole.as_subclass(Sharded)
    tensor.device_mesh = Mesh(shape, place)
    rows, first = local_rows(tensor)
    assert len(rows) in (1, 3, 4)
    assert torch.equal(rows, whole[first : first + len(rows)])


def test_a_whole_tensor_begins_with_its_first_row():
    whole = torch.arange(4.0)
    rows, first = local_rows(whole)
    assert (rows is whole, first) == (True, 0)
