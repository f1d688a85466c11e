"""Machines that are lost and come back, and how long training waits.

    python benchmarks/elastic.py

Three agents of torchrun with one process each, as on three machines, train mnist_mlp.py with `--virtual_processes 8
--checkpoint_every 50`. By a seeded schedule one is lost (kill -9 of the agent and its process) and comes back, and
training goes on with those that are there. After a loss the others notice it and meet again (until processes start),
import, read the data and the checkpoint (until training begins), and train. A machine that comes back interrupts the
others as well, for about as long, once it is ready; the picture does not show that. The last checkpoint has the same
bits as the checkpoint of one process that nothing happened to.
"""

import contextlib
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common

SCRIPT = common.ROOT / "scripts" / "mnist_mlp.py"
FLAGS = ["--virtual_processes", 8, "--batch_size", 64, "--hidden", 64, "--checkpoint_every", 50]
FLAGS += ["--log_every", 10, "--timeout_s", 60, "--max_steps", 1_000_000]  # it is still training when a machine is back


def parse_args():
    parser = common.make_parser(__doc__, dataset=True)
    add = parser.add_argument
    add("--machines", type=common.positive_int, default=3, help="%(default)s")
    add("--events", type=common.positive_int, default=8, help="losses and returns (%(default)s)")
    add("--steps_between", type=common.positive_int, default=600, help="steps between two of them (%(default)s)")
    add("--seed", type=int, default=0, help="of the schedule (%(default)s)")
    add("--picture", type=Path, default=Path(__file__).with_suffix(".png"), help="elastic.png beside this file")
    return parser.parse_args()


def schedule(machines: int, events: int, seed: int) -> list[tuple[str, int]]:
    """("lost" or "back", machine), with always one machine left."""
    draw = random.Random(seed)
    here, found = set(range(machines)), []
    for _ in range(events):
        gone = set(range(machines)) - here
        lose = not gone or (len(here) > 1 and draw.random() < 0.5)
        machine = draw.choice(sorted(here if lose else gone))
        here ^= {machine}
        found.append(("lost" if lose else "back", machine))
    return found


def kill_tree(process: subprocess.Popen) -> None:
    """kill -9 of a process and of all that it started."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    for each in (process, *children):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def wait(done, what: str, timeout_s: float = 120) -> float:
    """The time at which `done()` holds."""
    end = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not come in {timeout_s} s")
        time.sleep(0.02)
    return time.monotonic()


class Agents:
    """torchrun once per machine; any of them can be lost, since the rendezvous is a file.

    What the run does is read from its folder.
    """

    def __init__(self, machines: int, folder: Path, flags: list):
        self.machines, self.folder, self.flags = machines, folder, flags
        self.running = {}
        for machine in range(machines):
            self.start(machine)

    def start(self, machine: int) -> None:
        settings = "store_type=file,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{self.machines}"]
        command += ["--nproc_per_node", 1, "--max_restarts", 100, "--rdzv_id", "elastic"]
        command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", self.folder / "rendezvous"]
        command += ["--rdzv_conf", settings, "--local_addr", "127.0.0.1"]
        command += [SCRIPT, *self.flags, "--output_dir", self.folder / "run", "--resume"]
        variables = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        with open(self.folder / f"machine_{machine}.log", "a") as log:
            self.running[machine] = subprocess.Popen(list(map(str, command)), env=variables, stdout=log, stderr=log)

    def kill(self, machine: int) -> None:
        """kill -9 of the agent and its process."""
        kill_tree(self.running.pop(machine))

    def wait(self, done, what: str) -> float:
        """The time at which `done()` holds."""
        try:
            return wait(done, what)
        except TimeoutError as error:
            logs = [path.read_text()[-2000:] for path in sorted(self.folder.glob("*.log"))]
            raise TimeoutError("\n".join([str(error), *logs])) from None

    def launches(self) -> list[dict]:
        try:
            return json.loads((self.folder / "run" / "run.json").read_text())["launches"]
        except (OSError, ValueError):  # not there yet
            return []

    def step(self) -> int:
        """The last step that was logged."""
        try:
            lines = (self.folder / "run" / "metrics.jsonl").read_bytes().splitlines()
            return json.loads(lines[-1])["step"] if lines else 0
        except (OSError, ValueError):
            return 0

    def begins_with(self, machines: int) -> bool:
        """Whether the newest launch has this world size."""
        launches = self.launches()
        return bool(launches) and launches[-1]["num_processes"] == machines

    def trains_with(self, machines: int) -> bool:
        """Whether it also has logged a step."""
        return self.begins_with(machines) and self.step() > self.launches()[-1]["from_step"]

    def process_age_s(self) -> float:
        """The age of the oldest process that trains."""
        children = [child for agent in self.running.values() for child in psutil.Process(agent.pid).children()]
        return time.time() - min(child.create_time() for child in children if "LOCAL_RANK" in child.environ())


def disturb(agents: Agents, events, steps_between: int) -> dict:
    """Let these events happen; with times in seconds since the first step. Training goes on."""
    began = agents.wait(lambda: agents.trains_with(agents.machines), "the first step")
    sizes, rows = [[0.0, agents.machines]], []
    for number, (kind, machine) in enumerate(events, 1):
        agents.wait(lambda at=number * steps_between: agents.step() >= at, "the next event's step")
        now, step = time.monotonic(), agents.step()
        agents.kill(machine) if kind == "lost" else agents.start(machine)
        size = len(agents.running)
        begins = agents.wait(lambda size=size: agents.begins_with(size), f"{size} machines")
        born = begins - agents.process_age_s()
        going_on = agents.wait(lambda size=size: agents.trains_with(size), f"a step on {size} machines")
        again = max(0, step - agents.launches()[-1]["from_step"])
        if kind == "lost":  # a machine that comes back interrupts when it is ready, and not before
            sizes.append([now - began, 0])
        sizes.append([going_on - began, size])
        parts = [born - now, begins - born, going_on - begins, going_on - now]
        rows.append([kind, machine + 1, step, size, *(round(part, 1) for part in parts), again])
    after = agents.launches()[-1]["from_step"] + 100
    agents.wait(lambda: agents.step() > after, "a checkpoint after the last event")
    return {"sizes": sizes, "rows": rows, "end": time.monotonic() - began}


def sha256(checkpoint: Path) -> str:
    """Of the weights and of the optimizer's state."""
    content = [(checkpoint / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")]
    return hashlib.sha256(b"".join(content)).hexdigest()


def train_alone(folder: Path, flags: list, step: int) -> Path:
    """Train on one process until the checkpoint of a step; the checkpoint."""
    flags = [*flags, "--checkpoint_every", step, "--output_dir", folder]
    checkpoint = folder / "checkpoints" / f"step_{step:08d}"
    process = subprocess.Popen([sys.executable, SCRIPT, *map(str, flags)], stdout=subprocess.DEVNULL)
    try:
        wait(lambda: checkpoint.exists() or process.poll() is not None, "the same step of one process", 1800)
    finally:
        kill_tree(process)
    return checkpoint


def measure(args) -> dict:
    events = schedule(args.machines, args.events, args.seed)
    flags = [*FLAGS, "--dataset", args.dataset]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        agents = Agents(args.machines, folder, flags)
        try:
            measured = disturb(agents, events, args.steps_between)
        finally:
            for machine in list(agents.running):
                agents.kill(machine)
        checkpoint = max((folder / "run" / "checkpoints").glob("step_????????"))
        alone = train_alone(folder / "alone", flags, int(checkpoint.name.removeprefix("step_")))
        measured["sha256"] = [sha256(checkpoint), sha256(alone)]
    draw(measured, args.picture)
    return measured


def draw(measured: dict, picture: Path) -> None:
    """The world size over the time; 0 where nobody trains."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.8), layout="constrained")
    axes = figure.subplots()
    times = [time for time, _ in measured["sizes"]] + [measured["end"]]
    sizes = [size for _, size in measured["sizes"]]
    axes.stairs(sizes, times, fill=True, color="#56B4E9", edgecolor="#0072B2", linewidth=1.5)
    for size, begin, end in zip(sizes, times[:-1], times[1:], strict=True):
        if size == 0:
            axes.axvspan(begin, end, color="#D55E00", alpha=0.35, linewidth=0)
            axes.text((begin + end) / 2, 0.15, f"{end - begin:.0f} s", ha="center", fontsize=9)
    axes.set_yticks(range(max(sizes) + 1))
    axes.set_ylim(0, max(sizes) + 0.3)
    axes.set_xlim(0, measured["end"])
    axes.set_xlabel("seconds since the first step")
    axes.set_ylabel("machines that train")
    bits = "the same bits as" if len(set(measured["sha256"])) == 1 else "OTHER BITS than"
    title = f"{len(measured['rows'])} losses and returns; the checkpoint has {bits} that of one process left alone"
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=100)


def report(measured) -> common.Report:
    columns = {"event": "{}", "machine": "{}", "at step": "{}", "machines then": "{}"}
    columns |= {"s until processes start": "{:.1f}", "until training begins": "{:.1f}"}
    columns |= {"until 10 steps are done": "{:.1f}", "s in all": "{:.1f}", "steps done again": "{}"}
    waits = [row[7] for row in measured["rows"] if row[0] == "lost"]
    same = float(len(set(measured["sha256"])) == 1)
    goals = [
        common.Goal("seconds from kill -9 to the next step, longest", max(waits), 15),
        common.Goal("elastic: checkpoints with the bits of one process", same, 1, "{:.0f}", at_least=True),
    ]
    run, alone = (digest[:16] for digest in measured["sha256"])
    sha = f"SHA-256 of the last checkpoint: {run}; of the same step of one process left alone: {alone}."
    return common.Report(
        ["![world size over the time](elastic.png)", common.table(columns, measured["rows"]), sha], [], goals
    )


if __name__ == "__main__":
    common.main(parse_args(), measure, report)
