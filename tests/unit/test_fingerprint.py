import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT

from utils.fingerprint import digest


@dataclasses.dataclass
class Item:
    x: int
    y: list


@dataclasses.dataclass(slots=True)
class Slotted:
    x: int


class Other:
    def __init__(self, **attributes):
        self._cache = object()
        vars(self).update(attributes)


class Keys:
    """As graphs of torch_geometric, which are no Mapping."""

    def __init__(self, **entries):
        self._entries, self._itself = entries, self

    def keys(self):
        return self._entries.keys()

    def __getitem__(self, name):
        return self._entries[name]


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
    Item(1, [2]),
    Item(1, [3]),
    Slotted(1),
    Slotted(2),
    Other(a=1),
    Other(a=2),
    Other(b=1),
    {1, 2},
    {1, 3},
    frozenset({4}),
    Path("a"),
    Path("b"),
    Keys(a=1),
    Keys(a=2),
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


def test_the_same_objects_have_the_same_digest():
    assert digest(Other(a=1)) == digest(Other(a=1))
    assert digest(Keys(a=1)) == digest(Keys(a=1))
    words = [np.array(["".join(["a", "b"]), None], object) for _ in range(2)]  # at two addresses
    assert digest(words[0]) == digest(words[1])


def test_the_order_of_a_set_of_strings_which_each_process_draws_does_not_count():
    words = [sys.executable, "-c", "from utils.fingerprint import digest; print(digest({'a', 'b', 'c', 'd'}))"]
    digests = {
        subprocess.run(words, cwd=ROOT, env={"PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in "12"
    }
    assert len(digests) == 1
