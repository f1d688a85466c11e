import numpy as np
import pytest
import torch

from utils.fingerprint import digest

CONTENTS = [
    {"image": torch.ones(2), "label": 1},
    {"image": torch.ones(2), "class": 1},  # a column has a different name
    {"image": torch.zeros(2), "label": 1},
    (torch.ones(2), 1),
    (torch.ones(2, 1), 1),
    (torch.ones(2, dtype=torch.bfloat16), 1),
    (np.ones(2, np.float32), 1),
    (np.ones((2, 1), np.float32), 1),
    [[1], [2, 3]],
    [[1], [2]],
    [[1, 2]],
    [[1, 2], [3]],
    [1, 23],
    [12, 3],
    [1, [2]],
    [[1], 2],
    {"a": 1, "b": 2},
    {"a": 2, "b": 1},
    np.array(["a", None], object),
    "1",
    1,
    None,
]


def test_different_contents_have_different_digests():
    assert len(set(map(digest, CONTENTS))) == len(CONTENTS)


@pytest.mark.parametrize("tensor", [torch.tensor(2.0), torch.arange(24.0).view(2, 3, 2, 2)])
def test_the_same_values_have_the_same_digest(tensor):
    strided = tensor.clone(memory_format=torch.channels_last) if tensor.ndim else tensor.clone()
    assert digest({"x": [tensor]}) == digest({"x": [strided]})
