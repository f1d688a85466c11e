"""A split model equals the unsplit one: gradients, BatchNorm statistics and whole runs.

For each schedule and for each number of processes, stages and copies.

This file is also the script that its tests launch on several processes.
"""

import contextlib
import copy
import functools
import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_many
import run_reader
import same_numbers
import torch
import torchvision
from conftest import first_images, needs_torch
from fakes import fake_accelerator
from plain_loop import batches_of
from small_resnets import use_narrow
from torch import nn
from torch.nn import functional as F
from torchvision.models.resnet import resnet50

from scripts import model_split
from scripts.model_split import BLOCKS, Stage, make_pipeline, make_resnet
from utils.accelerator import TrainingAccelerator
from utils.data.images import LabelledImages, load_images
from utils.parallel.pipeline import (
    BlockCost,
    OneProcess,
    OverProcesses,
    balance_stages,
    measure_blocks,
)

SCHEDULES = ("naive", "gpipe", "1f1b")
NORMS = ("group", "batch")
# Steps of 24, 19 and 24 images: of 19, the first of 6 micro-batches gets one more than the others.
EXACT = ["--sgd", "--dtype", "float64", "--lr", 0.1, "--weight_decay", 0.5, "--batch_size", 24, "--max_steps", 3]
EXACT += ["--cpu_threads", 1, "--seed", 3, "--max_test_samples", 7, "--log_every", 1]

FILE = Path(__file__).with_suffix("")
RUN_ONE = run_many.run


@pytest.fixture(autouse=True)
def _narrow_on_one_thread(monkeypatch):
    """Other tests run at the same time: a second thread would make this one slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    use_narrow(monkeypatch.setattr)
    yield
    torch.set_num_threads(threads)


@functools.cache
def plain(norm: str, copies: int, data: LabelledImages, test: LabelledImages):
    """The states of the unsplit model before and after the steps of EXACT in a plain loop, its learning rates, and its
    test loss.

    With GroupNorm, all samples of a step go through the model at once. With BatchNorm, the micro-batches go one after
    another; the copies' gradients are added, and their buffers averaged.
    """
    torch.manual_seed(3)
    model, rates = make_resnet(10, norm).double(), []
    first = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 3, cycle_momentum=False)
    for _, indices in itertools.islice(batches_of(len(data), 24, seed=3, epochs=2), 3):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        after, gradients = [], [torch.zeros_like(parameter) for parameter in model.parameters()]
        parts = indices.tensor_split(6) if norm == "batch" else [indices]
        for first_part in range(copies):
            model.load_state_dict(before, strict=False)
            for part in parts[first_part::copies]:
                (loss_of(model, *data[part], reduction="sum") / len(indices)).backward()
            after.append({name: buffer.clone() for name, buffer in model.named_buffers()})
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                gradient += parameter.grad
                parameter.grad = None
        mean = {name: sum(buffers[name] for buffers in after) / len(after) for name in before}
        model.load_state_dict(mean, strict=False)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with torch.no_grad():
        test_loss = loss_of(model.eval(), *test[torch.arange(7)]).item()
    return first, model.state_dict(), rates, test_loss


def loss_of(model, images, labels, reduction="mean"):
    logits = model(model_split.to_input(images, torch.float64))
    return torch.nn.functional.cross_entropy(logits, labels, reduction=reduction)


def check(folder, norm, images, copies=1):
    """What the steps of a run have changed, in each tensor, and the test are those of the plain loop."""
    before, expected, rates, test_loss = plain(norm, copies, *images)
    found = run_reader.weights(folder)
    assert found.keys() == expected.keys()
    assert [line["lr"] for line in run_reader.lines(folder, "train")] == rates
    for name, tensor in expected.items():
        changed, difference = (tensor - before[name]).abs().max(), (found[name] - tensor).abs().max()
        assert difference <= 1e-11 * changed, name
    *_, tested = run_reader.lines(folder, "test")
    assert tested["samples"] == 7
    assert tested["loss"] == pytest.approx(test_loss, rel=1e-11)


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


def run(script: str, flags: list) -> int | None:
    """run_many.run; with --sgd among the flags, SGD is the optimizer, and the folder gets a file `passes`.

    AdamW divides the rounding of the smallest gradients by their size, and the size of all by itself.
    """
    if "--sgd" not in flags:
        return RUN_ONE(script, flags)
    recorded = []

    def sgd(parameters, lr, weight_decay, fused):
        return torch.optim.SGD(parameters, lr, weight_decay=weight_decay)

    def make_and_record(*args):
        made = make_pipeline(*args)
        recorded.append(record_passes(first_stage(made[1])))
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "AdamW", sgd)
        patch.setattr(model_split, "make_pipeline", make_and_record)
        code = RUN_ONE(script, [flag for flag in flags if flag != "--sgd"])
    if os.environ.get("RANK", "0") == "0":
        Path(flags[flags.index("--output_dir") + 1], "passes").write_text("".join(recorded[0][:24]))
    return code


@pytest.fixture(scope="session")
def tiny_mnist(tmp_path_factory) -> Path:
    """43 training and 9 test images: steps of 16, 16 and 11."""
    return first_images(tmp_path_factory.mktemp("tiny_mnist"), 43, 9)


@pytest.fixture(scope="module")
def images(tiny_mnist):
    """Training and test images, which are the same objects for all tests."""
    return load_images(str(tiny_mnist))


FLAGS = ["--norm", "group", "--batch_size", 16, "--max_steps", 4, "--lr", 1e-4, "--cpu_threads", 1]
FLAGS += ["--log_every", 1, "--checkpoint_every", 2, "--keep_checkpoints", 0]


@pytest.fixture
def train(tiny_mnist, home):
    """Runs the script's main in this process; returns its exit code."""

    def train(folder, *flags):
        return run("model_split", ["--dataset", tiny_mnist, "--output_dir", folder, *flags])

    return train


def exact_runs(norms, num_stages, copies=1):
    """Flags of a run of EXACT for each norm and schedule, in a folder of its own."""
    for norm, schedule in itertools.product(norms, SCHEDULES):
        flags = ["--norm", norm, "--schedule", schedule, "--num_stages", num_stages, "--num_microbatches", 6 // copies]
        yield [*EXACT, *flags, "--output_dir", f"{norm}-{schedule}-{num_stages}x{copies}"]


@pytest.fixture(scope="module")
def two_processes(shared_launcher, tiny_mnist):
    """What is printed by two processes, and the folder of their run, beside those of EXACT."""
    runs = [["--output_dir", "two", *FLAGS], *exact_runs(NORMS, 2)]
    words = run_many.words("model_split", *(["--dataset", tiny_mnist, *flags] for flags in runs))
    done = shared_launcher("cpu_ddp", *words, script=FILE, timeout=240)
    return done.stdout, shared_launcher.folder / "two"


@pytest.fixture(scope="module")
def four_processes(shared_launcher, tiny_mnist):
    """Two folders of four processes: of a run, and of one resumed at its step 2, beside those of EXACT."""
    flags = ["--dataset", tiny_mnist, *FLAGS, "--norm", "batch"]
    flags += ["--num_microbatches", 2, "--num_stages", 2]
    whole = [*flags, "--output_dir", "whole"]
    resumed = ["--back_to", "whole", 2, "resumed", *flags, "--resume", "--output_dir", "resumed"]
    exact = [["--dataset", tiny_mnist, *run] for stages in (4, 2) for run in exact_runs(["batch"], stages, 4 // stages)]
    words = run_many.words("model_split", whole, resumed, *exact)
    processes = ["--num_processes", 4]
    shared_launcher("cpu_ddp", *words, script=FILE, launch_flags=processes, timeout=300)
    return shared_launcher.folder / "whole", shared_launcher.folder / "resumed"


@pytest.mark.slow
def test_a_micro_batch_without_samples_counts_nothing(train, tmp_path):
    """The last of the epoch's two steps has 3 samples for 4 micro-batches."""
    flags = [*FLAGS, "--batch_size", 40, "--max_steps", 3, "--dtype", "float64", "--num_stages", 2]
    for count in (1, 4):
        assert train(tmp_path / f"{count}", *flags, "--num_microbatches", count) is None
    # AdamW divides the rounding of the smallest gradients by their size.
    assert same_numbers.largest_difference(tmp_path / "1", tmp_path / "4") <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_a_split_in_one_process_changes_no_number(train, images, tmp_path, monkeypatch, norm):
    monkeypatch.chdir(tmp_path)
    for flags in exact_runs([norm], 3):
        assert train(flags[-1], *flags[:-2]) is None
        check(tmp_path / flags[-1], norm, images)
    passes = {"naive": "fb" * 12, "gpipe": ("f" * 6 + "b" * 6) * 2, "1f1b": "fffbfbfbfbbb" * 2}
    assert {schedule: Path(f"{norm}-{schedule}-3x1", "passes").read_text() for schedule in SCHEDULES} == passes


@pytest.mark.slow
@needs_torch("2.12")
@pytest.mark.parametrize("norm", NORMS)
def test_a_split_over_two_processes_changes_no_number(two_processes, images, norm):
    """In the second step, the first micro-batch has one more sample and fills the pipeline alone; of the others, the
    first stage has two in flight with 1F1B, and all with GPipe."""
    _, folder = two_processes
    passes = {
        "naive": "fb" * 12,
        "gpipe": "f" * 6 + "b" * 6 + "fb" + "f" * 5 + "b" * 5,
        "1f1b": "ff" + "bf" * 4 + "bb" + "fb" + "ff" + "bf" * 3 + "bb",
    }
    for schedule in SCHEDULES:
        exact = folder.parent / f"{norm}-{schedule}-2x1"
        check(exact, norm, images)
        assert (exact / "passes").read_text() == passes[schedule]


@pytest.mark.slow
@needs_torch("2.12")
@pytest.mark.parametrize("num_stages", [4, 2])
def test_four_stages_and_two_copies_of_two_change_no_number(four_processes, images, num_stages):
    whole, _ = four_processes
    for schedule in SCHEDULES:
        copies = 4 // num_stages
        check(whole.parent / f"batch-{schedule}-{num_stages}x{copies}", "batch", images, copies)


@pytest.mark.slow
@needs_torch("2.12")
def test_a_run_on_two_stages_continues_on_four_or_one_and_loads_into_torchvision(
    two_processes, train, tiny_mnist, tmp_path
):
    printed, run = two_processes
    whole = tmp_path / "whole"
    train(whole, *FLAGS)
    assert "4 per micro-batch x 4 micro-batches x 1 pipeline x 1 accumulation step" in printed
    assert printed.count("the model and its numbers are in two\n") == 1
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
    whole, resumed = four_processes
    launches = run_reader.launches(resumed)
    assert [(launch["num_processes"], launch["from_step"]) for launch in launches] == [(4, 0), (4, 2)]
    assert run_reader.lines(resumed) == run_reader.lines(whole)
    assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


def seeded_numbers(count):
    for number in range(count):
        torch.manual_seed(number)
        yield number


def test_each_micro_batch_is_begun_before_its_forward_pass_so_dropout_draws_with_its_seed():
    stage, drawn = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 1)), []
    stage[0].register_forward_hook(lambda module, inputs, output: drawn.append(output.tolist()))
    inputs = [torch.ones(2, 8), torch.ones(2, 8), torch.ones(2, 8), torch.ones(1, 8)]
    expected = [F.dropout(inputs[number], 0.5).tolist() for number in seeded_numbers(4)]
    examples = [torch.empty(2, 8, device="meta"), torch.empty(2, 1, device="meta")]
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        group, cpu = torch.distributed.group.WORLD, torch.device("cpu")
        pipelines = [OneProcess([stage], [cpu], max_in_flight) for max_in_flight in (1, 9)]
        pipelines += [OverProcesses(stage, 0, examples, schedule, group, cpu) for schedule in SCHEDULES]
        for pipeline in pipelines:
            targets = []
            pipeline.run(
                inputs, seeded_numbers(4), lambda y, target, targets=targets: targets.append(target) or y.sum()
            )
            assert targets == [0, 1, 2, 3]
            assert drawn == expected
            drawn.clear()
    finally:
        torch.distributed.destroy_process_group()


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


def main():
    """As run_many.py, but with the narrow model, and --sgd."""
    use_narrow(setattr)
    run_many.run = run
    run_many.main()


if __name__ == "__main__":
    main()
