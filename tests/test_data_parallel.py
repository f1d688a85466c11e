"""nn.DataParallel with the loss in each replica.

Without GPUs, stand-ins for torch's functions split and copy for real, so that each replica is a
module of its own on a part of the batch, in a thread of its own.
"""

import copy
import functools
import importlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from test_topology import fake_accelerator
from torch import nn

from utils.data_parallel import data_parallel, in_each_replica

GPUS = 4


class Copy(torch.autograd.Function):
    """Copies of a parameter, whose gradients are summed in backward, as in torch's Broadcast."""

    @staticmethod
    def forward(ctx, tensor, count):
        return tuple(tensor.clone() for _ in range(count))

    @staticmethod
    def backward(ctx, *gradients):
        return sum(gradients), None


def replicate(module, devices, detach=False):
    """Copies of a module, as torch.nn.parallel.replicate makes them: `parameters` leads back."""
    copies = [copy.deepcopy(module) for _ in devices]
    for name, parameter in module.named_parameters():
        owner, _, attribute = name.rpartition(".")
        values = Copy.apply(parameter, len(devices))
        for replica, value in zip(copies, values, strict=True):
            place = replica.get_submodule(owner)
            del place._parameters[attribute]
            setattr(place, attribute, value.detach() if detach else value)
    return copies


def scatter_tensor(devices, sizes, dim, tensor):
    return tuple(tensor.chunk(len(devices), dim))


def gather_tensors(device, dim, *tensors):
    return torch.cat(tensors, dim)


def parallel_apply(functions, inputs, kwargs, devices):
    """Each function in a new thread, which knows nothing of the autocast of this one."""
    grad_enabled = torch.is_grad_enabled()

    def run(function, args, kwargs):
        with torch.set_grad_enabled(grad_enabled):
            return function(*args, **kwargs)

    assert len(functions) == len(inputs) == len(kwargs) == len(devices)
    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(run, functions, inputs, kwargs))


@pytest.fixture
def gpus(monkeypatch):
    """Returns a function that wraps a model as on a machine with several GPUs."""
    # torch.nn.parallel.data_parallel is both a module and a function in the package.
    module = importlib.import_module("torch.nn.parallel.data_parallel")
    scatter_gather = importlib.import_module("torch.nn.parallel.scatter_gather")
    monkeypatch.setattr(module, "replicate", replicate)
    monkeypatch.setattr(module, "parallel_apply", parallel_apply)
    monkeypatch.setattr(scatter_gather.Scatter, "apply", scatter_tensor)
    monkeypatch.setattr(scatter_gather.Gather, "apply", gather_tensors)

    def wrap(model, accelerator=None):
        wrapped = nn.DataParallel(model)
        wrapped.dim = 0
        wrapped.device_ids = list(range(GPUS))
        wrapped.output_device = 0
        if accelerator is not None:
            wrapped.autocast = accelerator.autocast
        return wrapped

    return wrap


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(samples):
    generator = torch.Generator().manual_seed(samples)
    images = torch.randn(samples, 5, generator=generator)
    return images, torch.randint(3, (samples,), generator=generator)


@in_each_replica
def losses_and_hits(model, images, labels, smoothing=0.0):
    """The losses and hits of a batch."""
    seen.append((len(images), threading.get_ident(), model))
    logits = model(images)
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    return losses, logits.argmax(1) == labels


seen = []


@pytest.fixture(autouse=True)
def _nothing_seen():
    seen.clear()


@pytest.mark.parametrize("samples", [1, 3, 4, 10, 11])
@pytest.mark.parametrize("by_name", [False, True])
def test_numbers_and_gradients_are_those_of_one_device(gpus, model, samples, by_name):
    images, labels = batch(samples)
    reference = copy.deepcopy(model)
    losses, hits = losses_and_hits(reference, images, labels, smoothing=0.1)
    losses.sum().backward()
    seen.clear()
    if by_name:
        found = losses_and_hits(gpus(model), images=images, labels=labels, smoothing=0.1)
    else:
        found = losses_and_hits(gpus(model), images, labels, smoothing=0.1)
    torch.testing.assert_close(found[0], losses)
    assert found[1].dtype == torch.bool
    assert torch.equal(found[1], hits)
    found[0].sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def test_each_replica_sees_its_part_only(gpus, model):
    losses_and_hits(gpus(model), *batch(11))
    assert sorted(size for size, _, _ in seen) == [2, 3, 3, 3]
    assert len({id(replica) for _, _, replica in seen}) == GPUS
    assert model not in [replica for _, _, replica in seen]


def test_a_small_batch_uses_as_many_gpus_as_samples(gpus, model):
    losses_and_hits(gpus(model), *batch(2))
    assert [size for size, _, _ in seen] == [1, 1]


def test_an_empty_batch_gives_empty_results_that_have_a_gradient(gpus, model):
    losses, hits = losses_and_hits(gpus(model), *batch(0))
    assert [size for size, _, _ in seen] == [0]
    assert losses.shape == hits.shape == (0,)
    losses.sum().backward()
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


def test_without_gradients_none_are_recorded(gpus, model):
    with torch.no_grad():
        losses, _ = losses_and_hits(gpus(model), *batch(8))
    assert not losses.requires_grad


def test_results_may_be_a_tensor_or_a_dict(gpus, model):
    images, labels = batch(8)
    wrapped = gpus(model)
    logits = in_each_replica(lambda model, images: model(images))(wrapped, images)
    torch.testing.assert_close(logits, model(images))
    found = in_each_replica(lambda model, batch: {"rows": batch["images"].sum(1)})(
        wrapped, {"images": images, "labels": labels}
    )
    torch.testing.assert_close(found["rows"], images.sum(1))


def test_a_model_on_one_device_is_called_as_it_stands(model):
    assert losses_and_hits.__doc__ == "The losses and hits of a batch."
    for each in (model, nn.DataParallel(model)):  # on a machine without a GPU
        losses_and_hits(each, *batch(11))
    assert [size for size, _, _ in seen] == [11, 11]
    assert seen[0][2] is model


def test_a_mistake_in_a_replica_is_raised(gpus, model):
    with pytest.raises(RuntimeError, match="shapes"):
        losses_and_hits(gpus(model), torch.ones(8, 4), torch.ones(8))


def test_autocast_reaches_every_replica(gpus, model):
    """It belongs to a thread, and `prepare` puts it around the forward of the wrapper alone."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    dtypes = []
    model[2].register_forward_hook(lambda layer, args, logits: dtypes.append(logits.dtype))
    wrapped = accelerator.prepare_model(gpus(model, accelerator))
    images, labels = batch(8)
    expected = F.cross_entropy(wrapped.module(images), labels, reduction="none")
    dtypes.clear()
    losses, _ = losses_and_hits(wrapped, images, labels)
    assert dtypes == [torch.bfloat16] * GPUS
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, expected, rtol=0.02, atol=0.02)
    reference = accelerator.prepare_model(copy.deepcopy(model))
    torch.testing.assert_close(losses, losses_and_hits(reference, images, labels)[0])


@pytest.mark.parametrize(
    ("devices", "processes", "wrapped"), [(4, 1, True), (1, 1, False), (4, 4, False)]
)
def test_data_parallel_is_one_process_with_several_gpus(
    monkeypatch, model, devices, processes, wrapped
):
    accelerator = fake_accelerator(processes, "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(model, "to", lambda device: model)
    result = data_parallel(model, accelerator)
    assert isinstance(result, nn.DataParallel) == wrapped
    if wrapped:
        assert result.module is model
        assert result.autocast is None
        accelerator.mixed_precision, accelerator.autocast = "bf16", functools.partial(int)
        assert data_parallel(model, accelerator).autocast is accelerator.autocast


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_gpus_the_numbers_are_those_of_one_device(model):
    model = model.cuda()
    images, labels = (tensor.cuda() for tensor in batch(11))
    expected, hits = losses_and_hits(model, images, labels)
    losses, found_hits = losses_and_hits(nn.DataParallel(model), images, labels)
    torch.testing.assert_close(losses, expected)
    assert torch.equal(found_hits, hits)
    assert losses_and_hits(nn.DataParallel(model), images[:0], labels[:0])[0].shape == (0,)
