"""nn.DataParallel on virtual GPUs: the numbers of one device."""

import copy
import importlib

import pytest
import run_many
import run_reader
import torch
import torch.nn.functional as F
import virtual_gpus
from accelerate import Accelerator
from fakes import fake_accelerator
from same_numbers import largest_difference
from torch import nn

from examples.loss_inside import WithLoss
from utils.accelerator import TrainingAccelerator
from utils.launched import data_parallel_gpus
from utils.parallel.data_parallel import data_parallel
from utils.parallel.virtual_processes import use_virtual_processes

GPUS = 4


@pytest.fixture
def gpus(monkeypatch):
    """Returns a function that wraps a model as on a machine with several GPUs."""
    virtual_gpus.install(monkeypatch.setattr, GPUS)

    def wrap(model, accelerator=None):
        return data_parallel(model, accelerator or fake_accelerator())

    return wrap


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Net(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def batch(samples):
    generator = torch.Generator().manual_seed(samples)
    images = torch.randn(samples, 5, generator=generator)
    return images, torch.randint(3, (samples,), generator=generator)


class Net(nn.Sequential):
    """Records the number of samples of each replica."""

    def forward(self, images):
        seen.append((len(images), self))
        return super().forward(images)


def losses_of(model, images, labels):
    return F.cross_entropy(model(images), labels, reduction="none")


seen = []


@pytest.fixture(autouse=True)
def _nothing_seen():
    seen.clear()


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("samples", [1, 3, 4, 10, 11])
def test_numbers_and_gradients_equal_one_device(gpus, model, samples, inside, monkeypatch):
    """Also with the loss inside of the model, of which the first device then gathers no logits."""
    gathered, module = [], importlib.import_module("torch.nn.parallel.data_parallel")
    gather = module.gather
    monkeypatch.setattr(
        module, "gather", lambda outputs, *to, **more: gathered.extend(outputs) or gather(outputs, *to, **more)
    )
    images, labels = batch(samples)
    reference = copy.deepcopy(model)
    losses = losses_of(reference, images, labels)
    losses.mean().backward()
    seen.clear()
    if inside:
        found, correct = gpus(WithLoss(model))(images, labels)
        assert correct.tolist() == (reference(images).argmax(1) == labels).tolist()
        parts = images.chunk(GPUS)
        assert [each.shape for replica in gathered for each in replica] == [
            (len(part),) for part in parts for _ in "ab"
        ]
    else:
        found = losses_of(gpus(model), images, labels)
        assert len({id(replica) for _, replica in seen}) == min(samples, GPUS)
    torch.testing.assert_close(found, losses)
    found.mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, msg=name)


def test_autocast_reaches_every_replica(gpus, model):
    """It belongs to a thread, and `prepare` puts it around the forward of the wrapper alone."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    dtypes = []
    model[2].register_forward_hook(lambda layer, args, logits: dtypes.append(logits.dtype))
    wrapped = accelerator.prepare_model(gpus(model, accelerator))
    images, _ = batch(8)
    expected = wrapped.module(images)
    dtypes.clear()
    logits = wrapped(images)
    assert dtypes == [torch.bfloat16] * GPUS
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(logits, accelerator.prepare_model(copy.deepcopy(model))(images))


@pytest.mark.parametrize(
    ("visible", "processes", "device", "gpus"),
    [(4, 1, "cuda", 4), (1, 1, "cuda", 1), (4, 4, "cuda", 1), (4, 1, "cpu", 1)],
)
def test_data_parallel_is_one_process_with_several_gpus(monkeypatch, model, visible, processes, device, gpus):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    accelerator = fake_accelerator(processes, device=device, kind="MULTI_GPU" if processes > 1 else "NO")
    assert data_parallel_gpus(accelerator) == gpus
    if gpus == 1:
        assert data_parallel(model, accelerator) is model


def test_virtual_processes_are_refused_where_one_process_has_several_gpus(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(SystemExit):
        use_virtual_processes(fake_accelerator(device="cuda", virtual_processes=4))
    assert "--virtual_processes works with DDP and FSDP, not with DataParallel" in capsys.readouterr().err


def test_prepare_wraps_each_model_once(gpus, model):
    accelerator = TrainingAccelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters())
    first, second, _ = accelerator.prepare(model, copy.deepcopy(model), optimizer)
    assert isinstance(first, nn.DataParallel)
    assert isinstance(second, nn.DataParallel)
    assert first.module is accelerator.unwrap_model(first) is model
    assert accelerator.prepare(first) is first
    by_hand = nn.DataParallel(copy.deepcopy(model))
    assert accelerator.prepare(by_hand) is by_hand


def test_prepare_leaves_a_model_alone_that_is_only_evaluated_or_shared(gpus, model, monkeypatch):
    accelerator = TrainingAccelerator(cpu=True)
    assert accelerator.prepare_model(model, evaluation_mode=True) is model
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: GPUS)
    shared = fake_accelerator(device="cuda", split_batch=False)
    assert data_parallel_gpus(shared) == 1
    assert data_parallel(model, shared) is model


def test_a_compiled_model_is_refused_because_its_replicas_would_call_the_original(gpus, model, capsys):
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    model.compile(backend="eager")
    for each in (model, compiled):
        with pytest.raises(SystemExit):
            gpus(each)
        assert "torch.compile does not work with DataParallel" in capsys.readouterr().err


def test_an_mlp_on_gpus_is_that_on_one_device(small_mnist, tmp_path, monkeypatch, home, capsys):
    flags = ["--dataset", small_mnist, "--log_every", 1, "--num_epochs", 1, "--batch_size", 250]
    flags += ["--hidden", 16, "--dropout", 0.1, "--dtype", "float64", "--output_dir"]
    one, four = tmp_path / "one", tmp_path / "four"
    assert run_many.run("mlp", [*flags, one]) is None
    capsys.readouterr()
    parts = virtual_gpus.install(monkeypatch.setattr, GPUS).parts
    assert run_many.run("mlp", [*flags, four]) is None
    assert f"(DataParallel over {GPUS} GPUs)" in capsys.readouterr().out
    assert largest_difference(one, four) <= 1e-12
    assert [63, 63, 63, 61] in parts
    assert [1, 1, 1] in parts  # the last step of the epoch has 3 of 1003 images
    assert sum(map(sum, parts)) == 1003 + 203
    (launch,) = run_reader.launches(four)
    assert (launch["distributed_type"], launch["data_parallel_gpus"]) == ("DATA_PARALLEL", GPUS)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_gpus_the_numbers_equal_one_device(model):
    model = model.cuda()
    images, labels = (tensor.cuda() for tensor in batch(11))
    expected = losses_of(model, images, labels)
    torch.testing.assert_close(losses_of(nn.DataParallel(model), images, labels), expected)
