"""What guides/you_come_with_this_code.md says of each piece of code, where it needs no GPU."""

import pickle

import pytest
import torch
import torch.distributed as dist
from conftest import free_port
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from utils.datasets.images_in_memory import load_images

DATA = TensorDataset(torch.arange(10.0))


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_float_is_not_a_batch_size():
    with pytest.raises(ValueError, match="batch_size should be a positive integer value"):
        DataLoader(DATA, batch_size=128 / 2.0)


def test_shuffle_and_a_sampler():
    with pytest.raises(ValueError, match="sampler option is mutually exclusive with shuffle"):
        DataLoader(DATA, shuffle=True, sampler=DistributedSampler(DATA, 2, 0))


def test_without_set_epoch_every_epoch_has_the_same_order():
    sampler = DistributedSampler(DATA, 2, 0)
    first = list(sampler)
    assert list(sampler) == first
    sampler.set_epoch(1)
    assert list(sampler) != first


def test_local_ranks_read_half_of_the_data_of_two_machines():
    read = [index for local_rank in (0, 1, 0, 1) for index in DistributedSampler(range(100), 4, local_rank)]
    assert len(read) == 100
    assert len(set(read)) == 50


@pytest.mark.skipif(torch.cuda.is_available(), reason="the error of a machine without GPUs")
def test_device_id_is_a_device_of_this_machine(monkeypatch):
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "RANK": 8, "WORLD_SIZE": 16}
    for name, value in group.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ValueError, match="device_id cuda:8 is out of range"):
        dist.init_process_group("gloo", device_id=8)


def test_device_ids_of_a_model_on_the_cpu(group):
    with pytest.raises(ValueError, match=r"device_ids and output_device arguments only work with .* GPU modules"):
        DistributedDataParallel(nn.Linear(2, 2), device_ids=[0])


def test_what_is_left_of_an_accumulation_leaks_into_the_next_epoch():
    weight = nn.Parameter(torch.zeros(()))
    optimizer, k = torch.optim.SGD([weight], 1.0), 4
    for number in range(6):
        (weight / k).backward()
        if (number + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert weight.grad == 0.5


def test_a_sampler_repeats_samples_to_make_the_parts_equal():
    tested = [index for rank in range(4) for index in DistributedSampler(DATA, 4, rank, shuffle=False)]
    assert (len(DATA), len(tested)) == (10, 12)


def test_what_is_saved_of_a_ddp_model_does_not_load_into_the_bare_one(group, tmp_path):
    model = nn.Linear(2, 2)
    state = DistributedDataParallel(model).state_dict()
    assert all(name.startswith("module.") for name in state)
    with pytest.raises(RuntimeError, match="Missing key"):
        nn.Linear(2, 2).load_state_dict(state)
    torch.save(model, tmp_path / "model.pt")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        torch.load(tmp_path / "model.pt")
    consume_prefix_in_state_dict_if_present(state, "module.")
    nn.Linear(2, 2).load_state_dict(state)


def test_names_that_are_wrong_or_gone(group):
    with pytest.raises(IndexError, match="invalid index of a 0-dim tensor"):
        torch.tensor(1.0).data[0]
    assert not hasattr(dist, "all_reduce_multigpu")
    assert not hasattr(dist.ReduceOp, "Min")
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        DistributedDataParallel(nn.Linear(2, 2), device_id=[0])


@pytest.mark.slow
@pytest.mark.parametrize(("mean", "std", "accuracy"), [(0, 255, 0.7030), (33.3184, 78.5675, 0.8608)])
def test_the_recipe_of_many_posts(mean, std, accuracy):
    """Other processors round differently."""
    (images, labels), (test_images, test_labels) = (split.tensors for split in load_images("ylecun/mnist"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(2):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            logits = model((images[batch] - mean) / std)
            nn.functional.cross_entropy(logits, labels[batch]).backward()
            optimizer.step()
    correct = model((test_images - mean) / std).argmax(1) == test_labels
    assert correct.float().mean().item() == pytest.approx(accuracy, abs=0.003)
