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


def wait(find, what: str, timeout_s: float = 120):
    """What `find()` returns as soon as that is true."""
    end = time.monotonic() + timeout_s
    while not (found := find()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not come in {timeout_s} s")
        time.sleep(0.02)
    return found


class Agents:
    """torchrun once per machine; any machine can be lost, since the rendezvous is a file. They print to stderr."""

    def __init__(self, machines: int, folder: Path, flags: list):
        self.machines, self.folder, self.flags, self.running = machines, folder, flags, {}

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

    def trained(self, at_least: int = 1) -> tuple[int, int] | None:
        """The last step that was logged, and the first one of the newest launch, if that launch is of all that run, and
        has trained so far."""
        try:
            launch = json.loads((self.folder / "run" / "run.json").read_text())["launches"][-1]
            step = json.loads((self.folder / "run" / "metrics.jsonl").read_bytes().splitlines()[-1])["step"]
        except (OSError, ValueError, IndexError):  # not there yet
            return None
        is_new = launch["num_processes"] == len(self.running) and step > launch["from_step"]
        return (step, launch["from_step"]) if is_new and step >= at_least else None


def disturb(agents: Agents, events: int, steps_between: int) -> list[list]:
    """Lose a machine, let it come back, lose the next one, and so on, while training goes on; a row per event."""
    rows = []
    for event in range(events):
        kind, machine = ("lost", "back")[event % 2], event // 2 % agents.machines
        step, _ = wait(lambda at=(event + 1) * steps_between: agents.trained(at), "the next event's step")
        began = time.monotonic()
        agents.kill(machine) if kind == "lost" else agents.start(machine)
        _, resumed = wait(agents.trained, "a step after an event")
        seconds = round(time.monotonic() - began, 1)
        rows.append([kind, machine + 1, step, len(agents.running), seconds, max(0, step - resumed)])
    wait(lambda: agents.trained(resumed + 101), "a checkpoint after the last event")
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
