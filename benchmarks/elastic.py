"""Machines that are lost and come back, and how long training waits.

    python benchmarks/elastic.py

Three machines (network namespaces, so it needs Linux and root) with an agent of torchrun and one
process each train mnist_mlp.py with `--virtual_processes 8 --checkpoint_every 50`. By a seeded
schedule machines are lost (kill -9 of everything on them) and come back, and training goes on with
those that are there. After a loss the others notice it and meet again (until processes start),
import, read the data and the checkpoint (until training begins), and train. A machine that comes
back interrupts the others as well, for about as long, once it is ready; the picture does not show
that. In the end the model has the same bits as that of one process that nothing happened to.

![world size over the time](elastic.png)
"""

import hashlib
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "harness"))

from hosts import NAMES, Hosts

from benchmarks import common

FLAGS = ["--virtual_processes", 8, "--batch_size", 64, "--hidden", 64, "--checkpoint_every", 50]
FLAGS += ["--log_every", 10, "--timeout_s", 60]
TIMEOUT_S = 120


def parse_args():
    parser = common.make_parser(__doc__)
    add = parser.add_argument
    add("--machines", type=int, default=3, help="2 or 3 (default: 3)")
    add("--events", type=int, default=8, help="losses and returns (default: 8)")
    add("--steps_between", type=int, default=600, help="steps between two (default: 600)")
    add("--seed", type=int, default=0, help="of the schedule (default: 0)")
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


class Watch:
    """What the folder of a run says while it goes on."""

    def __init__(self, folder: Path):
        self.folder = folder

    def launches(self) -> list[dict]:
        try:
            return json.loads((self.folder / "run.json").read_text())["launches"]
        except (OSError, ValueError):  # not there yet
            return []

    def step(self) -> int:
        """The last step that was logged."""
        try:
            lines = (self.folder / "metrics.jsonl").read_bytes().splitlines()
            return json.loads(lines[-1])["step"] if lines else 0
        except (OSError, ValueError):
            return 0


class Agents:
    """torchrun on each machine; any of them can be lost, since the rendezvous is a file."""

    def __init__(self, hosts: Hosts, folder: Path, flags: list):
        self.hosts, self.folder, self.flags, self.number = hosts, folder, flags, 0
        self.watch = Watch(folder / "run")
        self.running = {host: self.start(host) for host in range(len(hosts.spaces))}

    def start(self, host: int):
        machines = len(self.hosts.spaces)
        settings = "store_type=file,keep_alive_interval=1,keep_alive_max_attempt=3"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{machines}"]
        command += ["--nproc_per_node", 1, "--max_restarts", 100, "--rdzv_id", "elastic"]
        command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", self.folder / "rendezvous"]
        command += ["--rdzv_conf", f"{settings},last_call_timeout=2"]
        command += [common.ROOT / "scripts" / "mnist_mlp.py", *self.flags]
        command += ["--output_dir", self.folder / "run", "--resume"]
        self.number += 1
        log = f"{self.number}_{NAMES[host]}.log"
        return self.hosts.start(host, *command, log=log, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", PYTHONUNBUFFERED="1")

    def wait(self, done, what: str) -> float:
        """The time at which `done()` holds."""
        end = time.monotonic() + TIMEOUT_S
        while not done():
            if time.monotonic() > end:
                logs = [path.read_text()[-2000:] for path in sorted(self.folder.glob("*.log"))]
                raise TimeoutError(f"{what} did not come in {TIMEOUT_S} s\n" + "\n".join(logs))
            time.sleep(0.02)
        return time.monotonic()

    def begins_with(self, machines: int) -> bool:
        """Whether the newest launch has this world size."""
        launches = self.watch.launches()
        return bool(launches) and launches[-1]["num_processes"] == machines

    def trains_with(self, machines: int) -> bool:
        """Whether it also has logged a step."""
        begun = self.begins_with(machines)
        return begun and self.watch.step() > self.watch.launches()[-1]["from_step"]

    def process_age_s(self, here: set[int]) -> float:
        """Of the oldest process that trains."""
        pids = [pid for host in here for pid in self.hosts.pids(host, LOCAL_RANK="0")]
        return time.time() - min(psutil.Process(pid).create_time() for pid in pids)


def disturb(agents: Agents, events, steps_between: int) -> dict:
    """Let these events happen; with times in seconds since the first step. Training goes on."""
    here = set(agents.running)
    began = agents.wait(lambda: agents.trains_with(len(here)), "the first step")
    sizes, rows = [[0.0, len(here)]], []
    for number, (kind, host) in enumerate(events, 1):
        agents.wait(lambda at=number * steps_between: agents.watch.step() >= at, "the next event's step")
        now, step = time.monotonic(), agents.watch.step()
        here ^= {host}
        if kind == "lost":
            agents.hosts.kill(host)
            agents.running.pop(host).wait(10)
        else:
            agents.running[host] = agents.start(host)
        size = len(here)
        begins = agents.wait(lambda size=size: agents.begins_with(size), f"{size} machines")
        born = begins - agents.process_age_s(here)
        going_on = agents.wait(lambda size=size: agents.trains_with(size), f"a step on {size} machines")
        launch = agents.watch.launches()[-1]
        lost = max(0, step - launch["from_step"])
        if kind == "lost":  # a machine that comes back interrupts when it is ready, and not before
            sizes.append([now - began, 0])
        sizes.append([going_on - began, size])
        parts = [born - now, begins - born, going_on - begins, going_on - now]
        rows.append([kind, NAMES[host], step, size, *(round(part, 1) for part in parts), lost])
    return {"sizes": sizes, "rows": rows, "began": began}


def sha256(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def measure(args) -> dict:
    events = schedule(args.machines, args.events, args.seed)
    flags = [*FLAGS, "--max_steps", (args.events + 2) * args.steps_between]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        hosts = Hosts(folder, folder / "home", args.machines)
        try:
            agents = Agents(hosts, folder, flags)
            measured = disturb(agents, events, args.steps_between)
            hosts.end(list(agents.running.values()), timeout=600)
            measured["end"] = time.monotonic() - measured.pop("began")
        finally:
            hosts.remove()
        common.launch("cpu", common.ROOT / "scripts" / "mnist_mlp.py", *flags, "--output_dir", folder / "alone")
        measured["sha256"] = [sha256(folder / "run"), sha256(folder / "alone")]
    draw(measured, Path(__file__).with_suffix(".png"))
    return measured


def draw(measured: dict, picture: Path) -> None:
    """The world size over the time; 0 where nobody trains."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.8), layout="constrained")
    axes = figure.subplots()
    times = [time for time, _ in measured["sizes"]] + [measured["end"]]
    sizes = [size for _, size in measured["sizes"]]
    axes.stairs(sizes, times, fill=True, color="#56B4E9", edgecolor="#0072B2", linewidth=1.5)
    for size, begin, end in zip(sizes, times, times[1:], strict=False):
        if size == 0:
            axes.axvspan(begin, end, color="#D55E00", alpha=0.35, linewidth=0)
            axes.text((begin + end) / 2, 0.15, f"{end - begin:.0f} s", ha="center", fontsize=9)
    axes.set_yticks(range(max(sizes) + 1))
    axes.set_ylim(0, max(sizes) + 0.3)
    axes.set_xlim(0, measured["end"])
    axes.set_xlabel("seconds since the first step")
    axes.set_ylabel("machines that train")
    same = len(set(measured["sha256"])) == 1
    axes.set_title(
        f"{len(measured['rows'])} losses and returns; the model has "
        f"{'the same bits as' if same else 'OTHER BITS than'} that of one process left alone",
        fontsize=10,
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=100)


def report(measured) -> common.Report:
    columns = {"event": "{}", "machine": "{}", "at step": "{}", "machines then": "{}"}
    columns |= {"s until processes start": "{:.1f}", "until training begins": "{:.1f}"}
    columns |= {"until 10 steps are done": "{:.1f}", "s in all": "{:.1f}"}
    columns |= {"steps done again": "{}"}
    waits = [row[7] for row in measured["rows"] if row[0] == "lost"]
    goals = [common.Goal("seconds from kill -9 to the next step, longest", max(waits), 15)]
    same = float(len(set(measured["sha256"])) == 1)
    goals.append(common.Goal("elastic: models with the bits of one process", same, 1, "{:.0f}", True))
    sha = f"SHA-256 of the model: {measured['sha256'][0][:16]}, and of one process left alone: "
    sha += f"{measured['sha256'][1][:16]}."
    return common.Report([common.table(columns, measured["rows"]), sha], [], goals)


if __name__ == "__main__":
    common.main(parse_args(), measure, report)
