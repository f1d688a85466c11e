"""Sharded models, by cpu_fsdp.yaml on 2 processes, and by cpu_hsdp.yaml on 2 x 2.

This file is also the script that its tests launch: run_many.py, but with the small ResNet in
float64 of small_resnets.py.
"""

import contextlib
import json
import os
from pathlib import Path

import pytest
import run_many
import run_reader
import small_resnets
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


def use_small_resnet(setattr):
    small_resnets.use_float64(setattr)


def main():
    run = run_many.run

    def run_small(script, flags):
        if script == "resnet50":
            use_small_resnet(setattr)
        if script == "transformer" and os.environ["RANK"] != "0":  # it draws an EOS at once
            torch.multinomial = lambda *_, **__: torch.tensor([0])
        return run(script, flags)

    run_many.run = run_small
    run_many.main()


@pytest.fixture(scope="module")
def runs(shared_launcher, small_mnist, tiny_mnist, texts):
    """The folder with the runs of one process, of two that shard, and of those that change."""
    folder = shared_launcher.folder
    mlp, clipped = (["--dataset", small_mnist, *flags] for flags in (MLP, CLIPPED))
    resnet = ["--dataset", tiny_mnist, *RESNET]
    transformer = ["--dataset", texts, *TRANSFORMER, "--float64", "--max_grad_norm", 0.3]
    sgd = [*mlp, "--optimizer", "sgd", "--max_steps", 2]
    large_resnet = [*resnet, "--batch_size", 32]  # with 4 images per process, its BatchNorms would amplify rounding
    two_parts, four_parts = (["--gradient_accumulation_steps", parts] for parts in (2, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_many.run("mlp", [*mlp, "--output_dir", "one"]) is None
        assert run_many.run("mlp", [*sgd, "--output_dir", "sgd_one"]) is None
        assert run_many.run("gradient_accumulation", [*clipped, "--output_dir", "clipped_one"]) is None
        use_small_resnet(patch.setattr)
        try:
            assert run_many.run("resnet50", [*resnet, *two_parts, "--output_dir", "resnet_one"]) is None
            assert run_many.run("resnet50", [*large_resnet, *four_parts, "--output_dir", "resnet_four"]) is None
            assert run_many.run("transformer", [*transformer, *four_parts, "--output_dir", "transformer_four"]) is None
        finally:
            torch.set_default_dtype(torch.float32)

    def resumed(before, step, after, *flags):
        return ["--back_to", before, step, after, *flags, "--resume", "--output_dir", after]

    # It stops after a test, and saves then: not all parameters are shards at that moment.
    early = ["--num_epochs", 9, "--patience", 1, "--save_best", "max:loss"]
    early += ["--checkpoint_every", 1000]
    words = run_many.words(
        "mlp",
        [*mlp, "--output_dir", "sharded"],
        [*sgd, "--output_dir", "sgd"],
        resumed("sharded", 2, "sharded_again", *mlp),
        [*mlp, *two_parts, *early, "--output_dir", "early"],
        ["--script", "gradient_accumulation", *clipped, *two_parts, "--output_dir", "clipped"],
        ["--script", "resnet50", *resnet, "--output_dir", "resnet"],
        resumed("resnet", 2, "resnet_again", *resnet),
        resumed("resnet_one", 2, "resnet_one_to_sharded", *resnet),
    )
    script = ROOT / "tests" / "distributed" / "test_fsdp"
    shared_launcher("cpu_fsdp", *words, timeout=400, script=script)
    words = run_many.words(
        "mlp",
        [*mlp, "--output_dir", "replicas"],
        resumed("replicas", 2, "replicas_again", *mlp),
        resumed("sharded", 2, "sharded_to_replicas", *mlp),
        ["--script", "gradient_accumulation", *clipped, "--output_dir", "clipped_replicas"],
        ["--script", "transformer", *transformer, "--output_dir", "transformer_replicas"],
        ["--script", "resnet50", *large_resnet, "--output_dir", "resnet_replicas"],
    )
    shared_launcher("cpu_hsdp", *words, timeout=400, script=script)
    to_ddp = resumed("sharded", 2, "ddp", *mlp)
    shared_launcher("cpu_ddp", *run_many.words("mlp", to_ddp), script=run_many.FILE)
    to_shards = resumed("ddp", 4, "sharded_last", *mlp), resumed("sharded_to_replicas", 4, "replicas_to_sharded", *mlp)
    shared_launcher("cpu_fsdp", *run_many.words("mlp", *to_shards), script=script)
    return folder


def assert_same(expected, run, step=None):
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


def assert_launches(run, *kinds):
    launches = run_reader.launches(run)
    assert [(each["distributed_type"], each["num_processes"]) for each in launches] == [*kinds]


SHARDED, REPLICAS, DDP, ONE = ("FSDP", 2), ("HSDP 2 x 2", 4), ("MULTI_CPU", 2), ("NO", 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "run", "kind"),
    [
        ("one", "sharded", SHARDED),
        ("sgd_one", "sgd", SHARDED),  # AdamW would not notice sums over processes in the place of means
        ("clipped_one", "clipped", SHARDED),
        ("resnet_one", "resnet", SHARDED),
        ("one", "replicas", REPLICAS),
        ("clipped_one", "clipped_replicas", REPLICAS),
        ("transformer_four", "transformer_replicas", REPLICAS),
        ("resnet_four", "resnet_replicas", REPLICAS),
    ],
)
def test_sharded_processes_have_the_numbers_of_one(runs, one, run, kind):
    assert_launches(runs / one, ONE)
    assert_launches(runs / run, kind)
    assert_same(runs / one, runs / run)


@pytest.mark.slow
@pytest.mark.parametrize("run", ["sharded", "resnet", "replicas"])
def test_a_sharded_run_resumes_bit_by_bit(runs, run):
    again, kind = runs / f"{run}_again", REPLICAS if "replicas" in run else SHARDED
    assert_launches(again, kind, kind)
    assert run_reader.final_models(again) == run_reader.final_models(runs / run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "run", "kinds"),
    [
        ("one", "sharded_last", (SHARDED, DDP, SHARDED)),
        ("resnet_one", "resnet_one_to_sharded", (ONE, SHARDED)),
        ("one", "replicas_to_sharded", (SHARDED, REPLICAS, SHARDED)),
    ],
)
def test_a_checkpoint_goes_on_with_and_without_shards(runs, one, run, kinds):
    assert_launches(runs / run, *kinds)
    assert_same(runs / one, runs / run)


@pytest.mark.slow
def test_a_checkpoint_after_a_test_is_complete(runs):
    """Without a backward pass after it, parts of the model are still whole on each process."""
    (checkpoint,) = (runs / "early" / "checkpoints").iterdir()
    _, tensors = run_reader.checkpoint(checkpoint)
    names = {name.rpartition("/")[0] for name in tensors["optimizer.safetensors"]}
    assert names == {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"}
    final = run_reader.weights(runs / "early")
    for name, tensor in tensors["model.safetensors"].items():
        assert torch.equal(tensor, final[name])


@pytest.mark.slow
def test_shards_continue_a_prompt_as_one_process_and_no_rank_waits_for_another(runs, capsys):
    """Their ranks draw different tokens."""
    folder = runs / "transformer_replicas"
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
@pytest.mark.parametrize(
    "model", ["gpt", "encoder", "resnet18", pytest.param("lora", marks=pytest.mark.others("peft"))]
)
def test_any_model_is_sharded_and_has_the_numbers_of_a_whole_one(differences, model):
    largest, gathered_alone = differences[model]
    assert largest <= 1e-12
    assert len(gathered_alone) > 2  # the model and its blocks


# By case of parameters.py, a part of the error: what a user can do instead, or torch's message, which the guide has.
REFUSED_UNDER_FSDP = {
    "tied after": "do so before",
    "hooked before": "use register_post_accumulate_grad_hook after prepare",
    "hooked after": "use register_post_accumulate_grad_hook after prepare",
    "reset after": "initialize before prepare",
    "average by torch": "got mixed torch.Tensor and DTensor",
    "copied after": "FSDP does not support deepcopy",
    "lbfgs": "unevenly sharded",
}


@pytest.mark.slow
def test_what_is_done_to_parameters_gives_the_same_numbers_on_every_topology_or_a_remedy(launcher, monkeypatch):
    monkeypatch.chdir(launcher.folder)
    assert run_many.run("parameters", ["cpu.json"]) is None
    for config, flags in ("cpu_ddp", []), ("cpu_fsdp", ["--fsdp_min_num_params", 10]):
        program = ROOT / "tests" / "programs" / "parameters"
        launcher(config, f"{config}.json", script=program, launch_flags=flags)
    found = {config: json.loads(Path(f"{config}.json").read_text()) for config in ("cpu", "cpu_ddp", "cpu_fsdp")}
    assert not [case for case, numbers in found["cpu"].items() if isinstance(numbers, str)]
    if torch.__version__ < (2, 11, 99):  # stops with an error
        assert isinstance(found["cpu_fsdp"].pop("shared layers, recomputed"), str)
    only_with_ddp = found["cpu_ddp"].pop("unfrozen that was frozen at prepare")
    assert "the processes have different weights" in only_with_ddp
    assert {case: n for case, n in found["cpu_fsdp"].items() if isinstance(n, str)}.keys() == REFUSED_UNDER_FSDP.keys()
    for config in ("cpu_ddp", "cpu_fsdp"):
        for case, numbers in found[config].items():
            if isinstance(numbers, str):
                assert REFUSED_UNDER_FSDP[case] in numbers
            else:
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


class Plain(nn.Module):
    """Two blocks in a list, a tied head, an embedding whose weight is used elsewhere, and a small layer."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(5, 4), nn.Embedding(3, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.small, self.head = nn.ModuleList([nn.Linear(4, 1)]), nn.Linear(4, 5, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.words(ids) + self.places.weight)


class Clipped(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


def test_a_write_into_a_gathered_weight_is_an_error(one_process_shards, capsys):
    """Of a unit of its own, too, whose gathered copy is freed after its forward pass."""
    model = one_process_shards.prepare(nn.Sequential(nn.Linear(4, 4), Clipped(4, 4)))
    with pytest.raises(SystemExit):
        model(torch.ones(1, 4))
    assert "the forward pass writes into 1.weight: FSDP gathers a copy" in capsys.readouterr().err


def test_a_weight_that_is_used_outside_of_its_module_is_an_error_of_torch(one_process_shards):
    model = one_process_shards.prepare(Plain())
    with pytest.raises(RuntimeError, match=r"got mixed torch.Tensor and DTensor"):
        model(torch.tensor([[0, 1, 2]]))


def test_sparse_gradients_are_explained(one_process_shards):
    model = one_process_shards.prepare(nn.Embedding(5, 4, sparse=True))
    with pytest.raises(NotImplementedError) as raised:
        model(torch.tensor([1, 3])).sum().backward()
    assert "need dense gradients: sparse=False, or DDP alone" in explain(raised.value)


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


def test_what_sharding_would_not_train_is_refused(one_process_shards, capsys):
    """In an optimizer: weights of a model outside of `prepare`; in a model: one without dimensions."""
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    optimizers = [torch.optim.SGD(model.parameters()) for model in models]
    one_process_shards.prepare(models[0], optimizers[0])
    assert [*models[0].parameters()] == optimizers[0].param_groups[0]["params"]
    with pytest.raises(SystemExit):
        one_process_shards.prepare(optimizers[1])
    assert "is not sharded" in capsys.readouterr().err
    mixed = torch.optim.SGD([*models[0].parameters(), nn.Parameter(torch.ones(2))])
    with pytest.raises(SystemExit):
        one_process_shards.prepare(mixed)
    with pytest.raises(SystemExit):
        one_process_shards.clip_grad_norm_(models[1].parameters(), 1.0)
    capsys.readouterr()
    models[1].temperature = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="scalar parameters"):
        one_process_shards.prepare(models[1], optimizers[1])
    with pytest.raises(SystemExit):
        one_process_shards.backward(models[0](torch.ones(3)).sum(), inputs=[*models[0].parameters()])
    assert "accelerator.backward(inputs=...)" in capsys.readouterr().err


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


def step_with(optimizer):
    def fails(accelerator):
        model = nn.Linear(3, 2)
        model, prepared = accelerator.prepare(model, optimizer(model.parameters(), lr=0.1))
        accelerator.backward(model(torch.ones(2, 3)).sum())
        prepared.step()

    return fails


def penalise_gradients(accelerator):
    model = accelerator.prepare(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)))
    x = torch.ones(2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    accelerator.backward(gradient.square().sum())


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (penalise_gradients, "out of bounds for storage of size 0"),
        (step_with(torch.optim.Rprop), "require placement changes|Cannot find device mesh"),
        (step_with(torch.optim.Adafactor), "require placement changes|Cannot find device mesh"),
    ],
    ids=["second derivative", "Rprop", "Adafactor"],
)
def test_what_fsdp_cannot_do_is_an_error_of_torch(one_process_shards, fails, message):
    with pytest.raises(RuntimeError, match=message):
        fails(one_process_shards)


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


if __name__ == "__main__":
    main()
