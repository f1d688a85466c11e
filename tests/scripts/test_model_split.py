"""A split model equals the unsplit one: gradients, BatchNorm statistics and whole runs.

For each schedule and for each number of processes, stages and copies.

This file is also the script that its tests launch on several processes.
"""

import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_many
import run_reader
import same_numbers
import torch
import torchvision
from accelerate.utils import broadcast_object_list, gather_object
from conftest import first_images, needs_torch
from fakes import fake_accelerator
from small_resnets import use_narrow
from torchvision.models.resnet import resnet50

from scripts import model_split
from scripts.model_split import BLOCKS, Stage, make_loss_fn, make_pipeline, make_resnet
from utils.accelerator import TrainingAccelerator
from utils.data.images import LabelledImages, load_images
from utils.loader import GlobalLoader
from utils.metrics import Metrics
from utils.parallel.pipeline import (
    BlockCost,
    OneProcess,
    balance_stages,
    measure_blocks,
    sum_over_replicas,
)
from utils.sampler import GlobalSampler

SCHEDULES = ("naive", "gpipe", "1f1b")
# Of a step: one of 3 samples and five of 2.
MICRO_BATCHES = 6

FILE = Path(__file__).with_suffix("")


@pytest.fixture(autouse=True)
def _narrow_on_one_thread(monkeypatch):
    """Other tests run at the same time: a second thread would make this one slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    use_narrow(monkeypatch.setattr)
    yield
    torch.set_num_threads(threads)


@functools.cache  # drawing its weights takes longer than a step
def seeded_resnet(norm):
    torch.manual_seed(0)
    return make_resnet(4, norm).double()


def load(data, accelerator, copy_index=0, copies=1, micro_batches=MICRO_BATCHES, seed=0):
    """A loader whose only step has all samples; each copy of the pipeline gets its part."""
    shard = (copy_index, copies)
    accelerator.loaders = {}  # each loader is the first one
    return GlobalLoader(data, 40, accelerator, seed=seed, shard=shard, accumulation=micro_batches)


def reference(norm, copies, data, accelerator):
    """Gradients, buffers and then the test loss of the whole model, by plain autograd in float64.

    With GroupNorm, all samples go through the model at once. With BatchNorm, the micro-batches go
    one after another, and the buffers are the mean over the copies.
    """
    gradients, buffers = {}, {}
    for index in range(copies):
        whole = copy.deepcopy(seeded_resnet(norm))
        if norm == "batch":
            batches = list(load(data, accelerator, index, copies))
        elif index == 0:
            batches = list(load(data, accelerator, micro_batches=1))
        else:
            batches = []
        for batch in batches:
            images, labels = batch.data
            logits = whole(model_split.to_input(images, torch.float64))
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
            (loss / len(data)).backward()
        for name, parameter in whole.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
        for name, buffer in whole.named_buffers():
            buffers[name] = buffers.get(name, 0) + buffer / copies
    whole.load_state_dict(buffers, strict=False)
    with torch.no_grad():
        logits = whole.eval()(model_split.to_input(data.tensors[0], torch.float64))
    test_loss = torch.nn.functional.cross_entropy(logits, data.tensors[1]).item()
    return gradients, buffers, test_loss


def random_images(copies: int) -> LabelledImages:
    """One sample more than equal micro-batches would have.

    The first micro-batch gets it; with two replicas, the second has none of that size.
    """
    num_samples = 2 * MICRO_BATCHES * copies + 1
    generator = torch.Generator().manual_seed(1)
    shape = (num_samples, 1, 28, 28)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    return LabelledImages(images, torch.arange(num_samples) % 4, ["a", "b", "c", "d"])


@torch.no_grad()
def stage_shapes(resnet, blocks: list[list[str]]) -> list[torch.Tensor]:
    """What the script learns by measuring: the input of the first stage and the output of each."""
    examples = [torch.zeros(1, 1, 28, 28, dtype=torch.uint8)]
    for names in blocks:
        examples.append(Stage(resnet, names).eval()(examples[-1]))
    return [example.to("meta") for example in examples]


def largest_difference(tensors, expected) -> float:
    """Of named tensors, relative to the largest entry of each."""
    found = [0.0]
    for name, tensor in tensors:
        difference = (tensor - expected[name]).abs().max()
        found.append(float(difference / expected[name].abs().max().clamp(min=1e-30)))
    return max(found)


def first_stage(pipeline):
    return pipeline.stages[0] if isinstance(pipeline, OneProcess) else pipeline.stage


def record_passes(stage) -> list[str]:
    """An "f" for each forward and a "b" for each backward pass of a stage to come."""
    passes = []

    def record(module, inputs, output):
        passes.append("f")
        if output.requires_grad:
            output.register_hook(lambda gradient: passes.append("b"))

    stage.register_forward_hook(record)
    return passes


REFERENCES = {}


def differences(accelerator, schedule, norm, num_stages) -> dict:
    """The largest difference of a gradient and of a buffer to the unsplit model's; and this process's passes, such as
    "ffbb"."""
    copies = max(1, accelerator.num_processes // num_stages)
    data = random_images(copies)
    if (norm, copies) not in REFERENCES:
        computed = [None]
        if accelerator.is_main_process:
            computed = [reference(norm, copies, data, accelerator)]
        (REFERENCES[norm, copies],) = broadcast_object_list(computed)
    gradients, buffers, test_loss = REFERENCES[norm, copies]

    resnet = copy.deepcopy(seeded_resnet(norm))
    boundaries = [round(i * len(BLOCKS) / num_stages) for i in range(num_stages + 1)]
    blocks = [BLOCKS[first:last] for first, last in itertools.pairwise(boundaries)]
    examples = stage_shapes(resnet, blocks)
    devices = [accelerator.device]
    model, pipeline, group = make_pipeline(resnet, blocks, examples, schedule, num_stages, accelerator, devices)
    copy_index = accelerator.process_index // num_stages
    accelerator.layout = dataclasses.replace(accelerator.layout, split_batch=False)
    metrics = Metrics(accelerator)
    model.train()
    window = list(load(data, accelerator, copy_index, copies))
    passes = record_passes(first_stage(pipeline))
    pipeline.run([batch.data[0] for batch in window], window, make_loss_fn(metrics.add))
    passes = "".join(passes)
    sum_over_replicas(model, group)
    assert metrics.reduce()["samples"] == len(data)

    parameters = [(name, parameter.grad) for name, parameter in model.named_parameters()]
    float_buffers = [(n, buffer) for n, buffer in model.named_buffers() if "tracked" not in n]
    mine = [
        largest_difference(parameters, gradients),
        largest_difference(float_buffers, buffers),
        set(model.state_dict()),
    ]
    everyone = gather_object([mine])
    all_names = set().union(*(names for _, _, names in everyone))
    assert all_names == set(seeded_resnet(norm).state_dict())

    # Evaluation, with its own schedules: each sample counts once, and the model is not changed.
    before = copy.deepcopy(model.state_dict())
    run = SimpleNamespace(
        accelerator=accelerator,
        new_metrics=lambda: Metrics(accelerator),
        test_steps=lambda loader: [list(loader)],
    )
    test_loader = load(data, accelerator, copy_index, copies, seed=None)
    result = model_split.evaluate(model, pipeline, test_loader, run)
    assert result["samples"] == len(data)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    return {
        "gradients": max(gradient for gradient, _, _ in everyone),
        "buffers": max(buffer for _, buffer, _ in everyone),
        "test_loss": abs(result["loss"] / test_loss - 1),
        "passes": passes,
    }


def check(found):
    assert found["gradients"] <= 1e-11
    assert found["buffers"] <= 1e-11
    assert found["test_loss"] <= 1e-11


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_a_split_in_one_process_changes_no_number(norm):
    passes = {"naive": "fb" * 6, "gpipe": "ffffffbbbbbb", "1f1b": "fffbfbfbfbbb"}
    for schedule in SCHEDULES:
        found = differences(TrainingAccelerator(cpu=True), schedule, norm, 3)
        check(found)
        assert found["passes"] == passes[schedule]


def cases(printed: str) -> list[dict]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@pytest.fixture(scope="session")
def tiny_mnist(tmp_path_factory) -> Path:
    """43 training and 9 test images: steps of 16, 16 and 11."""
    return first_images(tmp_path_factory.mktemp("tiny_mnist"), 43, 9)


FLAGS = ["--norm", "group", "--batch_size", 16, "--max_steps", 4, "--lr", 1e-4, "--cpu_threads", 1]
FLAGS += ["--log_every", 1, "--checkpoint_every", 2, "--keep_checkpoints", 0]


@pytest.fixture
def train(tiny_mnist, home):
    """Runs the script's main in this process; returns its exit code."""

    def train(folder, *flags):
        return run_many.run("model_split", ["--dataset", tiny_mnist, "--output_dir", folder, *flags])

    return train


@pytest.fixture(scope="module")
def two_processes(shared_launcher, tiny_mnist):
    """What is printed by two processes, and the folder of their run."""
    flags = ["--dataset", tiny_mnist, "--output_dir", "two", *FLAGS]
    words = run_many.words("model_split", ["differences", 2], flags)
    done = shared_launcher("cpu_ddp", *words, script=FILE, timeout=240)
    return done.stdout, shared_launcher.folder / "two"


@pytest.fixture(scope="module")
def four_processes(shared_launcher, tiny_mnist):
    """What four processes print, and two folders: of a run, and of one resumed at its step 2."""
    flags = ["--dataset", tiny_mnist, *FLAGS, "--norm", "batch"]
    flags += ["--num_microbatches", 2, "--num_stages", 2]
    whole = [*flags, "--output_dir", "whole"]
    resumed = ["--back_to", "whole", 2, "resumed", *flags, "--resume", "--output_dir", "resumed"]
    words = run_many.words("model_split", ["differences", 4, 2], whole, resumed)
    processes = ["--num_processes", 4]
    done = shared_launcher("cpu_ddp", *words, script=FILE, launch_flags=processes, timeout=300)
    return done.stdout, shared_launcher.folder / "whole", shared_launcher.folder / "resumed"


@pytest.mark.slow
def test_it_is_the_plain_loop(train, tiny_mnist, tmp_path):
    """Weights, learning rates and the test are those of the unsplit model, with values that are not the defaults."""
    flags = ["--seed", 3, "--lr", 1e-3, "--weight_decay", 0.5, "--max_steps", 3]
    flags += ["--dtype", "float64", "--num_stages", 2, "--max_test_samples", 7]
    assert train(tmp_path / "run", *FLAGS, *flags) is None

    data, test = load_images(str(tiny_mnist))
    torch.manual_seed(3)
    model = make_resnet(10, "group").double()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, 3, cycle_momentum=False)
    order, _ = GlobalSampler(len(data), 16, seed=3).items(0)

    def loss_of(images, labels):
        logits = model(model_split.to_input(images, torch.float64))
        return torch.nn.functional.cross_entropy(logits, labels)

    rates = []
    for rows in order.split(16):
        loss_of(*data[rows]).backward()
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    assert [line["lr"] for line in run_reader.lines(tmp_path / "run", "train")] == rates
    (tested,) = run_reader.losses(tmp_path / "run", "test")
    with torch.no_grad():
        images, labels = test.tensors
        assert tested == pytest.approx(loss_of(images[:7], labels[:7]).item(), rel=1e-6)
    weights = run_reader.weights(tmp_path / "run")
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_a_micro_batch_without_samples_counts_nothing(train, tmp_path):
    """The last of the epoch's two steps has 3 samples for 4 micro-batches."""
    flags = [*FLAGS, "--batch_size", 40, "--max_steps", 3, "--dtype", "float64", "--num_stages", 2]
    for count in (1, 4):
        assert train(tmp_path / f"{count}", *flags, "--num_microbatches", count) is None
    # AdamW divides the rounding of the smallest gradients by their size.
    assert same_numbers.largest_difference(tmp_path / "1", tmp_path / "4") <= 1e-6


@pytest.mark.slow
@needs_torch("2.12")
def test_a_split_over_two_processes_changes_no_number(two_processes):
    """Of 6 micro-batches one has 3 samples and fills the pipeline alone; of the five of 2, the first stage has two in
    flight with 1F1B, and all with GPipe."""
    found = cases(two_processes[0])
    assert len(found) == 6
    passes = {"naive": "fb" * 6, "gpipe": "fb" + "fffff" + "bbbbb", "1f1b": "fb" + "ff" + "bfbfbf" + "bb"}
    for case in found:
        check(case)
        assert case["passes"] == passes[case["schedule"]]


@pytest.mark.slow
@needs_torch("2.12")
def test_four_stages_and_two_copies_of_two_change_no_number(four_processes):
    found = cases(four_processes[0])
    assert len(found) == 12
    for case in found:
        check(case)


@pytest.mark.slow
@needs_torch("2.12")
def test_a_run_on_two_stages_continues_on_four_or_one_and_loads_into_torchvision(
    two_processes, train, tiny_mnist, tmp_path
):
    printed, run = two_processes
    whole = tmp_path / "whole"
    train(whole, *FLAGS)
    assert "4 per micro-batch x 4 micro-batches x 1 pipeline x 1 accumulation step" in printed
    assert printed.count("done: ") == 1
    assert same_numbers.largest_difference(whole, run) <= 1e-5
    others = {
        "four": ["--num_stages", 4, "--schedule", "gpipe"],
        "one": ["--num_microbatches", 2, "--gradient_accumulation_steps", 2],
    }
    for name, flags in others.items():
        resumed = run_many.back_to(run, 2, tmp_path / name)
        train(resumed, *FLAGS, "--resume", *flags)
        assert same_numbers.largest_difference(whole, resumed) <= 1e-5

    state = run_reader.weights(run)
    norm = functools.partial(torch.nn.GroupNorm, 32)
    resnet = torchvision.models.resnet50(num_classes=10, norm_layer=norm).eval()
    resnet.load_state_dict(state, strict=True)
    test = load_images(str(tiny_mnist))[1]
    with torch.no_grad():
        logits = resnet(model_split.to_input(test.tensors[0], torch.float32))
    loss = torch.nn.functional.cross_entropy(logits, test.tensors[1]).item()
    summary = run_reader.summary(run)
    assert summary["test_samples"] == 9
    assert summary["test_loss"] == pytest.approx(loss, rel=1e-5)

    launched = run_reader.launches(run)[0]
    assert (launched["num_stages"], launched["replicas"], len(launched["stages"])) == (2, 1, 2)
    num_parameters = sum(parameter.numel() for parameter in resnet.parameters())
    assert sum(stage["parameters"] for stage in launched["stages"]) == num_parameters
    assert sum(stage["time_share"] for stage in launched["stages"]) == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
@needs_torch("2.12")
def test_a_run_of_two_copies_continues_bit_by_bit(four_processes):
    _, whole, resumed = four_processes
    launches = run_reader.launches(resumed)
    assert [(launch["num_processes"], launch["from_step"]) for launch in launches] == [(4, 0), (4, 2)]
    assert run_reader.lines(resumed) == run_reader.lines(whole)
    assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--num_stages 19", "19 stages are more than the 18 blocks of ResNet-50"),
        ("--batch_size 63", "--batch_size 63 is not divisible by 1 pipeline x 4 micro-batches x 1"),
        ("--num_stages 2 --split layer9.0", "layer9.0 must be 1 block in order, for 2 stages"),
        ("--num_stages 3 --split layer3.0 layer2.0", "must be 2 blocks in order"),
        ("--batch_size 8 --num_microbatches 8", "micro-batches of one sample"),
        ("--batch_size 40", "micro-batches of one sample"),  # the last step has 3
    ],
)
def test_bad_input_is_an_error_of_one_line_before_any_training(train, tmp_path, capsys, flags, sentence):
    code = train(tmp_path / "run", "--max_steps", 2, *flags.split())
    out, error = capsys.readouterr()
    assert code == 2
    assert error.count("\n") == 1
    assert sentence in error
    assert "train epoch" not in out


def test_copies_sum_their_gradients_and_average_their_buffers(monkeypatch):
    """Two copies with equal numbers; without a kernel for each tensor."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flat, group: flat.mul_(2))
    monkeypatch.setattr(torch.Tensor, "copy_", None)
    batch_norm, group_norm = model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.GroupNorm(1, 3))
    for part in (model, group_norm):  # with and without buffers
        for parameter in model.parameters():
            parameter.grad = torch.ones(3)
        sum_over_replicas(part, SimpleNamespace(size=lambda: 2))
        assert batch_norm.running_var.tolist() == [1, 1, 1]
        assert group_norm.weight.grad.tolist() == group_norm.bias.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize(("device", "backend"), [("cuda", "nccl-lazy"), ("cpu", None)])
def test_the_groups_of_a_pipeline_have_the_timeout_of_the_run_and_on_gpus_a_lazy_backend(monkeypatch, device, backend):
    asked = []

    def new_groups(ranks, *more):
        asked.append((ranks, *more))
        return str(ranks), []

    monkeypatch.setattr(model_split, "new_subgroups_by_enumeration", new_groups)
    accelerator = fake_accelerator(4, rank=1, device=device, init_handler=SimpleNamespace(timeout=9))
    blocks, examples = [BLOCKS[:9], BLOCKS[9:]], [torch.zeros(1, device="meta")] * 3
    devices = [torch.device("cpu")]
    _, pipeline, copies = make_pipeline(make_resnet(4), blocks, examples, "1f1b", 2, accelerator, devices)
    assert asked == [([[0, 1], [2, 3]], 9, backend), ([[0, 2], [1, 3]], 9)]
    assert (pipeline.group, copies) == ("[[0, 1], [2, 3]]", "[[0, 2], [1, 3]]")
    assert pipeline.index == 1


def test_stages_have_the_names_and_the_numbers_of_torchvision(monkeypatch):
    resnet = make_resnet(7).eval()
    fresh = torchvision.models.resnet50(num_classes=7)
    assert list(Stage(resnet, BLOCKS).state_dict()) == list(fresh.state_dict())
    with torch.device("meta"):
        assert list(fresh.state_dict()) == list(resnet50(num_classes=7).state_dict())
    first, last = Stage(resnet, BLOCKS[:9]), Stage(resnet, BLOCKS[9:])
    assert not first.state_dict().keys() & last.state_dict().keys()
    fresh.load_state_dict(first.state_dict() | last.state_dict(), strict=True)
    images = torch.randint(0, 256, (2, 1, 28, 26), dtype=torch.uint8)
    x = model_split.to_input(images, torch.float32)
    assert x.shape == (2, 3, 32, 32)
    mean = torch.tensor(model_split.MEAN)[:, None, None]
    std = torch.tensor(model_split.STD)[:, None, None]
    assert torch.equal(x[:, :, 2:30, 3:29], (images - mean) / std)
    with monkeypatch.context() as patch:  # the second time, nothing is copied to a GPU, which would wait for it
        patch.setattr(torch, "tensor", None)
        assert torch.equal(x, model_split.to_input(images, torch.float32))
    with torch.no_grad():
        assert torch.equal(last(first(images)), fresh.eval()(x))


@pytest.mark.parametrize(("samples", "is_stopped"), [(48 + 20, True), (48 + 24, False)])
def test_the_smallest_micro_batch_is_that_of_the_last_step(samples, is_stopped):
    """Of 2 pipelines x 3 micro-batches x 2 accumulation steps: 20 samples leave 1 for some of the 12, and 24 two."""
    args = SimpleNamespace(num_stages=2, num_microbatches=3, gradient_accumulation_steps=2, batch_size=48, norm="batch")
    layout = model_split.choose_layout(args, fake_accelerator(4))
    assert (layout.replicas, layout.accumulation, layout.micro_batch_size) == (2, 6, 4)
    data = LabelledImages(torch.zeros(samples, 1, 28, 28), torch.zeros(samples), ["0"])
    with pytest.raises(SystemExit) if is_stopped else contextlib.nullcontext():
        model_split.check_batch_norm(args, layout, data, total_steps=2)


def test_the_stages_are_the_most_even_of_all():
    generator = torch.Generator().manual_seed(0)
    for num_blocks, num_stages in ((1, 1), (5, 5), (7, 3), (9, 4)):
        seconds = torch.rand(num_blocks, generator=generator).tolist()

        def slowest(boundaries, seconds=seconds):
            return max(sum(seconds[first:last]) for first, last in itertools.pairwise(boundaries))

        stages = balance_stages({str(i): BlockCost(s, 0, None) for i, s in enumerate(seconds)}, num_stages)
        assert [name for names in stages for name in names] == [str(i) for i in range(num_blocks)]
        assert len(stages) == num_stages
        assert all(stages)
        possible = itertools.combinations(range(1, num_blocks), num_stages - 1)
        best = min(slowest([0, *inner, num_blocks]) for inner in possible)
        assert slowest([0, *itertools.accumulate(map(len, stages))]) == best


def test_measuring_leaves_the_blocks_alone():
    TrainingAccelerator(cpu=True)
    resnet = make_resnet(10)
    before = copy.deepcopy(resnet.state_dict())
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    costs = measure_blocks({name: Stage(resnet, [name]) for name in BLOCKS}, images, rounds=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in resnet.state_dict().items())
    assert all(parameter.grad is None for parameter in resnet.parameters())
    num_parameters = sum(parameter.numel() for parameter in resnet.parameters())
    assert sum(cost.parameters for cost in costs.values()) == num_parameters
    assert all(cost.time_s > 0 for cost in costs.values())
    assert costs["layer2.3"].output.shape == (4, 32, 4, 4)


def print_differences(*numbers_of_stages: int):
    """Print those of each case as a line of JSON. Collective."""
    accelerator = TrainingAccelerator(cpu=True)
    torch.set_num_threads(1)
    norms = ("group", "batch")
    for num_stages, norm, schedule in itertools.product(numbers_of_stages, norms, SCHEDULES):
        found = differences(accelerator, schedule, norm, num_stages)
        case = {"stages": num_stages, "norm": norm, "schedule": schedule, **found}
        accelerator.print(json.dumps(case))
    run_many.reset_accelerate()


def main():
    """As run_many.py, but with the narrow model; the first "run" may be `differences 4 2`."""
    use_narrow(setattr)
    if sys.argv[2].startswith("differences"):
        print_differences(*map(int, sys.argv.pop(2).split()[1:]))
    run_many.main()


if __name__ == "__main__":
    main()
