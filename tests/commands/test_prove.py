"""`python -m utils.prove`: a correct program passes, and each planted mistake is named.

All programs run in one launch for each topology: to start processes takes far longer than they do. What they
recorded goes through `prove.prove`, which prints the report and returns the exit code.
"""

import argparse
import copy
import json
import math
import re
import shutil
import sys
import time
from typing import NamedTuple

import pytest
import run_many
import torch
from conftest import ROOT

from utils import prove
from utils.prove import causes, first_difference

PROGRAM = (ROOT / "tests" / "programs" / "planted.py").read_text()
BACKWARD = "accelerator.backward(batch.mean_loss(losses))"
BATCH_NORM = [("self.between = nn.Tanh()", "self.between = nn.BatchNorm1d(16)")]
BATCH_NORM += [("seed=args.seed)", "seed=args.seed, drop_last=True)")]
AVERAGED = [("    for epoch", "    batch_norms = BatchNorms(model, accelerator)\n    for epoch")]
AVERAGED += [("with accelerator.accumulate(model):", "with accelerator.accumulate(model), batch_norms.averaged():")]
TRAIN_FORWARD = "logits = model(points)\n                losses"
AFTER_SCHEDULE = "                scheduler.step()\n"
TWO_GROUPS = [
    (
        "SGD(model.parameters(), args.lr",
        'SGD([{"params": model.body.parameters()}, {"params": model.head.parameters(), "lr": args.lr * factor}]'
        ", args.lr",
    )
]
RANK_2 = "accelerator.process_index == 2"


class Planted(NamedTuple):
    """A mistake; and the variant that shows it, the step, the stage, words of what, the cause."""

    edits: list[tuple[str, str]]
    variant: str
    step: int | None
    stage: str
    what: str
    cause: str


MISTAKES = {
    "an own generator": Planted(
        [
            ("self.length = length", "self.length = length; self.rng = np.random.default_rng(0)"),
            ("np.random.randn(4)", "self.rng.standard_normal(4)"),
        ],
        *("2 processes", 1, "items", "item ", "items"),
    ),
    "the mean of the micro-batch": Planted(
        [(BACKWARD, "accelerator.backward(losses.mean())")], *("3 processes", 4, "gradients", "not a multiple", "tail")
    ),
    "the sum over the samples that are here": Planted(
        [(BACKWARD, "accelerator.backward(losses.sum() / max(len(batch), 1))")],
        *("3 processes", 4, "gradients", "not a multiple", "tail"),
    ),
    "divided by the accumulation steps twice": Planted(
        [(BACKWARD, BACKWARD[:-1] + " / accelerator.gradient_accumulation_steps)")],
        *("1 process, 2 accumulation steps", 1, "gradients", "0.5 times", "factor"),
    ),
    "divided by the processes twice": Planted(
        [(BACKWARD, "accelerator.backward(batch.mean_loss(losses) / accelerator.num_processes)")],
        *("3 processes", 1, "gradients", "0.3333 times", "factor"),
    ),
    "the schedule steps in each micro-batch": Planted(
        [("scheduler.step()", "scheduler.scheduler.step()")],
        *("1 process, 2 accumulation steps", 1, "learning rate", "0.09 on rank 0", "schedule"),
    ),
    "the schedule steps once a process": Planted(
        [
            (
                "                scheduler.step()",
                "                for _ in range(accelerator.num_processes):\n                    scheduler.step()",
            )
        ],
        *("2 processes", 2, "learning rate", "0.081 on rank 0", "schedule"),
    ),
    "the learning rate grows with the processes": Planted(
        [("args.lr, momentum", "args.lr * accelerator.num_processes, momentum")],
        *("2 processes", 1, "learning rate", "0.2 on rank 0", "schedule"),
    ),
    "BatchNorm with the statistics of rank 0": Planted(
        BATCH_NORM, *("2 processes", 1, "weights", "running_", "statistics")
    ),
    "noise drawn in the loop": Planted(
        [
            (
                "logits = model(points)\n                losses",
                "logits = model(points + torch.randn_like(points))\n                losses",
            )
        ],
        *("2 processes", 1, "values", "loss of item", "across_samples"),
    ),
    "a number of Python's in the loop": Planted(
        [
            ("import sys\n", "import random\nimport sys\n"),
            (
                "logits = model(points)\n                losses",
                "logits = model(points + random.random())\n                losses",
            ),
        ],
        *("1 process, 2 accumulation steps", 1, "values", "loss of item", "across_samples"),
    ),
    "a loss that looks across the batch": Planted(
        [
            (
                "logits = model(points)\n                losses",
                "logits = model(points)\n                logits = logits - logits.mean(0)\n                losses",
            )
        ],
        *("2 processes", 1, "values", "loss of item", "across_samples"),
    ),
    "a model that was not prepared": Planted(
        [
            (
                "model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)",
                "optimizer, scheduler = accelerator.prepare(optimizer, scheduler)",
            )
        ],
        *("2 processes", 1, "gradients", "differs between ranks 0 and 1", "not_reduced"),
    ),
    "a forward pass around DDP": Planted(
        [
            (
                "logits = model(points)\n                losses",
                "logits = accelerator.unwrap_model(model)(points)\n                losses",
            )
        ],
        *("3 processes", 1, "gradients", "differs between ranks", "not_reduced"),
    ),
    "one layer that was not prepared": Planted(
        [
            ("    model = Net()", "    model = Net()\n    scale = nn.Linear(3, 3)"),
            ("SGD(model.parameters()", "SGD([*model.parameters(), *scale.parameters()]"),
            ('{"model": model,', '{"model": model, "scale": scale,'),
            ("logits = model(points)\n                losses", "logits = scale(model(points))\n                losses"),
        ],
        *("2 processes", 1, "gradients", "scale.", "not_reduced"),
    ),
    "clipped in each micro-batch": Planted(
        [
            (
                "if accelerator.sync_gradients:\n                    accelerator.clip_grad_norm_(",
                "if True:\n                    torch.nn.utils.clip_grad_norm_(",
            )
        ],
        *("1 process, 2 accumulation steps", 2, "gradients", "", "gradients"),
    ),
    "rank 0 counts twice": Planted(
        [(BACKWARD, "accelerator.backward(batch.mean_loss(losses) * (2 - min(accelerator.process_index, 1)))")],
        *("3 processes", 1, "gradients", "", "gradients"),
    ),
    "a step in each micro-batch": Planted(
        [
            ("optimizer.step()\n", "optimizer.optimizer.step()\n"),
            (
                "                if accelerator.sync_gradients:\n"
                "                    accelerator.clip_grad_norm_(model.parameters(), 0.3)\n",
                "",
            ),
        ],
        *("1 process, 2 accumulation steps", 1, "calls of optimizer.step", "'optimizer': 2", "optimizer_calls"),
    ),
    "weights clamped by what this process saw": Planted(
        [
            (
                "                scheduler.step()\n",
                "                scheduler.step()\n"
                "                for parameter in model.parameters():\n"
                "                    parameter.data.mul_(1 - 0.01 * len(batch))\n",
            )
        ],
        *("2 processes", 1, "weights", "differs by", "weights"),
    ),
    "a test batch counted twice": Planted(
        [
            (
                "        metrics.add(batch, loss=losses)",
                "        metrics.add(batch, loss=losses)\n        metrics.add(batch, loss=losses)",
            )
        ],
        *("2 processes", None, "test samples", "counts 2 times", "test_samples"),
    ),
    "a test of the samples that are here": Planted(
        [
            (
                "    return metrics.reduce()",
                '    metrics.reduce()\n    return {"loss": losses.sum() / max(len(losses), 1)}',
            )
        ],
        *("2 processes", None, "test result", "loss is", "mean_of_means"),
    ),
    "a test in training mode": Planted(
        [
            ("self.between = nn.Tanh()", "self.between = nn.Sequential(nn.Tanh(), nn.Dropout(0.5))"),
            ("    model.eval()\n", ""),
            ("        model.train()\n", "        model.eval()\n"),
            ("run.log_test(eval", "run.log_test(model.train() and eval"),
        ],
        *("2 processes", None, "test values", "loss of item", "test_values"),
    ),
    "a schedule that is not saved": Planted(
        [
            (', "scheduler": scheduler}', "}"),
            ("ExponentialLR(optimizer, 0.9)", "LambdaLR(optimizer, lambda step: 0.9**step)"),
        ],
        *("1 process, resumed in the middle", 4, "learning rate", "0.09 on", "schedule_not_saved"),
    ),
    "a copy of the model is saved": Planted(
        [
            ("import sys\n", "import copy\nimport sys\n"),
            ('state = {"model": model,', 'state = {"model": copy.deepcopy(model),'),
        ],
        *("2 processes", None, "checkpoint", "trained, and not in the models", "checkpoint"),
    ),
    "rank 0 changes the weights at the end": Planted(
        [
            (
                "    run.finish()",
                "    if accelerator.is_main_process:\n"
                "        accelerator.unwrap_model(model).head.bias.data[2] += 1e-6\n"
                "    run.finish()",
            )
        ],
        *("3 processes", None, "checkpoint", "head.bias in model.safetensors", "checkpoint"),
    ),
    "the end is missing": Planted(
        [("    run.finish()\n", "")],
        *("2 processes", None, "checkpoint", "there is no model.safetensors", "checkpoint"),
    ),
    "a counter of one's own that is not saved": Planted(
        [
            ("    for epoch in run.epochs():", "    seen = 0\n    for epoch in run.epochs():"),
            (
                '                losses = F.cross_entropy(logits, labels, reduction="none")\n                acc',
                "                seen += len(batch) / 1000\n"
                "                losses = F.cross_entropy(logits * (1 + seen), labels, "
                'reduction="none")\n                acc',
            ),
        ],
        *("1 process, resumed in the middle", 3, "values", "loss of item", "not_restored"),
    ),
    "a learning rate of the second group on rank 2": Planted(
        [*TWO_GROUPS, ("    model = Net()", f"    model = Net()\n    factor = 1 + ({RANK_2})")],
        *("3 processes", 1, "learning rate", "optimizer, group 1 is 0.2 on rank 2", "schedule"),
    ),
    "a gradient of the second group on rank 2": Planted(
        [
            *TWO_GROUPS,
            ("    model = Net()", "    model = Net()\n    factor = 1"),
            (
                "                optimizer.step()\n",
                f"                if {RANK_2}:\n"
                "                    accelerator.unwrap_model(model).head.bias.grad *= 1.001\n"
                "                optimizer.step()\n",
            ),
        ],
        *("3 processes", 1, "gradients at the step", "head.bias differs between ranks 0 and 2", "not_reduced"),
    ),
    "weights of rank 2": Planted(
        [
            (
                AFTER_SCHEDULE,
                AFTER_SCHEDULE
                + f"                if {RANK_2}:\n"
                + "                    accelerator.unwrap_model(model).head.bias.data += 0.01\n",
            )
        ],
        *("3 processes", 1, "weights", "head.bias differs on rank 2", "weights"),
    ),
    "the optimizer's state scaled by what this process saw": Planted(
        [
            (
                AFTER_SCHEDULE,
                AFTER_SCHEDULE
                + "                for state in optimizer.state.values():\n"
                + '                    state["momentum_buffer"].mul_(1 - 0.001 * len(batch))\n',
            )
        ],
        *("2 processes", 1, "optimizer", "momentum_buffer differs", "optimizer"),
    ),
    "a test result of rank 2": Planted(
        [
            (
                "    return metrics.reduce()",
                "    result = metrics.reduce()\n"
                '    result["loss"] += run.accelerator.process_index // 2\n'
                "    return result",
            )
        ],
        *("3 processes", None, "test result", "on rank 2", "mean_of_means"),
    ),
    "mixup in the loop, with BatchNorm": Planted(
        [
            *BATCH_NORM,
            *AVERAGED,
            (
                TRAIN_FORWARD,
                "points = 0.7 * points + 0.3 * points[torch.randperm(len(points))]\n" + " " * 16 + TRAIN_FORWARD,
            ),
        ],
        *("1 process, 2 accumulation steps", 1, "values", "loss of item", "across_samples"),
    ),
}
AVERAGE = [
    ("    model = Net()", "    model = Net()\n    average = torch.optim.swa_utils.AveragedModel(model)"),
    ('{"model": model,', '{"model": model, "average": average,'),
    (
        AFTER_SCHEDULE,
        AFTER_SCHEDULE
        + "                if accelerator.sync_gradients:\n"
        + "                    average.update_parameters(accelerator.unwrap_model(model))\n",
    ),
    (
        "        run.log_test(evaluate(model, test_loader, run))",
        '        of_average = {"average_loss": evaluate(average, test_loader, run)["loss"]}\n'
        "        run.log_test(evaluate(model, test_loader, run) | of_average)",
    ),
]
CORRECT = {
    "the program itself": [],
    "dropout": [("self.between = nn.Tanh()", "self.between = nn.Sequential(nn.Tanh(), nn.Dropout(0.3))")],
    "BatchNorm, averaged": BATCH_NORM + AVERAGED,
    "ReLU": [("nn.Tanh()", "nn.ReLU()")],
    "a model and its average, both tested": AVERAGE,
}
# Smooth, but so steep that rounding grows a hundredfold in a step.
STEEP = [
    ("self.between(self.body(points))", "self.between(torch.sin(100 * self.body(points)))"),
    ("clip_grad_norm_(model.parameters(), 0.3)", "clip_grad_norm_(model.parameters(), 3)"),
]
GROWING = {
    "growing: the program itself": STEEP,
    "growing: the mean of the micro-batch": [*STEEP, *MISTAKES["the mean of the micro-batch"].edits],
}
PROGRAMS = {**{name: planted.edits for name, planted in MISTAKES.items()}, **CORRECT, **GROWING}
AGAIN = ", again"
ALL = [prove.REFERENCE, prove.ACCUMULATED, prove.ACCUMULATED_3, prove.TWO, prove.THREE, prove.WORKERS, prove.RESUMED]
BY_NAME = {variant.name: variant for variant in ALL}


def edited(edits) -> str:
    text = PROGRAM
    for old, new in edits:
        assert text.count(old) >= 1, old
        text = text.replace(old, new)
    return text


def needed(name) -> list[tuple[prove.Variant, bool]]:
    """The variants that a program's test looks at; True: also with the reference's weights in each step."""
    planted = MISTAKES.get(name.removeprefix("growing: "))
    variants = ALL
    if planted is not None:
        variants = [prove.REFERENCE, prove.ACCUMULATED, BY_NAME[planted.variant]]
        if planted.variant[0] == "3" and "BatchNorm" in name:
            variants.append(prove.ACCUMULATED_3)
    found = [(variant, False) for variant in dict.fromkeys(variants)]
    may_grow = planted is not None and planted.stage in first_difference.NUMBERS and planted.step != 1
    if name in GROWING or may_grow:
        found += [(variant, True) for variant in variants if variant in (prove.ACCUMULATED, prove.TWO, prove.THREE)]
    return found


def folder_name(variant, again) -> str:
    return variant.name + AGAIN * again


class Recorded:
    """In place of `prove.Launches`: what was recorded before. A variant that was not run agrees with the reference, and
    begins each step with other weights in vain."""

    gpus = 0

    def __init__(self, records: dict):
        self.records = records

    def run(self, variant, weights_of=None):
        names = (folder_name(variant, weights_of is not None), variant.name, prove.REFERENCE.name)
        return next(self.records[name] for name in names if name in self.records)


class Verdict(NamedTuple):
    code: int
    lines: dict[str, str]  # by the variant's name
    text: str


@pytest.fixture
def verdict(capsys):
    def verdict(records: dict, **options) -> Verdict:
        args = {"script": "planted.py", "steps": 6, "exact": False, "float64": False, "jobs": 1}
        args["tolerance"] = prove.TOLERANCE
        code = prove.prove(argparse.Namespace(**args | options), Recorded(records))
        text = capsys.readouterr().out
        lines = {}
        for line in text.splitlines():
            if line.startswith("  "):
                lines[line[2:40].strip()] = line[40:]
        return Verdict(code, lines, text)

    return verdict


@pytest.fixture(scope="module")
def recorded(shared_launcher):
    """Run all programs; returns a function from a program's name to its records by variant."""
    top = shared_launcher.folder
    launches = {1: [], 2: [], 3: []}
    folders = {name: top / f"program{number}" for number, name in enumerate(PROGRAMS)}
    for name, edits in PROGRAMS.items():
        folder = folders[name]
        folder.mkdir()
        script = folder / f"{folder.name}.py"
        script.write_text(edited(edits).replace("parents[2]", f"parents[0] / {str(ROOT)!r}"))
        for variant, again in needed(name):
            run = folder / folder_name(variant, again)
            asked = {"folder": str(run), "steps": 6, "batch_size": prove.BATCH_SIZE, "resume": variant.resume}
            asked |= {"accumulation": variant.accumulation, "num_workers": variant.num_workers}
            asked["weights_of"] = str(folder / prove.REFERENCE.name) if again else None
            words = ["--script", script, "--record", json.dumps(asked)]
            if variant.resume:
                words += ["--back_to", folder / prove.REFERENCE.name, 2, run]
            launches[variant.processes].append(words)
    for processes, words in launches.items():
        config, flags = ("cpu", []) if processes == 1 else ("cpu_ddp", ["--num_processes", processes])
        shared_launcher(
            config, *run_many.words("mnist_mlp", *words), script=run_many.FILE, launch_flags=flags, timeout=500
        )

    def read(name):
        names = [folder_name(*each) for each in needed(name)]
        return {each: prove.read_records(folders[name] / each) for each in names}

    return read


def check(verdict: Verdict, planted: Planted) -> None:
    place = f"step {planted.step}" if planted.step else "test"
    place = "at the end, checkpoint" if planted.stage == "checkpoint" else f"in {place}, {planted.stage}"
    line = verdict.lines[planted.variant]
    assert line.startswith(f"DIFFERENT {place}: "), verdict.text
    assert planted.what in line
    assert f"({causes.PAGE}#{planted.cause.replace('_', '-')})" in verdict.text
    assert verdict.code == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_named(recorded, verdict, name):
    check(verdict(recorded(name)), MISTAKES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_program_is_proven(recorded, verdict, name):
    found = verdict(recorded(name))
    assert found.code == 0, found.text
    differ = [variant for variant, line in found.lines.items() if "the same" not in line and "reference" not in line]
    assert differ == ([prove.ACCUMULATED.name] if name in ("dropout", "BatchNorm, averaged") else [])
    assert "bit for bit" in found.lines[prove.RESUMED.name]
    assert "bit for bit" in found.lines[prove.WORKERS.name]


@pytest.mark.slow
def test_rounding_that_grows_is_no_mistake(recorded, verdict):
    found = verdict(recorded("growing: the program itself"))
    assert found.code == 0, found.text
    assert f"({causes.PAGE}#rounding)" in found.text
    for variant in (prove.ACCUMULATED, prove.TWO, prove.THREE):
        assert "in each step from the same weights" in found.lines[variant.name]
    for variant in (prove.WORKERS, prove.RESUMED):
        assert "bit for bit the same" in found.lines[variant.name]


@pytest.mark.slow
def test_a_mistake_is_named_where_rounding_grows(recorded, verdict):
    check(verdict(recorded("growing: the mean of the micro-batch")), MISTAKES["the mean of the micro-batch"])


# Made-up records, to plant a difference in one place alone


def tensor(*entries) -> torch.Tensor:
    """A tensor as it is recorded: its norm first."""
    return torch.tensor([math.hypot(*entries), *entries], dtype=torch.float64)


def made_up(variant: prove.Variant) -> list[dict]:
    """Records of a run of a model with one large and one small gradient, each in a group of its own."""
    parameters = {"large": tensor(4.0, -8.0), "small": tensor(1e-4, 4e-4)}

    def owned(owner, ending=""):
        return {f"{owner}: {name}{ending}": entries.clone() for name, entries in parameters.items()}

    def samples(items, rank):
        mine = items[rank :: variant.processes]
        values = {
            name: torch.tensor([1.0 + item for item in mine], dtype=torch.float64) for name in ("loss", "accuracy")
        }
        inputs = torch.tensor([[4.0, item] for item in mine], dtype=torch.float64).reshape(-1, 2)
        digests = [f"content {item}" for item in mine]
        return [{"indices": torch.tensor(mine), "digests": digests, "values": values, "inputs": inputs}]

    ranks = []
    for rank in range(variant.processes):
        steps = []
        for step in range(3 if variant.resume else 1, 7):
            items = [0, 1] if step == 4 else list(range(12))
            numbers = {"gradients": owned("optimizer"), "at_step": owned("optimizer"), "weights": owned("model")}
            numbers |= {"optimizer": owned("optimizer", "/momentum_buffer"), "optimizer_calls": {"optimizer": 1}}
            numbers |= {"learning_rates": {"optimizer": 0.1, "optimizer, group 1": 0.2}}
            steps.append({"step": step, "step_samples": len(items), "samples": samples(items, rank), **numbers})
        tests = []
        for step in (4, 6):
            passes = [samples(list(range(17)), rank), samples(list(range(17)), rank)]
            tests.append({"step": step, "passes": passes, "result": {"loss": 1.5, "accuracy": 0.5, "error": 1e-5}})
        ranks.append({"steps": steps, "tests": tests, "unsaved": [], "modules": ["Linear"]})
    checkpoint = "checkpoints/step_00000006"
    models = {file: copy.deepcopy(parameters) for file in ("model.safetensors", f"{checkpoint}/model.safetensors")}
    state = {f"{name}/momentum_buffer": entries.clone() for name, entries in parameters.items()}
    ranks[0]["files"] = models | {f"{checkpoint}/optimizer.safetensors": state}
    return ranks


@pytest.fixture
def records():
    return {variant.name: made_up(variant) for variant in ALL}


def add(entries, name, amount):
    """Change a number, or the last entry of a recorded tensor, by so much of it."""
    if isinstance(entries[name], torch.Tensor):
        entries[name] = tensor(*entries[name][1:-1].tolist(), entries[name][-1].item() * (1 + amount))
    else:
        entries[name] *= 1 + amount


def test_made_up_records_without_a_change_are_proven(records, verdict):
    found = verdict(records)
    assert found.code == 0
    assert all("bit for bit the same" in line for line in list(found.lines.values())[1:])


# Where a number is changed, in a record; and the stage that the report names.
PLACES = {
    "a gradient": ("gradients", lambda r: (r["steps"][3]["gradients"], "optimizer: large")),
    "a small gradient": ("gradients", lambda r: (r["steps"][3]["gradients"], "optimizer: small")),
    "a gradient at the step": ("gradients at the step", lambda r: (r["steps"][3]["at_step"], "optimizer: small")),
    "a learning rate": ("learning rate", lambda r: (r["steps"][3]["learning_rates"], "optimizer")),
    "a second learning rate": ("learning rate", lambda r: (r["steps"][3]["learning_rates"], "optimizer, group 1")),
    "a weight": ("weights", lambda r: (r["steps"][3]["weights"], "model: small")),
    "optimizer state": ("optimizer", lambda r: (r["steps"][3]["optimizer"], "optimizer: large/momentum_buffer")),
    "optimizer state 2": ("optimizer", lambda r: (r["steps"][3]["optimizer"], "optimizer: small/momentum_buffer")),
    "a test result": ("test result", lambda r: (r["tests"][1]["result"], "accuracy")),
    "a small test result": ("test result", lambda r: (r["tests"][1]["result"], "error")),
    "a value": ("values", lambda r: (r["steps"][1]["samples"][0]["values"], "loss")),
    "a second value": ("values", lambda r: (r["steps"][1]["samples"][0]["values"], "accuracy")),
    "a test value": ("test values", lambda r: (r["tests"][0]["passes"][1][0]["values"], "loss")),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("variant", "rank"), [(prove.TWO, 1), (prove.THREE, 0), (prove.THREE, 2)])
def test_a_number_that_differs_in_one_place_is_found(records, verdict, place, variant, rank):
    stage, find = PLACES[place]
    entries, name = find(records[variant.name][rank])
    if "value" in place:
        entries[name] = entries[name].clone()
        entries[name][-1] *= 1 + 4e-4
    else:
        add(entries, name, 4e-4)
    found = verdict(records)
    assert found.code == 1, found.text
    assert f", {stage}: " in found.lines[variant.name]
    assert sum("DIFFERENT" in line for line in found.lines.values()) == 1
    if rank and "gradient" in place:
        assert f"differs between ranks 0 and {rank}" in found.lines[variant.name]


@pytest.mark.parametrize("place", ["a gradient", "a small gradient", "a weight", "optimizer state", "a test result"])
@pytest.mark.parametrize("variant", [prove.WORKERS, prove.RESUMED, prove.TWO])
def test_workers_and_a_resume_must_agree_bit_for_bit_and_processes_up_to_rounding(records, verdict, place, variant):
    _, find = PLACES[place]
    record = records[variant.name][0]
    record["steps"] = [{}] * (6 - len(record["steps"])) + record["steps"]
    entries, name = find(record)
    record["steps"] = [step for step in record["steps"] if step]
    add(entries, name, 1e-7)
    found = verdict(records)
    is_exact = variant is not prove.TWO
    assert found.code == is_exact, found.text
    assert ("DIFFERENT" in found.lines[variant.name]) == is_exact
    assert verdict(records, exact=True).code == 1


@pytest.mark.parametrize("place", [place for place in PLACES if "value" not in place and "rate" not in place])
def test_bit_for_bit_is_meant_on_every_rank(records, verdict, place):
    entries, name = PLACES[place][1](records[prove.THREE.name][2])
    add(entries, name, 1e-7)
    assert verdict(records, exact=True).code == 1


def test_the_tolerance_is_that_of_the_arguments(records, verdict):
    entries, name = PLACES["a gradient"][1](records[prove.THREE.name][1])
    add(entries, name, 2e-7)
    assert verdict(records).code == 0
    assert verdict(records, tolerance=prove.TOLERANCE_FLOAT64).code == 1


def remove(entries, name):
    del entries[name]


def again(entries, name):
    entries[name] = torch.cat([entries[name], entries[name][-1:]])


STRUCTURE = {
    "a sample of another step": ("samples", lambda r: r["steps"][1]["samples"][0]["indices"].fill_(0)),
    "another content": ("items", lambda r: r["steps"][1]["samples"][0]["digests"].__setitem__(0, "x")),
    "a metric less": ("values", lambda r: [remove(part["values"], "loss") for part in r["steps"][2]["samples"]]),
    "a second call": ("calls of optimizer.step", lambda r: r["steps"][2]["optimizer_calls"].update(optimizer=2)),
    "no gradient": ("gradients", lambda r: remove(r["steps"][2]["gradients"], "optimizer: small")),
    "NaN": ("gradients", lambda r: r["steps"][2]["gradients"]["optimizer: small"].fill_(math.nan)),
    "no weight": ("weights", lambda r: remove(r["steps"][2]["weights"], "model: small")),
    "no state": ("optimizer", lambda r: remove(r["steps"][2]["optimizer"], "optimizer: large/momentum_buffer")),
    "a value is NaN": ("values", lambda r: r["steps"][1]["samples"][0]["values"]["loss"].fill_(math.nan)),
    "a step less": ("steps", lambda r: r["steps"].pop()),
    "a test less": ("tests", lambda r: r["tests"].pop()),
    "a test item twice": ("test samples", lambda r: r["tests"][0]["passes"][0][0]["indices"].fill_(0)),
    "another test content": ("test items", lambda r: r["tests"][0]["passes"][1][0]["digests"].__setitem__(0, "x")),
    "a result less": ("test result", lambda r: remove(r["tests"][1]["result"], "accuracy")),
}


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("change", STRUCTURE)
def test_what_is_missing_twice_or_of_another_content_is_found(records, verdict, change, rank):
    stage, apply = STRUCTURE[change]
    if change == "a metric less":
        for record in records[prove.THREE.name]:
            apply(record)
    else:
        apply(records[prove.THREE.name][rank])
    found = verdict(records)
    assert found.code == 1, found.text
    assert f", {stage}: " in found.lines[prove.THREE.name], found.text


@pytest.mark.parametrize(
    ("variant", "wanted"), [(prove.TWO, "5 steps were made instead of 6"), (prove.RESUMED, "3 steps")]
)
def test_a_run_that_ends_a_step_earlier_on_all_ranks_is_found(records, verdict, variant, wanted):
    ranks = records[variant.name]
    for record in ranks:
        record["steps"].pop()
        record["tests"].pop()
    ranks[0]["files"] = {file.replace("6", "5"): held for file, held in ranks[0]["files"].items()}
    assert f", steps: {wanted}" in verdict(records).lines[variant.name]


def test_a_resume_that_begins_too_late_is_found(records, verdict):
    records[prove.RESUMED.name][0]["steps"].pop(0)
    assert ", steps: 3 steps were made instead of 4" in verdict(records).lines[prove.RESUMED.name]


def test_gradients_that_are_nan_on_every_rank_are_found(records, verdict):
    for record in records[prove.THREE.name]:
        record["steps"][2]["gradients"]["optimizer: small"].fill_(math.nan)
    found = verdict(records)
    assert "DIFFERENT in step 3, gradients: optimizer: small is NaN" in found.lines[prove.THREE.name]


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("change", ["a second call", "another content", "a weight"])
def test_only_numbers_after_the_first_step_may_be_rounding_that_grows(records, verdict, step, change):
    """Which is gone where each step begins with the weights of the reference."""
    records[folder_name(prove.TWO, True)] = made_up(prove.TWO)
    record = records[prove.TWO.name][0]["steps"][step]
    if change == "a second call":
        record["optimizer_calls"]["optimizer"] = 2
    elif change == "another content":
        record["samples"][0]["digests"][0] = "x"
    else:
        add(record["weights"], "model: large", 4e-4)
    is_rounding = change == "a weight" and step > 0
    found = verdict(records)
    assert found.code == (not is_rounding), found.text
    assert ("in each step from the same weights" in found.lines[prove.TWO.name]) == is_rounding


def test_a_test_that_counts_each_sample_twice_everywhere_is_found(records, verdict):
    for ranks in records.values():
        for record in ranks:
            record["tests"][0]["passes"][0] *= 2
    found = verdict(records)
    assert found.code == 1
    assert "DIFFERENT in test, test samples: test item 0 counts 2 times" in found.lines[prove.TWO.name]


@pytest.mark.parametrize("variant", [prove.REFERENCE, prove.WORKERS])
@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["unsaved"].append("head"),
        lambda r: remove(r["files"], "model.safetensors"),
        lambda r: remove(r["files"]["model.safetensors"], "small"),
        lambda r: add(r["files"]["model.safetensors"], "small", 1e-12),
        lambda r: add(r["files"]["checkpoints/step_00000006/model.safetensors"], "large", 1e-12),
        lambda r: add(r["files"]["checkpoints/step_00000006/optimizer.safetensors"], "small/momentum_buffer", 1e-12),
    ],
)
def test_files_hold_what_the_last_step_left_bit_for_bit(records, verdict, variant, change):
    change(records[variant.name][0])
    found = verdict(records)
    assert found.code == 1
    assert "DIFFERENT at the end, checkpoint: " in found.lines[variant.name]


def test_a_gradient_that_is_zero_up_to_rounding_may_differ_and_not_bit_for_bit(records, verdict):
    for name, variant in BY_NAME.items():
        for record in records[name]:
            for step in record["steps"]:
                for kind in ("gradients", "at_step"):
                    step[kind]["optimizer: small"] = tensor(1e-6 * (1 + (variant.processes == 2)), 1e-6)
    assert verdict(records).code == 0
    assert "DIFFERENT" in verdict(records, exact=True).lines[prove.TWO.name]


def test_batch_norm_explains_other_values_and_neither_mixup_nor_what_differs_in_the_same_parts(records, verdict):
    for ranks in records.values():
        for record in ranks:
            record["modules"] = ["BatchNorm1d"]
    across = [prove.ACCUMULATED, prove.ACCUMULATED_3, prove.TWO, prove.THREE]
    for variant in across:
        for record in records[variant.name]:
            record["steps"][0]["samples"][0]["values"]["loss"] *= 2
    found = verdict(records)
    assert found.code == 0, found.text
    assert "differs, and must" in found.lines[prove.ACCUMULATED.name]
    assert "as 1 process, 3 accumulation steps" in found.lines[prove.THREE.name]
    other_parts = copy.deepcopy(records)
    other_parts[prove.TWO.name][1]["steps"][0]["samples"][0]["values"]["loss"] *= 2
    found = verdict(other_parts)
    assert "DIFFERENT in step 1, values" in found.lines[prove.TWO.name]
    assert found.text.count("across-samples") == 1
    for variant in across:  # the model was given something else
        records[variant.name][0]["steps"][0]["samples"][0]["inputs"][:, 1] += 1
    found = verdict(records)
    assert "DIFFERENT in step 1, values" in found.lines[prove.ACCUMULATED.name]
    assert "batch-norm" not in found.text


def test_a_script_that_fails_is_said_with_its_error(records, verdict):
    records[prove.TWO.name] = "ValueError: no samples"
    found = verdict(records)
    assert found.code == 1
    assert found.lines[prove.TWO.name] == "FAILS: ValueError: no samples"
    assert f"{causes.PAGE}#fails" in found.text
    records[prove.REFERENCE.name] = "ValueError: no data"
    with pytest.raises(SystemExit) as stopped:
        verdict(records)
    assert stopped.value.code == 2


# The command


def test_every_cause_has_its_section():
    page = (ROOT / causes.PAGE).read_text()
    sections = [line[3:] for line in page.splitlines() if line.startswith("## ")]
    assert sorted(sections) == sorted(kind.replace("_", "-") for kind in causes.SENTENCES)
    for kind in causes.SENTENCES:
        assert causes.cause(kind).endswith(f"#{kind.replace('_', '-')})")


@pytest.mark.slow
def test_in_another_folder_the_command_says_what_differs_and_ends_with_1(launcher, tmp_path):
    text = edited(MISTAKES["divided by the processes twice"].edits)
    (tmp_path / "mine.py").write_text(text.replace("parents[2]", "parents[0]"))
    for name in ("utils", "accelerate_configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    done = launcher.python("-m", "utils.prove", "mine.py", cwd=tmp_path, check=False, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "DIFFERENT in step 1, gradients: optimizer: body.weight and 3 others: 0.5 times" in done.stdout
    assert done.stdout.count("likely cause: ") == 1
    page, section = re.search(r"\((\S+)#(\S+)\)", done.stdout).groups()
    assert f"## {section}\n" in (tmp_path / page).read_text()


def test_without_the_configs_the_command_says_so(tmp_path, monkeypatch, capsys):
    script = tmp_path / "scripts" / "mine.py"
    monkeypatch.setattr(prove, "__file__", str(tmp_path / "house" / "utils" / "prove" / "__init__.py"))
    with pytest.raises(SystemExit) as stopped:
        prove.find_configs(script)
    assert stopped.value.code == 2
    assert "accelerate_configs" in capsys.readouterr().err
    shutil.copytree(ROOT / "accelerate_configs", tmp_path / "accelerate_configs")
    assert prove.find_configs(script) == tmp_path / "accelerate_configs"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere.py"], "there is no script nowhere.py"),
        (["--steps", "3", __file__], "--steps 3 does not reach over the end of an epoch"),
        (["--keep", str(ROOT), __file__], "is not an empty folder"),
        (["--keep", __file__, __file__], "is not an empty folder"),
        (["--tolerance", "nan", __file__], "--tolerance"),
        ([prove.__file__.replace("__init__", "causes"), "--lr", "1", "--float64"], "--float64 is a flag of prove"),
        ([prove.__file__.replace("__init__", "causes"), "--steps=7"], "--steps is a flag of prove"),
    ],
)
def test_bad_input_is_an_error_at_once(monkeypatch, capsys, words, sentence):
    monkeypatch.setattr(sys, "argv", ["prove", *words])
    with pytest.raises(SystemExit) as stopped:
        prove.parse_args()
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


def test_flags_of_the_script_are_passed_on(monkeypatch):
    # This file has --float64 too, as a script may.
    monkeypatch.setattr(sys, "argv", ["prove", "--steps", "7", __file__, "--lr", "0.1", "--x", "--float64"])
    args = prove.parse_args()
    assert (args.steps, args.float64, args.flags) == (7, False, ["--lr", "0.1", "--x", "--float64"])
    assert args.tolerance == 1e-4


def test_a_script_that_does_not_end_is_ended_with_its_children(tmp_path, monkeypatch):
    import psutil

    # In place of Python: a launcher with a child.
    launcher = tmp_path / "launcher"
    launcher.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/child\nsleep 600\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(prove.sys, "executable", str(launcher))
    monkeypatch.setattr(prove, "TIMEOUT_S", 1)
    args = argparse.Namespace(cpu=True, steps=6, float64=False, precision="no", script="mine.py", flags=[])
    launches = prove.Launches(args, tmp_path, ROOT / "accelerate_configs")
    assert launches.run(prove.REFERENCE) == "it did not end in 1 s"
    child = int((tmp_path / "child").read_text())

    def has_ended():
        return not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE

    ends = time.monotonic() + 20  # the system may take a moment to end it
    while not has_ended() and time.monotonic() < ends:
        time.sleep(0.05)
    assert has_ended()


@pytest.mark.slow
def test_virtual_processes_are_proven_bit_for_bit(launcher):
    script = ROOT / "tests" / "programs" / "planted.py"
    words = ["-m", "utils.prove", script, "--virtual_processes", 6]
    done = launcher.python(*words, cwd=ROOT, timeout=300)
    lines = [line for line in done.stdout.splitlines() if "bit for bit the same" in line]
    assert [line.split(" ")[2] for line in lines] == ["2", "3", "1", "1"]
    assert "accumulation" not in done.stdout
