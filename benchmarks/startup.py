"""From the command to the trained model.

    python benchmarks/startup.py
    python benchmarks/startup.py --before COMMIT     # takes turns with the code of a commit

- script: `accelerate launch --config_file accelerate_configs/cpu.yaml scripts/mnist_mlp.py`, its
  default run of 4 epochs with tests, checkpoints and curves; started through this file, which notes
  the time at the end of each phase; "before": the code of an earlier commit, likewise
- plain script: `python`, and a plain PyTorch loop with the same model, recipe and epochs over
  torchvision's MNIST as tensors, a test at the end, and nothing else

Processor time is that of all processes, and changes less than the others with the load of the
machine. Most of an import is that of torch, and of torch._dynamo, which the first optimizer
imports; the script's "end" has the end of two Python processes, its own and the launcher's.
"""

import time

STARTED = time.monotonic()  # one clock for all processes of a machine, as far as Linux and macOS go

import json  # noqa: E402
import math  # noqa: E402
import resource  # noqa: E402
import shutil  # noqa: E402
import statistics  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common  # noqa: E402

PHASES = [
    "script starts",
    "imports",
    "Accelerator",
    "data",
    "model, optimizer",
    "first step",
    "training, tests",
    "model, summary, curves",
    "end",
]


def parse_args():
    parser = common.make_parser(__doc__, rounds=3)
    parser.add_argument("--worker", help="what it launches: where to write the times")
    parser.add_argument("--plain", help="the plain script: the folder of MNIST")
    help = "a commit of this repository, whose script takes turns with this one's"
    parser.add_argument("--before", metavar="COMMIT", help=help)
    help = "for the script, such as --flags='--max_steps 10'"
    parser.add_argument("--flags", default="", help=help)
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


def worker(out: str, flags: str) -> None:
    """scripts/mnist_mlp.py, with the time noted in between."""
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
        sys.argv = [mnist_mlp.__file__, "--output_dir", folder, *flags.split()]
        mnist_mlp.main()
        accuracy = json.loads((Path(folder) / "summary.json").read_text())["test_accuracy"]
    Path(out).write_text(json.dumps([stamps, accuracy]))


def plain(out: str, folder: str) -> None:
    stamps = Stamps({PHASES[0]: STARTED})
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torchvision import datasets

    stamps.now("imports")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, test = (datasets.MNIST(folder, train=train) for train in (True, False))
    images, test_images = ((data.data.float() - 33.3184) / 78.5675 for data in (train, test))
    stamps.now("data")
    batch_size, epochs = 256, 4
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 192), nn.SiLU(), nn.Linear(192, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 6e-3, weight_decay=0.1)
    total_steps = epochs * math.ceil(len(images) / batch_size)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps, cycle_momentum=False)
    stamps.now("model, optimizer")
    stamps.first_step()
    for _ in range(epochs):
        for indices in torch.randperm(len(images)).split(batch_size):
            loss = F.cross_entropy(model(images[indices]), train.targets[indices])
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    with torch.no_grad():
        accuracy = float((model(test_images).argmax(1) == test.targets).float().mean())
    stamps.now("training, tests")
    Path(out).write_text(json.dumps([stamps, accuracy]))


def check_out(commit: str, folder: Path) -> Path:
    """The files of a commit, with this benchmark in place of its own; returns the benchmark."""
    archive = subprocess.run(["git", "archive", commit], cwd=common.ROOT, check=True, capture_output=True)
    folder.mkdir()
    subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
    for file in (__file__, common.__file__):
        shutil.copy(file, folder / "benchmarks")
    return folder / "benchmarks" / Path(__file__).name


def processor_time() -> float:
    """Seconds of all processes that have ended, of the user and of the system."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure(args) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        common.write_idx(Path(folder))
        out = Path(folder) / "out.json"

        def timed(run) -> list:
            """Seconds of each phase, the test accuracy, and the seconds of the processors."""
            began, used = time.monotonic(), processor_time()
            run()
            ended = time.monotonic()
            stamps, accuracy = json.loads(out.read_text())
            ends = {**stamps, PHASES[-1]: ended}
            starts = [began, *ends.values()]
            phases = {}
            for start, (phase, end) in zip(starts, ends.items(), strict=False):
                phases[phase] = end - start
            return [phases, accuracy, processor_time() - used]

        def script(file=__file__):
            common.launch("cpu", file, "--worker", out, f"--flags={args.flags}")

        command = [sys.executable, __file__, "--worker", out, "--plain", folder]

        def plain_script():
            subprocess.run(command, check=True, capture_output=True)

        ways = {"script": lambda: timed(script)}
        if args.before:
            earlier = check_out(args.before, Path(folder) / "before")
            ways["before"] = lambda: timed(lambda: script(earlier))
        ways["plain script"] = lambda: timed(plain_script)
        return common.take_turns(ways, args.rounds)


def report(measured) -> common.Report:
    columns = {"milliseconds, medians": "{}"} | {way: "{:,.0f}" for way in measured}
    phases = {}
    for way, runs in measured.items():
        names = [phase for phase in PHASES if phase in runs[0][0]]
        phases[way] = {name: statistics.median(run[0][name] for run in runs) for name in names}
    wholes = {way: [sum(run[0].values()) for run in runs] for way, runs in measured.items()}
    accuracies = {way: min(run[1] for run in runs) for way, runs in measured.items()}
    rows = []
    for phase in PHASES:
        seconds = [phases[way].get(phase) for way in measured]
        rows.append([phase, *(None if each is None else 1000 * each for each in seconds)])
    picks = {"together": statistics.median, "fastest": min, "slowest": max}
    for name, pick in picks.items():
        rows.append([name, *(1000 * pick(whole) for whole in wholes.values())])
    used = [statistics.median(run[2] for run in runs) for runs in measured.values()]
    rows.append(["processor time", *(1000 * each for each in used)])
    accuracy_row = ", ".join(f"{way} {100 * each:.2f} %" for way, each in accuracies.items())
    table = common.table(columns, rows) + f"\n\nLowest test accuracy: {accuracy_row}."
    median_s = statistics.median(wholes["script"])
    accuracy = 100 * accuracies["script"]
    goals = [
        common.Goal("MNIST, from command to trained model", median_s, 10, "{:.1f} s"),
        common.Goal("its test accuracy", accuracy, 98, "{:.2f} %", at_least=True),
    ]
    bars = common.Bars("MNIST: command to trained model, s", phases, "{:.1f}", goal=10)
    return common.Report([table], [bars], goals)


if __name__ == "__main__":
    args = parse_args()
    if args.plain:
        plain(args.worker, args.plain)
    elif args.worker:
        worker(args.worker, args.flags)
    else:
        common.main(args, measure, report)
