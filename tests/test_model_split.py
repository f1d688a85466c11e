"""The model that is cut is the model that is not: gradients, statistics and whole runs, for each schedule and layout.

This file is also the script that its tests launch on several processes.
"""

import contextlib
import copy
import functools
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchvision
from accelerate import Accelerator
from accelerate.utils import gather_object

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts import model_split  # noqa: E402
from scripts.model_split import BLOCKS, Stage, make_pipeline, make_resnet, record_losses  # noqa: E402
from utils.data import GlobalBatches, Images  # noqa: E402
from utils.metrics import SampleStats  # noqa: E402
from utils.pipeline import sum_over_copies  # noqa: E402

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved")
NUM_SAMPLES, PIECES = 19, 4  # micro-batches of 5, 5, 5, 4 samples, or over two copies of 3, 3, 2, 2 and 3, 2, 2, 2


@contextlib.contextmanager
def narrow_and_single_threaded():
    """ResNet-50 with half the channels inside its blocks, to save time; threads beside other tests lose it."""
    threads, resnet50 = torch.get_num_threads(), torchvision.models.resnet50
    torch.set_num_threads(1)
    torchvision.models.resnet50 = functools.partial(resnet50, width_per_group=32)
    yield
    torch.set_num_threads(threads)
    torchvision.models.resnet50 = resnet50


def reference(norm, copies, data, accelerator):
    """Gradients and buffers of the whole model by plain autograd, and each sample's loss in evaluation, in float64.

    With GroupNorm of all samples at once; with BatchNorm of the micro-batches one after another, and the statistics'
    mean over the copies that saw them.
    """
    torch.manual_seed(0)
    start = make_resnet(4, norm).double()
    gradients, buffers = {}, {}
    for index in range(copies):
        whole = copy.deepcopy(start)
        share = SimpleNamespace(device=accelerator.device, num_processes=copies, process_index=index)
        batches = list(GlobalBatches(data, 20, share, 0, PIECES).epoch())
        if norm == "group":
            batches = batches[:0] if index else list(GlobalBatches(data, 20, accelerator_of_one(), 0).epoch())
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


def random_images() -> Images:
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(0, 256, (NUM_SAMPLES, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return Images(images, torch.arange(NUM_SAMPLES) % 4, ["a", "b", "c", "d"])


def differences(accelerator, schedule, norm, num_stages, made={}) -> dict[str, float]:  # noqa: B006  references, once
    """Largest difference of a gradient and of a buffer to the unsplit model's, relative to the tensor's largest."""
    data, copies = random_images(), max(1, accelerator.num_processes // num_stages)
    if (norm, copies) not in made:
        made[norm, copies] = reference(norm, copies, data, accelerator)
    gradients, buffers = made[norm, copies]

    torch.manual_seed(0)
    resnet = make_resnet(4, norm).double()
    num_virtual = num_stages * (2 if schedule == "interleaved" else 1)
    bounds = [round(i * len(BLOCKS) / num_virtual) for i in range(num_virtual + 1)]
    blocks = [BLOCKS[first:last] for first, last in itertools.pairwise(bounds)]
    # What the script learns by measuring: the shape of what goes in and of what each stage hands on.
    x, ends = torch.zeros(1, 1, 28, 28, dtype=torch.uint8), []
    for names in blocks:
        ends.append(x.to("meta"))
        with torch.no_grad():
            x = Stage(copy.deepcopy(resnet), names).eval()(x)
    ends.append(x.to("meta"))
    model, pipeline, group = make_pipeline(
        resnet, blocks, ends, schedule, num_stages, accelerator, [accelerator.device]
    )
    share = SimpleNamespace(
        device=accelerator.device, num_processes=copies, process_index=accelerator.process_index // num_stages
    )
    stats = SampleStats(accelerator)
    model.train()
    window = list(GlobalBatches(data, 20, share, 0, PIECES).epoch())
    pipeline.run(window, record_losses(stats, accelerator))
    if group is not None:
        sum_over_copies(model, group)
    assert stats.reduce()["samples"] == NUM_SAMPLES

    def largest(tensors, expected):
        found = [(tensor - expected[n]).abs().max() / expected[n].abs().max().clamp(min=1e-30) for n, tensor in tensors]
        return max(map(float, found), default=0.0)

    mine = [
        largest(((name, parameter.grad) for name, parameter in model.named_parameters()), gradients),
        largest(((n, buffer) for n, buffer in model.named_buffers() if "tracked" not in n), buffers),
        set(model.state_dict()),
    ]
    everyone = gather_object([mine])
    assert set().union(*(names for *_, names in everyone)) == set(make_resnet(4, norm).state_dict())
    # Evaluation, with its own schedules: each sample once, and nothing learnt from it.
    before = copy.deepcopy(model.state_dict())
    result = model_split.evaluate(
        model, pipeline, GlobalBatches(data, 20, share, accumulation=PIECES), accelerator, SimpleNamespace(agreed=bool)
    )
    assert result["samples"] == NUM_SAMPLES
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
    with narrow_and_single_threaded():
        losses = {differences_checked(Accelerator(cpu=True), schedule, norm, 3) for schedule in SCHEDULES}
    assert len(losses) == 1


def differences_checked(*words):
    found = differences(*words)
    check(found)
    return found["test_loss"]


def on_processes(launcher, processes: int, *num_stages: int) -> list[dict]:
    """Runs `main` of this file on several processes; returns what `differences` found for each case."""
    words = map(str, [*num_stages])
    flags = ["--num_processes", processes]
    done = launcher("cpu_ddp", *words, script=Path(__file__).with_suffix(""), launch_flags=flags, timeout=240)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_two_processes_cut_without_changing_a_number(launcher):
    found = on_processes(launcher, 2, 2)
    assert len(found) == 8
    for case in found:
        check(case)


@pytest.mark.slow
def test_four_stages_and_two_copies_of_two_change_no_number(launcher):
    found = on_processes(launcher, 4, 4, 2)
    assert len(found) == 16
    for case in found:
        check(case)


def main():
    accelerator = Accelerator(cpu=True)
    with narrow_and_single_threaded():
        for num_stages, norm, schedule in itertools.product(map(int, sys.argv[1:]), ("group", "batch"), SCHEDULES):
            found = differences(accelerator, schedule, norm, num_stages)
            accelerator.print(json.dumps({"stages": num_stages, "norm": norm, "schedule": schedule, **found}))
    accelerator.end_training()


if __name__ == "__main__":
    main()
