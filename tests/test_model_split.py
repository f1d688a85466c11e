"""The model that is cut is the model that is not: gradients, statistics and whole runs, for each schedule and layout.

This file is also the script that its tests launch on several processes.
"""

import copy
import functools
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet
import pytest
import safetensors.torch
import several
import torch
import torchvision
from accelerate import Accelerator
from accelerate.utils import gather_object

from scripts import model_split
from scripts.model_split import BLOCKS, Stage, make_pipeline, make_resnet, record_losses
from utils import launch
from utils.data import BUNDLED_MNIST, GlobalBatches, Images, load_images
from utils.metrics import SampleStats
from utils.pipeline import (
    BlockCost,
    OneProcess,
    cut_evenly,
    even_cut,
    idle_shares,
    measure_blocks,
    sum_over_copies,
)

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved")
PIECES = 6  # micro-batches of an update: one of 3 samples and five of 2, an odd number for interleaved


FILE = Path(__file__).with_suffix("")
NARROW = functools.partial(torchvision.models.resnet50, width_per_group=32)  # half the channels in a block: faster


@pytest.fixture(autouse=True)
def _narrow_on_one_thread(monkeypatch):
    """Beside other work a second thread makes it slower, and not faster."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(torchvision.models, "resnet50", NARROW)
    yield
    torch.set_num_threads(threads)


@functools.cache  # to draw its weights takes longer than an update
def seeded_resnet(norm):
    torch.manual_seed(0)
    return make_resnet(4, norm).double()


def reference(norm, copies, data, accelerator):
    """Gradients and buffers of the whole model by plain autograd, and each sample's loss in evaluation, in float64.

    With GroupNorm of all samples at once; with BatchNorm of the micro-batches one after another, and the statistics'
    mean over the copies that saw them.
    """
    start = seeded_resnet(norm)
    gradients, buffers = {}, {}
    for index in range(copies):
        whole = copy.deepcopy(start)
        share = SimpleNamespace(device=accelerator.device, num_processes=copies, process_index=index)
        batches = list(GlobalBatches(data, 40, share, 0, PIECES).epoch())
        if norm == "group":
            batches = batches[:0] if index else list(GlobalBatches(data, 40, accelerator_of_one(), 0).epoch())
        for batch in batches:
            logits = whole(model_split.to_input(batch.images, torch.float64))
            loss = torch.nn.functional.cross_entropy(logits, batch.labels, reduction="sum") / batch.update_size
            loss.backward()
        for name, parameter in whole.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
        for name, buffer in whole.named_buffers():
            buffers[name] = buffers.get(name, 0) + buffer / copies
    return gradients, buffers


def accelerator_of_one():
    return SimpleNamespace(device=torch.device("cpu"), num_processes=1, process_index=0)


def random_images(copies: int) -> Images:
    """So many that the first micro-batch has one sample more; with two copies, the second one has none like that."""
    num_samples = 2 * PIECES * copies + 1
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (num_samples, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return Images(images, torch.arange(num_samples) % 4, ["a", "b", "c", "d"])


def differences(accelerator, schedule, norm, num_stages, made={}) -> dict[str, float]:  # noqa: B006  references, once
    """Largest difference of a gradient and of a buffer to the unsplit model's, relative to the tensor's largest."""
    copies = max(1, accelerator.num_processes // num_stages)
    data = random_images(copies)
    if (norm, copies) not in made:
        made[norm, copies] = reference(norm, copies, data, accelerator)
    gradients, buffers = made[norm, copies]

    resnet = copy.deepcopy(seeded_resnet(norm))
    num_virtual = num_stages * (2 if schedule == "interleaved" else 1)
    bounds = [round(i * len(BLOCKS) / num_virtual) for i in range(num_virtual + 1)]
    blocks = [BLOCKS[first:last] for first, last in itertools.pairwise(bounds)]
    # What the script learns by measuring: the shape of what goes in and of what each stage hands on.
    x, on_meta = torch.zeros(1, 1, 28, 28, dtype=torch.uint8, device="meta"), copy.deepcopy(resnet).to("meta")
    ends = [x]
    for names in blocks:
        ends.append(Stage(on_meta, names).eval()(ends[-1]).detach())
    model, pipeline, group = make_pipeline(
        resnet, blocks, ends, schedule, num_stages, accelerator, [accelerator.device]
    )
    share = SimpleNamespace(
        device=accelerator.device, num_processes=copies, process_index=accelerator.process_index // num_stages
    )
    stats = SampleStats(accelerator)
    model.train()
    window = list(GlobalBatches(data, 40, share, 0, PIECES).epoch())
    pipeline.run(window, record_losses(stats, accelerator))
    if group is not None:
        sum_over_copies(model, group)
    assert stats.reduce()["samples"] == len(data.labels)

    def largest(tensors, expected):
        found = [(tensor - expected[n]).abs().max() / expected[n].abs().max().clamp(min=1e-30) for n, tensor in tensors]
        return max(map(float, found), default=0.0)

    mine = [
        largest(((name, parameter.grad) for name, parameter in model.named_parameters()), gradients),
        largest(((n, buffer) for n, buffer in model.named_buffers() if "tracked" not in n), buffers),
        set(model.state_dict()),
    ]
    everyone = gather_object([mine])
    assert set().union(*(names for *_, names in everyone)) == set(seeded_resnet(norm).state_dict())
    # Evaluation, with its own schedules: each sample once, and nothing learnt from it.
    before = copy.deepcopy(model.state_dict())
    result = model_split.evaluate(
        model, pipeline, GlobalBatches(data, 40, share, accumulation=PIECES), accelerator, SimpleNamespace(agreed=bool)
    )
    assert result["samples"] == len(data.labels)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    return {
        "gradients": max(gradient for gradient, _, _ in everyone),
        "buffers": max(buffer for _, buffer, _ in everyone),
        "test_loss": result["loss"],
    }


def check(found):
    assert found["gradients"] <= 1e-11
    assert found["buffers"] <= 1e-11


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_one_process_cuts_without_changing_a_number(norm):
    for schedule in SCHEDULES:
        check(differences(Accelerator(cpu=True), schedule, norm, 3))


def cases(printed: str) -> list[dict]:
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


@pytest.fixture(scope="session")
def tiny_mnist(tmp_path_factory) -> Path:
    """43 training and 9 test images: updates of 16, 16 and 11."""
    folder = tmp_path_factory.mktemp("tiny_mnist")
    for split, rows in (("train", 43), ("test", 9)):
        name = f"{split}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pyarrow.parquet.read_table(f"{BUNDLED_MNIST}/{name}").slice(0, rows), folder / name)
    return folder


FLAGS = ["--norm", "group", "--batch_size", 16, "--max_steps", 4, "--lr", 1e-4, "--cpu_threads", 1]
FLAGS += ["--log_every", 1, "--checkpoint_every", 2, "--keep_checkpoints", 0]


@pytest.fixture
def train(tiny_mnist, home):
    """Runs the script's main in this process; returns its exit code."""
    return lambda folder, *flags: several.run("model_split", ["--dataset", tiny_mnist, "--output_dir", folder, *flags])


@pytest.fixture(scope="module")
def two_processes(shared_launcher, tiny_mnist):
    """What is printed by two processes, and the folder of their run."""
    flags = ["--dataset", tiny_mnist, "--output_dir", "two", *FLAGS]
    words = several.words("model_split", ["differences", 2], flags)
    return shared_launcher("cpu_ddp", *words, script=FILE, timeout=240).stdout, shared_launcher.folder / "two"


@pytest.fixture(scope="module")
def four_processes(shared_launcher, tiny_mnist):
    """What is printed by four processes, and the folders of a run of two copies and of one resumed at its update 2."""
    flags = ["--dataset", tiny_mnist, *FLAGS, "--norm", "batch", "--num_microbatches", 2, "--num_stages", 2]
    resume = ["--back_to", "whole", 2, "resumed", *flags, "--resume", "--output_dir", "resumed"]
    words = several.words("model_split", ["differences", 4, 2], [*flags, "--output_dir", "whole"], resume)
    done = shared_launcher("cpu_ddp", *words, script=FILE, launch_flags=["--num_processes", 4], timeout=300)
    return done.stdout, shared_launcher.folder / "whole", shared_launcher.folder / "resumed"


@pytest.mark.slow
def test_two_processes_cut_without_changing_a_number(two_processes):
    found = cases(two_processes[0])
    assert len(found) == 8
    for case in found:
        check(case)


@pytest.mark.slow
def test_four_stages_and_two_copies_of_two_change_no_number(four_processes):
    found = cases(four_processes[0])
    assert len(found) == 16
    for case in found:
        check(case)


def trace(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [[line["split"], line["step"], line["epoch"], line["accuracy"], line["loss"]] for line in lines]


def assert_same_run(folder, other):
    for line, expected in zip(trace(folder), trace(other), strict=True):
        assert line == [*expected[:-1], pytest.approx(expected[-1], rel=1e-6)]
    weights, expected = (safetensors.torch.load_file(each / "model.safetensors") for each in (folder, other))
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_a_run_on_two_stages_goes_on_on_four_or_none_and_loads_into_torchvision(
    two_processes, train, tiny_mnist, tmp_path
):
    printed, run = two_processes
    whole = tmp_path / "whole"
    train(whole, *FLAGS)
    assert "4 per micro-batch x 4 micro-batches x 1 copies of the model" in printed
    assert printed.count("done: ") == 1
    assert_same_run(run, whole)
    for name, flags in (("four", ["--num_stages", 4, "--schedule", "gpipe"]), ("one", [])):
        resumed = several.back_to(run, 2, tmp_path / name)
        train(resumed, *FLAGS, "--resume", *flags)
        assert_same_run(resumed, whole)

    state = safetensors.torch.load_file(run / "model.safetensors")
    norm = functools.partial(torch.nn.GroupNorm, 32)
    resnet = torchvision.models.resnet50(num_classes=10, norm_layer=norm).eval()
    resnet.load_state_dict(state, strict=True)
    test = load_images(str(tiny_mnist))[1]
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(resnet(model_split.to_input(test.images, torch.float32)), test.labels)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["test_samples"], summary["test_loss"]) == (9, pytest.approx(loss.item(), rel=1e-5))

    launched = json.loads((run / "run.json").read_text())["launches"][0]
    assert (launched["num_stages"], launched["copies"], len(launched["stages"])) == (2, 1, 2)
    assert sum(stage["parameters"] for stage in launched["stages"]) == sum(p.numel() for p in resnet.parameters())
    assert sum(stage["time_share"] for stage in launched["stages"]) == pytest.approx(1, abs=1e-3)
    assert summary["idle_share_in_theory"] == 0.2
    assert all(0 < share < 1 for share in summary["idle_share"])
    assert len(summary["peak_memory_gib_above_start"]) == 2
    assert (run / "timeline.png").stat().st_size > 5000


@pytest.mark.slow
def test_a_run_of_two_copies_goes_on_bit_by_bit(four_processes):
    _, whole, resumed = four_processes
    launches = json.loads((resumed / "run.json").read_text())["launches"]
    assert [(launch["num_processes"], launch["from_step"]) for launch in launches] == [(4, 0), (4, 2)]
    assert_same_bits(resumed, whole)


def assert_same_bits(run, other):
    assert trace(run) == trace(other)
    assert (run / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_a_signal_saves_in_an_epoch_and_in_its_evaluation(train, tiny_mnist, tmp_path, monkeypatch):
    """Call 2 of the question whether one came is after update 2 of the 3 of an epoch, call 4 in the evaluation."""
    assert train(tmp_path / "whole", *FLAGS) is None
    for call in (2, 4):
        run = tmp_path / f"stopped{call}"
        answers = iter([False] * (call - 1) + [True])
        with monkeypatch.context() as patch:
            patch.setattr(launch.StopSignal, "agreed", lambda _, answers=answers: next(answers))
            assert train(run, *FLAGS, "--checkpoint_every", 100) == launch.EXIT_REQUEUE
        assert train(run, *FLAGS, "--checkpoint_every", 100, "--resume") is None
        assert json.loads((run / "run.json").read_text())["launches"][1]["from_step"] == min(call, 3)
        assert_same_bits(run, tmp_path / "whole")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--num_stages 19", "19 stages are more than the 18 blocks of ResNet-50"),
        ("--num_stages 10 --schedule interleaved", "20 stages are more than the 18 blocks"),
        ("--batch_size 63", "--batch_size 63 does not divide by 1 copies of the pipeline x 4 micro-batches"),
        ("--num_stages 2 --split layer9.0", "--split layer9.0 must be 1 blocks in order, for 2 stages"),
        ("--num_stages 3 --split layer3.0 layer2.0", "must be 2 blocks in order"),
        ("--num_stages 2 --split stem", "must be 1 blocks in order"),
        ("--num_stages 2 --split auto layer3.0", "must be 1 blocks in order"),
        ("--batch_size 8 --num_microbatches 8", "micro-batches of one sample"),
        ("--batch_size 40", "micro-batches of one sample"),  # the last update: 3 images in 4 pieces
        ("--schedule zigzag", "argument --schedule: invalid choice"),
        ("--pretrained nowhere.pth", "--pretrained nowhere.pth cannot be read"),
    ],
)
def test_bad_input_is_one_sentence_before_any_training(train, tmp_path, capsys, flags, sentence):
    code = train(tmp_path / "run", "--max_steps", 2, *flags.split())
    out, error = capsys.readouterr()
    assert code == 2
    assert error.count("\n") == 1
    assert sentence in error
    assert "train epoch" not in out


def test_stages_have_the_names_and_the_numbers_of_torchvision():
    resnet = make_resnet(7).eval()
    fresh = torchvision.models.resnet50(num_classes=7)
    assert list(Stage(resnet, BLOCKS).state_dict()) == list(fresh.state_dict())
    first, last = Stage(resnet, BLOCKS[:9]), Stage(resnet, BLOCKS[9:])
    assert not first.state_dict().keys() & last.state_dict().keys()
    fresh.load_state_dict(first.state_dict() | last.state_dict(), strict=True)
    images = torch.randint(0, 256, (2, 1, 28, 28), dtype=torch.uint8)
    x = model_split.to_input(images, torch.float32)
    assert x.shape == (2, 3, 32, 32)
    mean, std = (torch.tensor(values)[:, None, None] for values in (model_split.MEAN, model_split.STD))
    assert torch.equal(x[:, :, 2:30, 2:30], (images - mean) / std)
    with torch.no_grad():
        assert torch.equal(last(first(images)), fresh.eval()(x))


def test_even_cut_is_the_best_of_all_cuts():
    generator = torch.Generator().manual_seed(0)
    for num_blocks, num_stages in ((1, 1), (5, 5), (7, 3), (9, 4)):
        values = torch.rand(num_blocks, generator=generator).tolist()

        def cost(stage, first, last, values=values):
            return sum(values[first:last]) * (1 + 0.3 * stage)

        def dearest(bounds, cost=cost):
            return max(cost(stage, *pair) for stage, pair in enumerate(itertools.pairwise(bounds)))

        inner = itertools.combinations(range(1, num_blocks), num_stages - 1)
        bounds = even_cut(num_blocks, num_stages, cost)
        assert [bounds[0], bounds[-1], len(bounds)] == [0, num_blocks, num_stages + 1]
        assert dearest(bounds) == min(dearest([0, *cuts, num_blocks]) for cuts in inner)


def test_memory_is_balanced_for_the_micro_batches_that_wait():
    """Four equal blocks without weights: in 1F1B the first of two stages holds two micro-batches, the last one."""
    costs = {name: BlockCost(1.0, 100, 0, 0, None) for name in "abcd"}
    costs["d"] = costs["d"]._replace(time_s=3.0, parameter_bytes=25)
    assert cut_evenly(costs, 2, "time", "1f1b", 4) == [["a", "b", "c"], ["d"]]
    assert cut_evenly(costs, 2, "memory", "1f1b", 4) == [["a"], ["b", "c", "d"]]
    assert cut_evenly(costs, 2, "memory", "gpipe", 4) == [["a", "b"], ["c", "d"]]


def test_measuring_sees_what_autograd_keeps_and_leaves_the_blocks_alone():
    Accelerator(cpu=True)
    resnet = make_resnet(10)
    before = copy.deepcopy(resnet.state_dict())
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    costs = measure_blocks({name: Stage(resnet, [name]) for name in BLOCKS}, images, rounds=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in resnet.state_dict().items())
    assert all(parameter.grad is None for parameter in resnet.parameters())
    assert sum(cost.parameters for cost in costs.values()) == sum(p.numel() for p in resnet.parameters())
    assert all(cost.time_s > 0 for cost in costs.values())
    assert costs["layer2.3"].output.shape == (4, 512, 4, 4)

    kept, weights = {}, {p.untyped_storage().data_ptr() for p in resnet.parameters()}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = Stage(resnet, BLOCKS)(images)
    kept = sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in weights)
    # The image as it goes into the stem is counted with it; the logits are kept for the loss.
    assert sum(cost.activation_bytes for cost in costs.values()) == kept + logits.nbytes


def test_the_order_of_the_work_is_the_schedule_and_idle_time_is_what_is_left():
    order = {}
    for schedule in ("naive", "1f1b", "gpipe"):
        stages = {index: torch.nn.Linear(3, 3) for index in range(2)}
        pipeline = OneProcess(stages, [(index, torch.device("cpu")) for index in range(2)], schedule)
        pipeline.timeline.begin()
        batches = [SimpleNamespace(images=torch.randn(2, 3), labels=torch.zeros(size)) for size in (2, 2, 0, 2)]
        pipeline.run(batches, lambda y, batch: y.sum())
        pipeline.timeline.end()
        (spans,) = pipeline.timeline.updates
        assert all(ended >= began for *_, began, ended in spans)
        order[schedule] = [kind[0] + str(number) for row, _, kind, number, _, _ in spans if row == 0]
    assert order == {
        "naive": ["f0", "b0", "f1", "b1", "f3", "b3"],
        "1f1b": ["f0", "f1", "b0", "f3", "b1", "b3"],
        "gpipe": ["f0", "f1", "f3", "b0", "b1", "b3"],
    }
    spans = [(0, 0, "forward", 0, 1.0, 2.0), (0, 0, "backward", 0, 4.0, 5.0), (1, 1, "forward", 0, 2.0, 4.0)]
    assert idle_shares(spans) == {0: 0.5, 1: 0.5}


def print_differences(*numbers_of_stages: int):
    """On all processes: those of each case, a JSON object a line."""
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    for num_stages, norm, schedule in itertools.product(numbers_of_stages, ("group", "batch"), SCHEDULES):
        found = differences(accelerator, schedule, norm, num_stages)
        accelerator.print(json.dumps({"stages": num_stages, "norm": norm, "schedule": schedule, **found}))
    several.reset_accelerate()


def main():
    """Runs of the script as several.py has them, but narrow; in place of a run's flags also `differences 4 2`."""
    torchvision.models.resnet50 = NARROW
    if sys.argv[2].startswith("differences"):
        print_differences(*map(int, sys.argv.pop(2).split()[1:]))
    several.main()


if __name__ == "__main__":
    main()
