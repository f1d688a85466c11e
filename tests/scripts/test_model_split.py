"""A split model equals the unsplit one: gradients, BatchNorm statistics and whole runs.

For each schedule and for each number of processes, stages and copies.
"""

import contextlib
import copy
import functools
import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_reader
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
from scripts.model_split import BLOCKS, Stage, make_resnet
from utils.data.images import LabelledImages, load_images
from utils.parallel.pipeline import BlockCost, OneProcess, OverProcesses, balance_stages

SCHEDULES = ("naive", "gpipe", "1f1b")
TWO, FOUR = ("cpu_ddp",), ("cpu_ddp", "--num_processes", 4)
# Stages, copies and norm of the exact runs, with their topologies.
SPLITS = {(3, 1, "group"): ("cpu",), (3, 1, "batch"): ("cpu",), (2, 1, "group"): TWO, (2, 1, "batch"): TWO}
SPLITS |= {(4, 1, "batch"): FOUR, (2, 2, "batch"): FOUR}
# Passes of the first stage, by stages and schedule. In the second step, the first micro-batch has one more sample and
# fills the pipeline of two processes alone; of the others, it has two in flight with 1F1B, and all with GPipe.
PASSES = {
    **{(3, "naive"): "fb" * 12, (3, "gpipe"): ("f" * 6 + "b" * 6) * 2, (3, "1f1b"): "fffbfbfbfbbb" * 2},
    **{(2, "naive"): "fb" * 12, (2, "gpipe"): "f" * 6 + "b" * 6 + "fb" + "f" * 5 + "b" * 5},
    (2, "1f1b"): "ff" + "bf" * 4 + "bb" + "fb" + "ff" + "bf" * 3 + "bb",
}
# Steps of 24, 19 and 24 images: of 19, the first of 6 micro-batches gets one more than the others.
EXACT = ["--exact", "--dtype", "float64", "--lr", 0.1, "--weight_decay", 0.5, "--batch_size", 24, "--max_steps", 3]
EXACT += ["--cpu_threads", 1, "--seed", 3, "--max_test_samples", 7, "--log_every", 1]
FLAGS = ["--norm", "group", "--batch_size", 16, "--max_steps", 4, "--lr", 1e-4, "--cpu_threads", 1]
FLAGS += ["--log_every", 1, "--checkpoint_every", 2, "--keep_checkpoints", 0]


@pytest.fixture(autouse=True)
def _narrow_on_one_thread(monkeypatch):
    """Other tests run at the same time: a second thread would make this one slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    use_narrow(monkeypatch.setattr)
    yield
    torch.set_num_threads(threads)


@functools.cache
def plain(norm, copies, data, test):
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


@pytest.fixture(scope="session")
def tiny_mnist(tmp_path_factory) -> Path:
    """43 training and 9 test images: steps of 16, 16 and 11."""
    return first_images(tmp_path_factory.mktemp("tiny_mnist"), 43, 9)


@pytest.fixture(scope="module")
def images(tiny_mnist):
    """Training and test images, which are the same objects for all tests."""
    return load_images(str(tiny_mnist))


@pytest.fixture(scope="module")
def split(runs, tiny_mnist):
    """All runs, of which those of one topology are one launch."""
    make = functools.partial(runs, "split_resnet", "--dataset", tiny_mnist)
    exact = {}
    for ((stages, copies, norm), on), schedule in itertools.product(SPLITS.items(), SCHEDULES):
        flags = ["--norm", norm, "--schedule", schedule, "--num_stages", stages, "--num_microbatches", 6 // copies]
        exact[stages, copies, norm, schedule] = make(*EXACT, *flags, on=on)
    two = make(*FLAGS, on=TWO)
    four = make(*FLAGS, "--num_stages", 4, "--schedule", "gpipe", resumes=two, at=2)
    one = make(*FLAGS, "--num_microbatches", 2, "--gradient_accumulation_steps", 2, resumes=two, at=2)
    copied = [*FLAGS, "--norm", "batch", "--num_microbatches", 2, "--num_stages", 2]
    copies = make(*copied, on=FOUR)
    again = make(*copied, on=FOUR, resumes=copies, at=2)
    small = [*FLAGS, "--batch_size", 40, "--max_steps", 3, "--dtype", "float64", "--num_stages", 2]
    few = [make(*small, "--num_microbatches", count) for count in (1, 4)]
    return SimpleNamespace(
        exact=exact, whole=make(*FLAGS), two=two, four=four, one=one, copies=copies, again=again, few=few
    )


@pytest.mark.slow
def test_a_micro_batch_without_samples_counts_nothing(split):
    """The last of the epoch's two steps has 3 samples for 4 micro-batches."""
    one, four = split.few
    # AdamW divides the rounding of the smallest gradients by their size.
    assert four.differs_from(one) <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "copies", "norm"),
    [pytest.param(*each, marks=needs_torch("2.12") if on != ("cpu",) else ()) for each, on in SPLITS.items()],
)
def test_a_split_changes_no_number(split, images, stages, copies, norm):
    """What the steps of a run have changed, in each tensor, and the test are those of the plain loop."""
    before, expected, rates, test_loss = plain(norm, copies, *images)
    for schedule in SCHEDULES:
        folder = split.exact[stages, copies, norm, schedule].folder
        found = run_reader.weights(folder)
        assert found.keys() == expected.keys()
        assert [line["lr"] for line in run_reader.lines(folder, "train")] == rates
        for name, tensor in expected.items():
            changed, difference = (tensor - before[name]).abs().max(), (found[name] - tensor).abs().max()
            assert difference <= 1e-11 * changed, name
        *_, tested = run_reader.lines(folder, "test")
        assert tested["samples"] == 7
        assert tested["loss"] == pytest.approx(test_loss, rel=1e-11)
        if copies == 1 and (stages, schedule) in PASSES:
            assert (folder / "passes").read_text() == PASSES[stages, schedule]


@pytest.mark.slow
@needs_torch("2.12")
def test_a_run_on_two_stages_continues_on_four_or_one_and_loads_into_torchvision(split, tiny_mnist):
    for other in (split.two, split.four, split.one):
        assert other.differs_from(split.whole) <= 1e-5
    run = split.two.folder
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
def test_a_run_of_two_copies_continues_bit_by_bit(split):
    whole, again = split.copies, split.again
    launches = run_reader.launches(again.folder)
    assert [(launch["num_processes"], launch["from_step"]) for launch in launches] == [(4, 0), (4, 2)]
    assert run_reader.lines(again.folder) == run_reader.lines(whole.folder)
    assert again.bits == whole.bits


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


def test_stages_have_the_names_and_the_numbers_of_torchvision():
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
    assert torch.equal(x, (F.pad(images, (3, 3, 2, 2)) - mean) / std)  # padded by black
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
