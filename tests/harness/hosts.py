"""Two hosts on one machine, and what runs on them: Python as forks of a process on the host, as in preloaded.py."""

import contextlib
import itertools
import multiprocessing
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import forkserver, resource_tracker, spawn
from pathlib import Path
from unittest import mock

import preloaded
import psutil
from filelock import FileLock, Timeout
from network import ADDRESSES, NAMES, Network

ROOT = Path(__file__).resolve().parents[2]


# Below those that the kernel gives to connections. A lock that ends with this process keeps each thousand from other
# workers of pytest, and from other sessions of it on this machine.
for first in range(10000, 32000, 1000):
    THOUSAND = FileLock(Path(tempfile.gettempdir()) / f"ports_from_{first}.lock", mode=0o666)
    with contextlib.suppress(Timeout, OSError):
        THOUSAND.acquire(blocking=False)
        break
PORTS = itertools.count(first)


def free_port() -> int:
    for port in PORTS:
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            return port


def environment(home: Path) -> dict:
    """The variables of what tests start.

    With a home of its own: a default_config.yaml of whoever runs the tests must not change them.
    """
    rooms = [str(ROOT / "tests"), str(ROOT / "tests" / "harness")]
    own = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "PYTHONPATH": os.pathsep.join(rooms)}
    return {**os.environ, **own}


class Hosts:
    """Starts, watches and kills processes on hosts 0 and 1.

    Raises:
        OSError: with the reason, where the network cannot be made.
    """

    def __init__(self, folder: Path, home: Path):
        self.folder, self.home, self.processes = folder, home, []
        self.network = Network()
        self.spaces = self.network.spaces  # one for each host
        self.forkservers = [self.start_forkserver(host) for host in range(len(self.spaces))]

    def start_forkserver(self, host: int) -> forkserver.ForkServer:
        """A process on a host that imports torch once, and of which Python programs there are forks."""
        enter = self.folder / f"python_on_{NAMES[host]}"
        enter.write_text(f'#!/bin/sh\nexec {shlex.join([*self.network.enter(host), sys.executable])} "$@"\n')
        enter.chmod(0o755)
        server = forkserver.ForkServer()
        server.set_forkserver_preload(preloaded.IMPORTS)
        resource_tracker.ensure_running()  # not on the host
        spawn.set_executable(str(enter))
        try:
            with mock.patch.dict(os.environ, environment(self.home)):
                server.ensure_running()
        finally:
            spawn.set_executable(sys.executable)
        return server

    def start(self, host: int, *command, cwd: Path | None = None, log: str | None = None, **variables):
        """Run a command on a host; its output goes to the file `log`, by default alpha.log or beta.log."""
        log, cwd = self.folder / (log or f"{NAMES[host]}.log"), cwd or self.folder
        command, variables = [str(word) for word in command], environment(self.home) | variables
        log.write_text("")
        if command[0] == sys.executable and command[1] != "-c":
            program = multiprocessing.get_context("forkserver").Process(
                target=preloaded.program, args=(command[1:], variables, cwd, [log, log])
            )
            server = self.forkservers[host]
            with mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
                process = preloaded.Fork(command, program)
        else:
            with log.open("a") as file:
                words = [*self.network.enter(host), *command]
                streams = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": file}
                process = subprocess.Popen(words, cwd=cwd, env=variables, **streams)
        self.processes.append(process)
        return process

    def launch(
        self,
        *flags,
        config="multi_node",
        launch_flags=(),
        each=({}, {}),
        only=(0, 1),
        processes=2,
        script=None,
        **environment,
    ):
        """`accelerate launch` of a script on both hosts.

        Args:
            each: flags, launch_flags and cwd of one host alone.
            script: its path; mnist_mlp.py by default.
        """
        port, running = free_port(), []
        for host in only:
            own = each[host]
            command = [sys.executable, "-m", "accelerate.commands.launch"]
            command += ["--config_file", ROOT / "accelerate_configs" / f"{config}.yaml", "--machine_rank", host]
            command += ["--main_process_ip", ADDRESSES[0], "--main_process_port", port, "--num_processes", processes]
            command += ["--gpu_ids=-1,-1", *launch_flags, *own.get("launch_flags", ())]
            command += [script or ROOT / "scripts" / "mnist_mlp.py", *flags, *own.get("flags", ())]
            running.append(self.start(host, *command, cwd=own.get("cwd"), **environment))
        return running

    def log(self, host: int) -> str:
        return (self.folder / f"{NAMES[host]}.log").read_text()

    def tails(self) -> str:
        """The ends of both logs, for the message of an assertion."""
        return self.log(0)[-3000:] + self.log(1)[-3000:]

    def errors(self, host: int) -> list[str]:
        """What the processes say; the launcher's report repeats it behind other words."""
        return [
            line.partition("error: ")[2]
            for line in self.log(host).splitlines()
            if "error: rank" in line and "traceback :" not in line
        ]

    def wait_for(self, text: str, timeout=120) -> None:
        """Until one of the logs has the text."""
        end = time.monotonic() + timeout
        while text not in self.log(0) + self.log(1):
            assert time.monotonic() < end, self.tails()
            assert any(process.poll() is None for process in self.processes), self.tails()
            time.sleep(0.05)

    def end(self, running, timeout=120) -> tuple[list[int], list[float]]:
        """Exit codes, and seconds until then."""
        began, seconds = time.monotonic(), {}
        while len(seconds) < len(running):
            for process in set(running) - seconds.keys():
                if process.poll() is not None:
                    seconds[process] = time.monotonic() - began
            assert time.monotonic() < began + timeout, self.tails()
            time.sleep(0.05)
        return [process.returncode for process in running], [round(seconds[process], 1) for process in running]

    def ends(self, running, timeout=120) -> tuple[list[int], list[float]]:
        """As `end`, and nothing is left on either host."""
        codes_and_seconds = self.end(running, timeout)
        until = time.monotonic() + 10  # a process that was killed may still be ending
        while self.pids(0) + self.pids(1):
            assert time.monotonic() < until, self.tails()
            time.sleep(0.05)
        return codes_and_seconds

    def pids(self, host: int) -> list[int]:
        """The processes on a host."""
        return [pid for pid in self.network.pids(host) if pid != self.forkservers[host]._forkserver_pid]

    def kill(self, host: int, only_ranks: bool = False) -> None:
        """kill -9, of all processes: the host is gone; or of those that a launcher has started."""
        for pid in self.pids(host):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if not only_ranks or process.ppid() != self.forkservers[host]._forkserver_pid:
                    process.kill()

    def clear(self) -> None:
        """End what runs on the hosts, and have them as they were at first."""
        for host in range(len(self.spaces)):
            while self.pids(host):
                self.kill(host)
        for process in self.processes:
            process.wait(10)
        self.processes.clear()
        self.network.restore()

    def remove(self) -> None:
        self.clear()
        for server in self.forkservers:
            server._stop()
        self.network.remove()
