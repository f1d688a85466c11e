"""Sharded models, by cpu_fsdp.yaml on 2 processes, and by cpu_hsdp.yaml on 2 x 2."""

import contextlib
import copy
import json
import re
from pathlib import Path

import pytest
import run_many
import run_reader
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, DynamoBackend, FullyShardedDataParallelPlugin
from conftest import ROOT
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from utils.accelerator import TrainingAccelerator
from utils.console import printable
from utils.failures.errors import explain
from utils.layout import Layout
from utils.parallel.fsdp import update_average

CHECKPOINTS = ["--checkpoint_every", 2, "--keep_checkpoints", 0, "--log_every", 1]
# 5 steps, the last one of 3 images. fc1 is sharded into parts of 97 and 96 rows.
MLP = ["--dtype", "float64", "--hidden", 193, "--dropout", 0.1, "--batch_size", 250]
MLP += ["--num_epochs", 1, *CHECKPOINTS]
# Most steps are clipped, and the last one has 3 images for
# the 4 micro-batches of 2 processes.
CLIPPED = ["--float64", "--variable_length", "--max_grad_norm", 0.2]
CLIPPED += ["--batch_size", 250, "--num_epochs", 1, *CHECKPOINTS]
# The third step ends an epoch: the average takes a step after a test.
RESNET = ["--image_size", 16, "--batch_size", 16, "--max_steps", 4, "--max_test_samples", 4]
RESNET += ["--ema_decay", 0.9, "--warmup_epochs", 0, "--num_workers", 0, *CHECKPOINTS]
TRANSFORMER = ["--vocabulary", 290, "--context", 64, "--dim", 64, "--layers", 2, "--heads", 2, "--dropout", 0.1]
TRANSFORMER += ["--num_tokens", 8, "--batch_size", 8, "--max_steps", 3, *CHECKPOINTS]
FSDP, HSDP, THREE = ("cpu_fsdp",), ("cpu_hsdp",), ("cpu_fsdp", "--num_processes", 3)


@pytest.fixture(scope="module")
def made(runs, small_mnist, tiny_mnist, texts):
    """By name: the runs of one process, of those that shard, and of those that change."""
    mlp = ["mlp", "--dataset", small_mnist, *MLP]
    clipped = ["gradient_accumulation", "--dataset", small_mnist, *CLIPPED]
    resnet = ["small", "resnet50", "--float64", "--dataset", tiny_mnist, *RESNET]
    transformer = ["small", "transformer", "--float64", "--dataset", texts, *TRANSFORMER, "--max_grad_norm", 0.3]
    sgd = [*mlp, "--optimizer", "sgd", "--max_steps", 2]
    large_resnet = [*resnet, "--batch_size", 32]  # with 4 images per process, its BatchNorms would amplify rounding
    two_parts, four_parts = (["--gradient_accumulation_steps", parts] for parts in (2, 4))
    # It stops after a test, and saves then: not all parameters are shards at that moment.
    early = [*two_parts, "--num_epochs", 9, "--patience", 1, "--save_best", "max:loss", "--checkpoint_every", 1000]
    found = {
        "one": runs(*mlp),
        "sgd_one": runs(*sgd),
        "clipped_one": runs(*clipped),
        "resnet_one": runs(*resnet, *two_parts),
        "resnet_four": runs(*large_resnet, *four_parts),
        "transformer_four": runs(*transformer, *four_parts),
        "sharded": runs(*mlp, on=FSDP),
        "sgd": runs(*sgd, on=FSDP),
        "early": runs(*mlp, *early, on=FSDP),
        "clipped": runs(*clipped, *two_parts, on=FSDP),
        "resnet": runs(*resnet, on=FSDP),
        "replicas": runs(*mlp, on=HSDP),
        "clipped_replicas": runs(*clipped, on=HSDP),
        "transformer_replicas": runs(*transformer, on=HSDP),
        "resnet_replicas": runs(*large_resnet, on=HSDP),
    }
    found["sharded_again"] = runs(*mlp, on=FSDP, resumes=found["sharded"], at=2)
    found["resnet_again"] = runs(*resnet, on=FSDP, resumes=found["resnet"], at=2)
    found["replicas_again"] = runs(*mlp, on=HSDP, resumes=found["replicas"], at=2)
    found["resnet_one_to_sharded"] = runs(*resnet, on=FSDP, resumes=found["resnet_one"], at=2)
    for name, between in ("ddp", ("cpu_ddp",)), ("replicas", HSDP):
        went_on = runs(*mlp, on=between, resumes=found["sharded"], at=2)
        found[f"sharded_to_{name}_to_sharded"] = runs(*mlp, on=THREE, resumes=went_on, at=4)
    return found


def assert_same(expected, run):
    """Losses, metrics and learning rates; each tensor of the model, the optimizer and the moving
    average."""
    for before, now in zip(run_reader.lines(expected), run_reader.lines(run), strict=True):
        assert now.keys() == before.keys()
        for name in before.keys() - {"split"}:
            assert now[name] == pytest.approx(before[name], rel=1e-9)
    step = f"checkpoints/step_{run_reader.lines(expected)[-1]['step']:08d}"
    (_, before), (_, now) = run_reader.checkpoint(expected / step), run_reader.checkpoint(run / step)
    assert before.keys() == now.keys()
    for file, tensors in before.items():
        assert tensors.keys() == now[file].keys()
        for name, tensor in tensors.items():
            torch.testing.assert_close(now[file][name], tensor, rtol=1e-6, atol=1e-9)
    models = run_reader.final_models(run).keys()
    assert models == run_reader.final_models(expected).keys()
    for model in models:
        prefix = "module." if model == "model_ema" else ""
        for name, tensor in run_reader.weights(run, model).items():
            assert torch.equal(tensor, now[f"{model}.safetensors"][prefix + name])


ONE, TWO, REPLICAS = ("NO", 1), ("FSDP", 2), ("HSDP 2 x 2", 4)


def kinds(run):
    """The type and number of the processes of each launch."""
    return [(launch["distributed_type"], launch["num_processes"]) for launch in run_reader.launches(run.folder)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "run", "expected"),
    [
        ("one", "sharded", [TWO]),
        ("sgd_one", "sgd", [TWO]),  # AdamW would not notice sums over processes in the place of means
        ("clipped_one", "clipped", [TWO]),
        ("resnet_one", "resnet", [TWO]),
        ("one", "replicas", [REPLICAS]),
        ("clipped_one", "clipped_replicas", [REPLICAS]),
        ("transformer_four", "transformer_replicas", [REPLICAS]),
        ("resnet_four", "resnet_replicas", [REPLICAS]),
        ("resnet_one", "resnet_one_to_sharded", [ONE, TWO]),
        ("one", "sharded_to_ddp_to_sharded", [TWO, ("MULTI_CPU", 2), ("FSDP", 3)]),
        ("one", "sharded_to_replicas_to_sharded", [TWO, REPLICAS, ("FSDP", 3)]),
    ],
)
def test_sharded_processes_have_the_numbers_of_one(made, one, run, expected):
    """Also where a checkpoint goes on with and without shards."""
    assert kinds(made[one]) == [ONE]
    assert kinds(made[run]) == expected
    assert_same(made[one].folder, made[run].folder)


@pytest.mark.slow
@pytest.mark.parametrize(("run", "kind"), [("sharded", TWO), ("resnet", TWO), ("replicas", REPLICAS)])
def test_a_sharded_run_resumes_bit_by_bit(made, run, kind):
    assert kinds(made[f"{run}_again"]) == [kind, kind]
    assert made[f"{run}_again"].bits == made[run].bits


@pytest.mark.slow
def test_a_checkpoint_after_a_test_is_complete(made):
    """Without a backward pass after it, parts of the model are still whole on each process."""
    (checkpoint,) = (made["early"].folder / "checkpoints").iterdir()
    _, tensors = run_reader.checkpoint(checkpoint)
    names = {name.rpartition("/")[0] for name in tensors["optimizer.safetensors"]}
    assert names == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    final = run_reader.weights(made["early"].folder)
    for name, tensor in tensors["model.safetensors"].items():
        assert torch.equal(tensor, final[name])


@pytest.mark.slow
def test_shards_continue_a_prompt_as_one_process_and_no_rank_waits_for_another(made, capsys):
    """Their ranks draw different tokens."""
    folder = made["transformer_replicas"].folder
    flags = ["--output_dir", folder, "--prompt", "", "--num_tokens", 8, "--float64"]
    assert run_many.run("transformer", flags) is None
    assert capsys.readouterr().out == f"{printable(run_reader.summary(folder)['test_sample'])}\n"


def test_the_moving_average_equals_torchs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    ours = AveragedModel(model)
    theirs = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for decay in (0.0, 0.9, 0.9):  # theirs begins with a copy
        model(torch.randn(4, 3)).sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        update_average(ours.module, model, decay)
        theirs.update_parameters(model)
        theirs.module[1].num_batches_tracked.copy_(model[1].num_batches_tracked)  # an average of counts means nothing
        for name, tensor in theirs.module.state_dict().items():
            assert torch.equal(ours.module.state_dict()[name], tensor)


@pytest.fixture(scope="module")
def differences(request, shared_launcher):
    """What sharded_models.py writes, of the models that chosen tests ask for."""
    tests = [item for item in request.session.items if item.path == request.path and "model" in item.fixturenames]
    names = dict.fromkeys(test.callspec.params["model"] for test in tests if not test.get_closest_marker("skip"))
    program = ROOT / "tests" / "programs" / "sharded_models"
    few = ["--fsdp_min_num_params", 100]
    shared_launcher("cpu_fsdp", *names, script=program, launch_flags=few, timeout=300)
    return json.loads((shared_launcher.folder / "differences.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt", "encoder", pytest.param("lora", marks=pytest.mark.others("peft"))])
def test_any_model_is_sharded_and_has_the_numbers_of_a_whole_one(differences, model):
    largest, gathered_alone = differences[model]
    assert largest <= 1e-12
    assert len(gathered_alone) > 2  # the model and its blocks


@pytest.mark.slow
def test_what_is_done_to_parameters_gives_the_same_numbers_on_every_topology(launcher, monkeypatch):
    monkeypatch.chdir(launcher.folder)
    assert run_many.run("parameters", ["cpu.json"]) is None
    for config, flags in ("cpu_ddp", []), ("cpu_fsdp", ["--fsdp_min_num_params", 10]):
        program = ROOT / "tests" / "programs" / "parameters"
        launcher(config, f"{config}.json", script=program, launch_flags=flags)
    found = {config: json.loads(Path(f"{config}.json").read_text()) for config in ("cpu", "cpu_ddp", "cpu_fsdp")}
    assert not [case for case, numbers in found["cpu"].items() if isinstance(numbers, str)]
    if torch.__version__ < (2, 11, 99):  # stops with an error
        assert isinstance(found["cpu_fsdp"].pop("shared layers, recomputed"), str)
    assert "unevenly sharded" in found["cpu_fsdp"].pop("lbfgs")  # the message of torch, which the guide has
    for config in ("cpu_ddp", "cpu_fsdp"):
        for case, numbers in found[config].items():
            assert numbers == pytest.approx(found["cpu"][case], rel=1e-12, abs=1e-13), (config, case)


@pytest.fixture
def one_process_shards():
    """A TrainingAccelerator that shards over one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    accelerator = TrainingAccelerator(cpu=True)
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2, min_num_params=10)
    accelerator.state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    yield accelerator
    torch.distributed.destroy_process_group()


def test_each_of_two_models_and_optimizers_in_one_prepare_trains_shards(one_process_shards):
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    before = [[*model.parameters()] for model in models]
    pairs = [*models, *(torch.optim.SGD(parameters, 1.0) for parameters in before)]
    *_, first, second = one_process_shards.prepare(*pairs)
    loss = sum(model(torch.ones(3)).square().sum() for model in models)
    one_process_shards.backward(loss)
    parameters = before[0] + before[1]
    norm = torch.cat([parameter.grad.full_tensor().flatten() for parameter in parameters]).norm().item()
    assert one_process_shards.clip_grad_norm_(parameters, 0.5).item() == pytest.approx(norm)
    assert one_process_shards.clip_grad_norm_(parameters, 0.5).item() == pytest.approx(0.5, rel=1e-4)
    for model, optimizer in (models[0], first), (models[1], second):
        (group,) = optimizer.param_groups
        assert all(one is other for one, other in zip(group["params"], model.parameters(), strict=True))


class Scaler:
    """As torch.amp.GradScaler with a scale of 1024, on any device."""

    def __init__(self):
        self.unscaled = set()

    def unscale_(self, optimizer):
        if optimizer in self.unscaled:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        self.unscaled.add(optimizer)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad /= 1024


@pytest.mark.parametrize("virtual_processes", [0, 2])
def test_parts_are_clipped_with_a_scaler_after_their_optimizer_is_unscaled_once(monkeypatch, virtual_processes):
    accelerator, models = TrainingAccelerator(cpu=True), [nn.Linear(3, 2), nn.Linear(3, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), 1.0) for model in models]
    accelerator.prepare(*models, *optimizers)
    monkeypatch.setattr(accelerator, "layout", Layout(virtual_processes=virtual_processes))
    monkeypatch.setattr(accelerator.state, "_mixed_precision", "fp16")
    accelerator.native_amp, accelerator.scaler = True, Scaler()
    for model in models:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1024.0)
    model = models[0]
    assert accelerator.clip_grad_norm_([model.weight], 9.0).item() == pytest.approx(6**0.5)
    assert accelerator.clip_grad_norm_([model.bias], 9.0).item() == pytest.approx(2**0.5)
    assert accelerator.clip_grad_norm_(model.parameters(), 0.5, torch.inf).item() == pytest.approx(1)
    assert model.weight.grad.max().item() == pytest.approx(0.5)
    assert models[1].weight.grad.max() == 1024  # its optimizer's step unscales it


def test_a_list_of_parameters_does_not_keep_whole_weights_in_memory(one_process_shards):
    model = nn.Linear(30, 20)
    parameters, storage = [*model.parameters()], model.weight.untyped_storage()
    one_process_shards.prepare(model)
    assert parameters[0].shape == (20, 30)
    assert parameters[0].shard is model.weight
    assert torch.Tensor.untyped_storage(model.weight.to_local()).data_ptr() != storage.data_ptr()
    with torch._C.DisableTorchFunctionSubclass():
        assert parameters[0].untyped_storage().nbytes() == 0


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.BatchNorm1d(6)])

    def forward(self, x, seen):
        for layer in self.layers:
            x = layer(x)
            seen.append(x.dtype)
        return x


def test_bf16_leaves_batch_norm_losses_and_lists_alone(one_process_shards):
    one_process_shards.state.fsdp_plugin.set_mixed_precision("bf16")
    model, seen = one_process_shards.prepare(Normed()), []
    out = model(torch.rand(3, 6), seen)
    out.square().sum().backward()
    assert seen == [torch.bfloat16] * 2
    assert out.dtype == model.layers[1].weight.grad.dtype == torch.float32


def test_a_dynamo_backend_of_the_config_file_compiles_the_model(one_process_shards):
    one_process_shards.state.dynamo_plugin.backend = DynamoBackend.EAGER
    model, compiled = one_process_shards.prepare(nn.Linear(3, 2)), []
    with torch.no_grad():
        model(torch.ones(3))
        model.register_forward_hook(lambda *_: compiled.append(torch.compiler.is_compiling()))
        model(torch.ones(3))
    assert compiled == [True]


@pytest.mark.parametrize(
    ("fsdp", "installed", "sentence"),
    [("1", "2.10.0", "`fsdp_version: 2`"), ("2", "2.9.1", "FSDP needs torch 2.10 or newer, and this is 2.9.1")],
)
def test_a_version_of_fsdp_with_wrong_gradients_is_refused(monkeypatch, capsys, fsdp, installed, sentence):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", fsdp)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(installed))
    with pytest.raises(SystemExit):
        TrainingAccelerator(cpu=True)
    assert sentence in capsys.readouterr().err


class Returns(nn.Module):
    """Returns a parameter beside its output, itself or in some form."""

    def __init__(self, form):
        super().__init__()
        self.scale, self.linear, self.form = nn.Parameter(torch.ones(16)), nn.Linear(16, 1), form

    def forward(self, x):
        return {"output": self.linear(x), "more": [self.form(self.scale)]}


@pytest.mark.parametrize("is_inner", [False, True])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_a_parameter_as_an_output_is_refused_before_its_freed_memory_is_read(
    one_process_shards, capsys, has_gradients, is_inner
):
    for form, is_refused in ((lambda p: p, True), (lambda p: p[1:], True), (lambda p: p + 0.0, False)):
        model = Returns(form)
        model = one_process_shards.prepare(nn.Sequential(model) if is_inner else model)
        expected = pytest.raises(SystemExit) if is_refused else contextlib.nullcontext()
        with torch.set_grad_enabled(has_gradients), expected:
            outputs = model(torch.ones(2, 16))
            assert outputs["more"][0].tolist() == [1.0] * 16
        said = "Returns returns a parameter or a view of one, whose memory FSDP frees"
        assert (said in capsys.readouterr().err) is is_refused


class Clipped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Borrows(nn.Module):
    """Uses the weight of a layer that it does not call."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])

    def forward(self, x):
        return x @ self.layers[0].weight


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.temperature = nn.Parameter(torch.tensor(1.0))


def penalise_gradients(prepare, model):
    x = torch.ones(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(prepare(model)(x).sum(), x, create_graph=True)
    gradient.square().sum().backward()


def step_with(make_optimizer):
    def fails(prepare, model):
        model, optimizer = prepare(model, make_optimizer(model.parameters(), lr=0.1))
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    return fails


def hook_before(prepare, model):
    model[0].weight.register_hook(lambda gradient: gradient / 2)
    prepare(model)


def average_by_torch(prepare, model):
    average = AveragedModel(model)
    average.update_parameters(model)
    average.update_parameters(prepare(model))


def tie_after(prepare, model):
    prepare(model)[2].weight = model[0].weight
    model(torch.ones(1, 4))


def train_an_outsider(prepare, model):
    prepare(model, torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(2))]))


ONE_ROW = torch.ones(1, 4)
NO_SHARDS = "require placement changes|Cannot find device mesh"
HOOKS = "use register_post_accumulate_grad_hook after prepare"
# Rows of guides/a_model_that_does_not_fit.md and others: our sentence, or a part of torch's error.
REFUSED = {
    "second derivatives": (penalise_gradients, "out of bounds for storage of size 0"),
    "a weight used elsewhere": (lambda prepare, _: prepare(Borrows())(ONE_ROW), "got mixed torch.Tensor and DTensor"),
    "a write into a weight": (
        lambda prepare, _: prepare(nn.Sequential(nn.Linear(4, 4), Clipped(4, 4)))(ONE_ROW),
        "the forward pass writes into 1.weight: FSDP gathers a copy",
    ),
    "sparse gradients": (
        lambda prepare, _: prepare(nn.Embedding(5, 4, sparse=True))(torch.tensor([1, 3])).sum().backward(),
        "need dense gradients: sparse=False, or DDP alone",
    ),
    "no dimensions": (lambda prepare, _: prepare(Scaled()), "scalar parameters"),
    "Rprop": (step_with(torch.optim.Rprop), NO_SHARDS),
    "Adafactor": (step_with(torch.optim.Adafactor), NO_SHARDS),
    "a hook before": (hook_before, HOOKS),
    "a hook after": (lambda prepare, model: prepare(model)[0].weight.register_hook(print), HOOKS),
    "torch's average": (average_by_torch, "got mixed torch.Tensor and DTensor"),
    "a copy": (lambda prepare, model: copy.deepcopy(prepare(model)), "FSDP does not support deepcopy"),
    "tied after": (tie_after, "tied or replaced after prepare: do so before"),
    "reset after": (lambda prepare, model: prepare(model)[0].reset_parameters(), "initialize before prepare"),
    "trained from outside": (train_an_outsider, "is not sharded"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_fsdp_cannot_do_is_an_error(one_process_shards, capsys, case):
    fails, message = REFUSED[case]
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 4))
    with pytest.raises((SystemExit, Exception)) as raised:
        fails(one_process_shards.prepare, model)
    assert re.search(message, f"{raised.value} {explain(raised.value)} {capsys.readouterr().err}")


def test_what_is_not_sharded_is_not_clipped_and_inputs_get_no_gradients(one_process_shards, capsys):
    model = nn.Linear(3, 2)
    with pytest.raises(SystemExit):
        one_process_shards.clip_grad_norm_(model.parameters(), 1.0)
    assert "is not sharded" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        one_process_shards.backward(model(torch.ones(3)).sum(), inputs=[*model.parameters()])
    assert "accelerator.backward(inputs=...)" in capsys.readouterr().err


def test_an_optimizer_that_makes_its_state_at_once_keeps_that_of_shards(one_process_shards):
    model = nn.Linear(3, 2)
    _, optimizer = one_process_shards.prepare(model, torch.optim.Adagrad(model.parameters()))
    assert not optimizer.state  # torch makes it again, or raises a KeyError
    model = one_process_shards.prepare(nn.Linear(3, 2))
    optimizer = one_process_shards.prepare(torch.optim.Adagrad(model.parameters(), lr=0.1))
    one_process_shards.backward(model(torch.ones(2, 3)).sum())
    before = model.weight.full_tensor().clone()
    optimizer.step()
    assert (before - model.weight.full_tensor()).tolist() == [[pytest.approx(0.1)] * 3] * 2


def test_values_of_gradients_are_clipped_on_shards(one_process_shards):
    model = nn.Linear(3, 2)
    before = [*model.parameters()]
    model = one_process_shards.prepare(model)
    one_process_shards.backward(model(torch.tensor([[1.0, -2.0, 0.1]])).sum())
    one_process_shards.clip_grad_value_(before, 0.5)
    assert model.weight.grad.full_tensor().tolist() == [[0.5, -0.5, pytest.approx(0.1)]] * 2
    assert model.bias.grad.full_tensor().tolist() == [0.5, 0.5]
