"""`python -m utils.prove`: a correct program passes, and each planted mistake is named.

All programs run in one launch for each topology: to start processes takes far longer than they do.
"""

import argparse
import json
import re
import sys
from typing import NamedTuple

import pytest
import run_many
from conftest import ROOT

from utils import prove

PROGRAM = (ROOT / "tests" / "programs" / "planted.py").read_text()
BACKWARD = "accelerator.backward(batch.mean_loss(losses))"
BATCH_NORM = [("self.between = nn.Tanh()", "self.between = nn.BatchNorm1d(16)")]
BATCH_NORM += [("seed=args.seed)", "seed=args.seed, drop_last=True)")]
AVERAGED = [("    for epoch", "    batch_norms = BatchNorms(model, accelerator)\n    for epoch")]
AVERAGED += [("with accelerator.accumulate(model):", "with accelerator.accumulate(model), batch_norms.averaged():")]


class Planted(NamedTuple):
    """A mistake; and the variant that shows it, the update, the stage, words of what, the cause."""

    edits: list[tuple[str, str]]
    variant: str
    update: int | None
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
        [(BACKWARD, "accelerator.backward(losses.mean())")], *("3 processes", 4, "gradients", "0.6667 times", "tail")
    ),
    "the sum over the samples that are here": Planted(
        [(BACKWARD, "accelerator.backward(losses.sum() / max(len(batch), 1))")],
        *("3 processes", 4, "gradients", "0.6667 times", "tail"),
    ),
    "divided by the accumulation steps twice": Planted(
        [(BACKWARD, BACKWARD[:-1] + " / accelerator.gradient_accumulation_steps)")],
        *("1 process, 2 accumulation steps", 1, "gradients", "0.5 times", "factor"),
    ),
    "divided by the processes twice": Planted(
        [(BACKWARD, "accelerator.backward(losses.sum() / batch.step_samples)")],
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
        *("1 process, 2 accumulation steps", 1, "optimizer steps", "'optimizer': 2", "steps"),
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
                "                seen += batch.step_samples / 1000\n"
                "                losses = F.cross_entropy(logits * (1 + seen), labels, "
                'reduction="none")\n                acc',
            ),
        ],
        *("1 process, resumed in the middle", 3, "values", "loss of item", "not_restored"),
    ),
}
CORRECT = {
    "the program itself": [],
    "dropout": [("self.between = nn.Tanh()", "self.between = nn.Sequential(nn.Tanh(), nn.Dropout(0.3))")],
    "BatchNorm, averaged": BATCH_NORM + AVERAGED,
    "ReLU": [("nn.Tanh()", "nn.ReLU()")],
}
# Smooth, but so steep that rounding grows a hundredfold in an update.
STEEP = [
    ("self.between(self.body(points))", "self.between(torch.sin(100 * self.body(points)))"),
    ("clip_grad_norm_(model.parameters(), 0.3)", "clip_grad_norm_(model.parameters(), 3)"),
]
GROWING = {
    "the program itself": STEEP,
    "the mean of the micro-batch": [*STEEP, *MISTAKES["the mean of the micro-batch"].edits],
}
VARIANTS = {
    "1 process": {},
    "1 process, 2 accumulation steps": {"accumulation": 2},
    "1 process, 3 accumulation steps": {"accumulation": 3},
    "1 process, another number of workers": {"num_workers": 1},
    "1 process, resumed in the middle": {"resume": True},
    "2 processes": {},
    "3 processes": {},
    "1 process, 2 accumulation steps, again": {"accumulation": 2, "weights_of": "0"},
    "2 processes, again": {"weights_of": "0"},
    "3 processes, again": {"weights_of": "0"},
}


def edited(edits) -> str:
    text = PROGRAM
    for old, new in edits:
        assert text.count(old) >= 1, old
        text = text.replace(old, new)
    return text


def needed(name) -> set[str]:
    """The variants of a program that its test looks at."""
    planted = MISTAKES.get(name)
    found = set(VARIANTS)
    if planted is not None:
        found = {"1 process", "1 process, 2 accumulation steps", planted.variant}
        found |= {f"1 process, {planted.variant[0]} accumulation steps", f"{planted.variant}, again"}
    if not may_grow(name):
        found = {variant for variant in found if not variant.endswith("again")}
    return found & VARIANTS.keys()


def may_grow(name) -> bool:
    """Whether the difference may be taken for rounding that has grown."""
    planted = MISTAKES.get(name)
    if planted is None:
        return name.startswith("growing")
    return planted.stage in prove.NUMBERS and planted.update != 1


@pytest.fixture(scope="module")
def records(shared_launcher):
    """The records of each program on the variants its test needs, by name, as of `prove`."""
    top = shared_launcher.folder
    launches = {1: [], 2: [], 3: []}
    programs = {**{name: each.edits for name, each in MISTAKES.items()}, **CORRECT}
    programs |= {f"growing: {name}": edits for name, edits in GROWING.items()}
    folders = {name: top / f"program{number}" for number, name in enumerate(programs)}
    for name, edits in programs.items():
        folder = folders[name]
        folder.mkdir()
        script = folder / f"{folder.name}.py"
        script.write_text(edited(edits).replace("parents[2]", f"parents[0] / {str(ROOT)!r}"))
        for number, (variant, settings) in enumerate(VARIANTS.items()):
            if variant not in needed(name):
                continue
            asked = {"updates": 6, "batch_size": prove.BATCH_SIZE, "accumulation": 1}
            asked |= {"num_workers": None, "resume": False, "folder": str(folder / str(number))}
            asked |= settings
            if "weights_of" in settings:
                asked["weights_of"] = str(folder / settings["weights_of"])
            words = ["--script", script, "--record", json.dumps(asked)]
            if settings.get("resume"):
                words += ["--back_to", folder / "0", 2, folder / str(number)]
            launches[int(variant[0]) if "processes" in variant else 1].append(words)
    for processes, words in launches.items():
        config, flags = ("cpu", []) if processes == 1 else ("cpu_ddp", ["--num_processes", processes])
        shared_launcher(
            config, *run_many.words("mnist_mlp", *words), script=run_many.FILE, launch_flags=flags, timeout=500
        )

    def read(name):
        return {
            variant: prove.read(folders[name] / str(number))
            for number, variant in enumerate(VARIANTS)
            if variant in needed(name)
        }

    return read


def findings(found: dict, tolerance=1e-4) -> dict:
    """By variant, what `report` says of it."""
    across = prove.first_difference(found["1 process"], found["1 process, 2 accumulation steps"], tolerance)
    result = {}
    for name, settings in VARIANTS.items():
        if name == "1 process" or "3 accumulation" in name or "again" in name or name not in found:
            continue
        variant = prove.Variant(name, resume=settings.get("resume", False))
        reference, limit = found["1 process"], tolerance
        if across is not None and across.expected and "processes" in name:
            reference = found[f"1 process, {name[0]} accumulation steps"]
        if settings.get("resume") or settings.get("num_workers"):
            limit = 0.0
        difference = prove.first_difference(reference, found[name], limit, variant)
        again = found.get(f"{name}, again")
        if again and prove.may_be_rounding(difference, limit):
            difference = prove.without_rounding(difference, reference, again, limit, variant)
        result[name] = difference
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_named(records, name):
    planted = MISTAKES[name]
    finding = findings(records(name))[planted.variant]
    assert finding is not None
    assert (finding.update, finding.stage) == (planted.update, planted.stage), finding
    assert planted.what in finding.what
    assert finding.cause.endswith(f"({prove.CAUSES}#{planted.cause.replace('_', '-')})")
    assert not finding.expected


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_program_is_proven(records, name):
    for variant, finding in findings(records(name)).items():
        if finding is not None:
            assert variant == "1 process, 2 accumulation steps"
            assert finding.expected


@pytest.mark.slow
def test_rounding_that_grows_is_no_mistake(records):
    found = records("growing: the program itself")
    for name in ("1 process, 2 accumulation steps", "2 processes", "3 processes"):
        difference = prove.first_difference(found["1 process"], found[name], 1e-4)
        assert difference is not None  # else nothing has grown
        assert difference.update != 1
    for variant, finding in findings(found).items():
        if "another" in variant or "resumed" in variant:
            assert finding is None
        else:
            assert finding.stage == "rounding", finding
            assert finding.expected
            assert finding.cause.endswith(f"({prove.CAUSES}#rounding)")


@pytest.mark.slow
def test_a_mistake_is_named_where_rounding_grows(records):
    planted = MISTAKES["the mean of the micro-batch"]
    finding = findings(records("growing: the mean of the micro-batch"))[planted.variant]
    assert (finding.update, finding.stage) == (planted.update, planted.stage), finding
    assert planted.what in finding.what


def test_every_cause_has_its_section():
    page = (ROOT / prove.CAUSES).read_text()
    sections = {line[3:] for line in page.splitlines() if line.startswith("## ")}
    used = set()
    for kind in prove.KINDS:
        used.add(prove.cause(kind).rpartition("#")[2].rstrip(")"))
    assert used == sections


@pytest.mark.slow
def test_in_a_taken_folder_the_command_says_what_differs_and_ends_with_1(launcher, tmp_path):
    script = tmp_path / "mine.py"
    text = edited(MISTAKES["divided by the processes twice"].edits)
    script.write_text(text.replace("str(Path(__file__).resolve().parents[2])", repr(str(ROOT))))
    folder = tmp_path / "taken"
    launcher.python("-m", "utils.take", script, "prove", folder, cwd=ROOT)
    words = ["-m", "train_utils.prove", "mine.py"]
    done = launcher.python(*words, cwd=folder, check=False, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 processes" in done.stdout
    assert "DIFFERENT in update 1, gradients: optimizer: body.weight and 3 others: 0.5 times" in done.stdout
    assert done.stdout.count("likely cause: ") == 1
    page, section = re.search(r"\((\S+)#(\S+)\)", done.stdout).groups()
    assert f"## {section}\n" in (folder / page).read_text()
    assert "`python -m train_utils.prove`" in (folder / page).read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nowhere.py"], "there is no script nowhere.py"),
        (["--updates", "3", __file__], "--updates 3 does not reach over the end of an epoch"),
        (["--keep", str(ROOT), __file__], "is not empty: name a new folder"),
    ],
)
def test_bad_input_is_one_sentence(monkeypatch, capsys, words, sentence):
    monkeypatch.setattr(sys, "argv", ["prove", *words])
    with pytest.raises(SystemExit) as stopped:
        prove.parse_args()
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


def test_flags_of_the_script_are_passed_on(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prove", "--updates", "7", __file__, "--lr", "0.1", "--x"])
    args = prove.parse_args()
    assert isinstance(args, argparse.Namespace)
    assert (args.updates, args.flags) == (7, ["--lr", "0.1", "--x"])


@pytest.mark.slow
def test_virtual_processes_are_proven_bit_for_bit(launcher):
    script = ROOT / "tests" / "programs" / "planted.py"
    words = ["-m", "utils.prove", script, "--virtual_processes", 6]
    done = launcher.python(*words, cwd=ROOT, timeout=300)
    lines = [line for line in done.stdout.splitlines() if "bit for bit the same" in line]
    assert [line.split(" ")[2] for line in lines] == ["2", "3", "1", "1"]
    assert "accumulation" not in done.stdout
