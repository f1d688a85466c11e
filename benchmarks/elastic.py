"""Machines that are lost and come back, and how long training waits.

    python benchmarks/elastic.py

Three agents of torchrun with one process each, as on three machines, train mnist_mlp.py with `--virtual_processes 8
--checkpoint_every 50`. One after the other is lost (kill -9 of the agent and its process) and comes back, and training
goes on with the others, which notice the loss, start new processes and read the checkpoint. A machine that comes back
interrupts the others as well, for about as long. The last checkpoint has the same bits as the checkpoint of one process
that nothing happened to.
"""

import contextlib
import hashlib
import json
import os
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
FLAGS += ["--log_every", 10, "--timeout_s", 60, "--max_steps", 1_000_000]  # still training when a machine comes back


def parse_args():
    parser = common.make_parser(__doc__, dataset=True)
    add = parser.add_argument
    add("--machines", type=common.positive_int, default=3, help="%(default)s")
    add("--events", type=common.positive_int, default=3, help="losses and returns (%(default)s)")
    add("--steps_between", type=common.positive_int, default=300, help="steps between two of them (%(default)s)")
    return parser.parse_args()


def wait(done, what: str, timeout_s: float = 120) -> None:
    """Wait until `done()` holds."""
    end = time.monotonic() + timeout_s
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not come in {timeout_s} s")
        time.sleep(0.02)


class Agents:
    """torchrun once per machine; any machine can be lost, since the rendezvous is a file. They print to stderr."""

    def __init__(self, machines: int, folder: Path, flags: list):
        self.machines, self.folder, self.flags = machines, folder, flags
        self.running = {}

    def __enter__(self):
        self.folder.mkdir(exist_ok=True)
        for machine in range(self.machines):
            self.start(machine)
        return self

    def __exit__(self, *_):
        for machine in list(self.running):
            self.kill(machine)

    def start(self, machine: int) -> None:
        settings = "store_type=file,keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=2"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"1:{self.machines}"]
        command += ["--nproc_per_node", 1, "--max_restarts", 100, "--rdzv_id", "elastic"]
        command += ["--rdzv_backend", "c10d", "--rdzv_endpoint", self.folder / "rendezvous"]
        command += ["--rdzv_conf", settings, "--local_addr", "127.0.0.1"]
        command += [SCRIPT, *self.flags, "--output_dir", self.folder / "run", "--resume"]
        variables = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
        self.running[machine] = subprocess.Popen(list(map(str, command)), env=variables, stdout=sys.stderr)

    def kill(self, machine: int) -> None:
        """kill -9 an agent and its process."""
        agent = self.running.pop(machine)
        children = psutil.Process(agent.pid).children(recursive=True) if agent.poll() is None else []
        for process in (agent, *children):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        agent.wait()

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

    def trains_with(self, machines: int) -> bool:
        """Whether the newest launch has this world size, and has logged a step."""
        launches = self.launches()
        return bool(launches) and launches[-1]["num_processes"] == machines and self.step() > launches[-1]["from_step"]


def disturb(agents: Agents, events: int, steps_between: int) -> list[list]:
    """Lose a machine, let it come back, lose the next one, and so on, while training goes on; a row per event."""
    wait(lambda: agents.trains_with(agents.machines), "the first step")
    rows = []
    for event in range(events):
        kind, machine = ("lost", "back")[event % 2], event // 2 % agents.machines
        wait(lambda at=(event + 1) * steps_between: agents.step() >= at, "the next event's step")
        began, step = time.monotonic(), agents.step()
        agents.kill(machine) if kind == "lost" else agents.start(machine)
        size = len(agents.running)
        wait(lambda size=size: agents.trains_with(size), f"a step on {size} machines")
        again = max(0, step - agents.launches()[-1]["from_step"])
        rows.append([kind, machine + 1, step, size, round(time.monotonic() - began, 1), again])
    after = agents.launches()[-1]["from_step"] + 100
    wait(lambda: agents.step() > after, "a checkpoint after the last event")
    return rows


def sha256(checkpoint: Path) -> str:
    """The SHA-256 of the weights and the optimizer's state."""
    content = [(checkpoint / f"{name}.safetensors").read_bytes() for name in ("model", "optimizer")]
    return hashlib.sha256(b"".join(content)).hexdigest()


def measure(args) -> dict:
    flags = [*FLAGS, "--dataset", args.dataset]
    with tempfile.TemporaryDirectory() as folder:
        with Agents(args.machines, Path(folder), flags) as agents:
            rows = disturb(agents, args.events, args.steps_between)
        checkpoint = max((agents.folder / "run" / "checkpoints").glob("step_????????"))
        flags += ["--checkpoint_every", int(checkpoint.name.removeprefix("step_"))]
        with Agents(1, Path(folder) / "alone", flags) as agents:
            alone = agents.folder / "run" / "checkpoints" / checkpoint.name
            wait(alone.exists, "the same step of one process", 600)
        return {"rows": rows, "sha256": [sha256(checkpoint), sha256(alone)]}


def report(measured) -> list[str]:
    columns = {"event": "{}", "machine": "{}", "at step": "{}", "machines then": "{}"}
    columns |= {"s until 10 steps are done": "{:.1f}", "steps done again": "{}"}
    run, alone = (digest[:16] for digest in measured["sha256"])
    digests = f"SHA-256 of the last checkpoint: {run}; of the same step of one process left alone: {alone}."
    return [common.table(columns, measured["rows"]), digests]


if __name__ == "__main__":
    common.main(parse_args(), measure, report)
