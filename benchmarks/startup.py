"""From the command to the trained model.

    python benchmarks/startup.py

- script: `accelerate launch --config_file accelerate_configs/cpu.yaml scripts/mnist_mlp.py`, its default run of 4
  epochs with tests, checkpoints and curves; started through this file, which notes the time at the end of each phase
- plain script: `python`, and a plain PyTorch loop with the same model, recipe and epochs over torchvision's MNIST as
  tensors, a test at the end, and nothing else

Processor time is the time of all processes, and changes less than the others with the load of the machine. Most of an
import is torch, and torch._dynamo, which the first optimizer imports; the script's "end" is the end of two Python
processes, its own and the launcher's.
"""

import time

STARTED = time.monotonic()  # one clock for all processes of a machine, on Linux and macOS

import json  # noqa: E402
import math  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common  # noqa: E402

PHASES = (
    "script starts",
    "imports",
    "Accelerator",
    "data",
    "model, optimizer",
    "first step",
    "training, tests",
    "model, summary, curves",
    "end",
)


def parse_args():
    parser = common.make_parser(__doc__, rounds=3, dataset=True, worker=True)
    add = parser.add_argument
    add("--num_epochs", type=common.positive_int, default=4, help="of each run (%(default)s)")
    add("--plain", help="what it launches: the folder of MNIST, for the plain script")
    return parser.parse_args()


class Stamps(dict):
    """The time at which each phase ended."""

    def now(self, phase: str) -> None:
        self.setdefault(phase, time.monotonic())

    def after(self, owner, name: str, phase: str, before: str | None = None) -> None:
        """Note the time when the function `owner.name` returns; before: also when it is called."""
        function = getattr(owner, name)

        def timed(*args, **kwargs):
            if before is not None:
                self.now(before)
            result = function(*args, **kwargs)
            self.now(phase)
            return result

        setattr(owner, name, timed)

    def first_step(self) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def done(*_):
            self.now("first step")
            hook.remove()

        hook = register_optimizer_step_post_hook(done)


def script(args) -> tuple[Stamps, float]:
    """scripts/mnist_mlp.py, with the time noted in between: the times and the test accuracy."""
    stamps = Stamps({PHASES[0]: STARTED})
    from scripts import mnist_mlp

    stamps.now("imports")
    stamps.after(mnist_mlp.launch, "make_accelerator", "Accelerator")
    stamps.after(mnist_mlp, "load_images", "data")
    from accelerate import Accelerator

    stamps.after(Accelerator, "prepare", "model, optimizer")
    stamps.first_step()
    stamps.after(mnist_mlp.Run, "finish", "model, summary, curves", before="training, tests")
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = [mnist_mlp.__file__, "--output_dir", folder]
        sys.argv += ["--dataset", args.dataset, "--num_epochs", str(args.num_epochs)]
        mnist_mlp.main()
        return stamps, json.loads((Path(folder) / "summary.json").read_text())["test_accuracy"]


def plain(args) -> tuple[Stamps, float]:
    """The same of the plain script."""
    stamps = Stamps({PHASES[0]: STARTED})
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torchvision import datasets

    stamps.now("imports")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, test = (datasets.MNIST(args.plain, train=train) for train in (True, False))
    images, test_images = ((data.data.float() - 33.3184) / 78.5675 for data in (train, test))
    stamps.now("data")
    batch_size = 256
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 192), nn.SiLU(), nn.Linear(192, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 6e-3, weight_decay=0.1)
    total_steps = args.num_epochs * math.ceil(len(images) / batch_size)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps, cycle_momentum=False)
    stamps.now("model, optimizer")
    stamps.first_step()
    for _ in range(args.num_epochs):
        for indices in torch.randperm(len(images)).split(batch_size):
            loss = F.cross_entropy(model(images[indices]), train.targets[indices])
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    with torch.no_grad():
        accuracy = float((model(test_images).argmax(1) == test.targets).float().mean())
    stamps.now("training, tests")
    return stamps, accuracy


def measure(args) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        common.write_idx(Path(folder), args.dataset)
        out = Path(folder) / "out.json"
        flags = ["--worker", str(out), "--dataset", args.dataset, "--num_epochs", str(args.num_epochs)]

        def timed(run) -> dict:
            began, used_s = time.monotonic(), common.processor_time_s()
            run()
            ended = time.monotonic()
            stamps, accuracy = json.loads(out.read_text())
            ends = {**stamps, PHASES[-1]: ended}
            starts = [began, *stamps.values()]
            phases = {phase: end - start for start, (phase, end) in zip(starts, ends.items(), strict=True)}
            return {"phases": phases, "accuracy": accuracy, "processor_s": common.processor_time_s() - used_s}

        plain_command = [sys.executable, __file__, *flags, "--plain", folder]
        ways = {
            "script": lambda: timed(lambda: common.launch("cpu", __file__, *flags)),
            "plain script": lambda: timed(lambda: subprocess.run(plain_command, check=True, capture_output=True)),
        }
        return common.take_turns(ways, args.rounds)


def report(measured) -> common.Report:
    columns = {"milliseconds, medians": "{}"} | {way: "{:,.0f}" for way in measured}
    phases = {
        way: {name: statistics.median(run["phases"][name] for run in runs) for name in runs[0]["phases"]}
        for way, runs in measured.items()
    }
    totals = {way: [sum(run["phases"].values()) for run in runs] for way, runs in measured.items()}
    rows = [[phase, *(phases[way].get(phase) for way in measured)] for phase in PHASES]
    for name, pick in {"together": statistics.median, "fastest": min, "slowest": max}.items():
        rows.append([name, *(pick(seconds) for seconds in totals.values())])
    rows.append(
        ["processor time", *(statistics.median(run["processor_s"] for run in runs) for runs in measured.values())]
    )
    rows = [[name, *(None if seconds is None else 1000 * seconds for seconds in row)] for name, *row in rows]
    accuracies = {way: 100 * min(run["accuracy"] for run in runs) for way, runs in measured.items()}
    lowest = ", ".join(f"{way} {accuracy:.2f} %" for way, accuracy in accuracies.items())
    goals = [
        common.Goal("MNIST, from command to trained model", statistics.median(totals["script"]), 10, "{:.1f} s"),
        common.Goal("its test accuracy", accuracies["script"], 98, "{:.2f} %", at_least=True),
    ]
    bars = common.Bars("MNIST: command to trained model, s", phases, "{:.1f}", goal=10)
    return common.Report([f"{common.table(columns, rows)}\n\nLowest test accuracy: {lowest}."], [bars], goals)


if __name__ == "__main__":
    args = parse_args()
    if args.worker:
        Path(args.worker).write_text(json.dumps(plain(args) if args.plain else script(args)))
    else:
        common.main(args, measure, report)
