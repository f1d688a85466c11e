"""Several hosts on one machine: network namespaces with an address, a name and an /etc/hosts each,
and a switch between."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from warm import Nursery, Popen

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("alpha", "beta", "gamma")
ADDRESSES = ("10.77.0.1", "10.77.0.2", "10.77.0.3")


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def environment(home: Path, variables=os.environ) -> dict:
    """Of what tests start. A home of its own: a default_config.yaml of whoever runs the tests must
    not change them."""
    rooms = [str(ROOT / "tests" / room) for room in ("", "harness", "scripts", "distributed", "unit")]
    own = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "PYTHONPATH": os.pathsep.join(rooms)}
    return {**variables, **own}


def ip(*words):
    done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


class Hosts:
    """Hosts 0 to count - 1. Raises: OSError, with the reason, where they cannot be made."""

    def __init__(self, folder: Path, home: Path, count: int = 2):
        self.folder, self.home, self.processes = folder, home, []
        self.nurseries: dict[int, Nursery] = {}
        self.spaces = [f"{name}{os.getpid()}" for name in NAMES[:count]]
        self.switch = f"switch{os.getpid()}"
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
            raise OSError("network namespaces need root, and the programs ip and unshare")
        try:
            ip("netns", "add", self.switch)
            ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
            ip("-n", self.switch, "link", "set", "switch", "up")
            for space, name, address in zip(self.spaces, NAMES, ADDRESSES, strict=False):
                ip("netns", "add", space)
                cable = ("link", "add", "eth0", "netns", space, "type", "veth")
                ip(*cable, "peer", name, "netns", self.switch)
                ip("-n", self.switch, "link", "set", name, "master", "switch", "up")
                ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
                ip("-n", space, "link", "set", "lo", "up")
            self.plug("up")
            self.write_etc_hosts(ADDRESSES)
        except OSError:
            self.remove()
            raise

    def plug(self, up_or_down: str):
        for space in self.spaces:
            ip("-n", space, "link", "set", "eth0", up_or_down)

    def write_etc_hosts(self, own: tuple[str, ...]):
        """own: the address that a host's name has on that host itself; `ip netns exec` puts the
        files into /etc."""
        for host, space in enumerate(self.spaces):
            folder = Path("/etc/netns") / space
            folder.mkdir(parents=True, exist_ok=True)
            lines = [f"{own[n] if n == host else ADDRESSES[n]} {NAMES[n]}\n" for n in range(len(self.spaces))]
            (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
            (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # nobody: names come from the file alone

    def start(self, host: int, *command, cwd: Path | None = None, log: str | None = None, **variables):
        """Run a command on a host; what it prints goes to the file `log`, alpha.log or beta.log if
        none is given."""
        variables = environment(self.home) | variables
        with open(self.folder / (log or f"{NAMES[host]}.log"), "w") as file:
            process = Popen(
                [str(word) for word in command],
                nursery=self.nursery(host),
                cwd=cwd or self.folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        self.processes.append(process)
        return process

    def nursery(self, host: int) -> Nursery:
        """The process on a host that forks what is started there. All are made when the first is
        asked for: one machine does not start seconds after another."""
        hosts = [host] if self.nurseries else range(len(self.spaces))
        for each in hosts:
            if each not in self.nurseries or self.nurseries[each].process.poll() is not None:
                words = ["ip", "netns", "exec", self.spaces[each], "unshare", "--uts", "sh", "-c"]
                words += ['hostname "$0"; exec "$@"', NAMES[each]]
                self.nurseries[each] = Nursery.start(environment(self.home), words)
        return self.nurseries[host]

    def launch(self, *flags, launch_flags=(), each=({}, {}), only=(0, 1), processes=2, **environment):
        """`accelerate launch` of mnist_mlp.py on both hosts. each: flags, launch_flags and cwd of
        one host alone."""
        port, running = free_port(), []
        for host in only:
            own = each[host]
            command = [sys.executable, "-m", "accelerate.commands.launch"]
            command += ["--config_file", ROOT / "accelerate_configs" / "multi_node.yaml", "--machine_rank", host]
            command += ["--main_process_ip", ADDRESSES[0], "--main_process_port", port, "--num_processes", processes]
            command += ["--gpu_ids=-1,-1", *launch_flags, *own.get("launch_flags", ())]
            command += [ROOT / "scripts" / "mnist_mlp.py", *flags, *own.get("flags", ())]
            running.append(self.start(host, *command, cwd=own.get("cwd"), **environment))
        return running

    def log(self, host: int) -> str:
        return (self.folder / f"{NAMES[host]}.log").read_text()

    def errors(self, host: int) -> list[str]:
        """What the processes say; the launcher's report repeats it behind other words."""
        return [
            line.partition("error: ")[2]
            for line in self.log(host).splitlines()
            if "error: rank" in line and "traceback :" not in line
        ]

    def wait_for(self, text: str, timeout=120):
        """Until one of the logs has the text."""
        end = time.monotonic() + timeout
        while text not in self.log(0) + self.log(1):
            assert time.monotonic() < end, self.log(0)[-3000:] + self.log(1)[-3000:]
            assert any(process.poll() is None for process in self.processes), self.log(0)[-3000:] + self.log(1)[-3000:]
            time.sleep(0.05)

    def end(self, running, timeout=120) -> tuple[list[int], list[float]]:
        """Exit codes, and seconds until then."""
        began, codes, seconds = time.monotonic(), {}, {}
        while len(codes) < len(running):
            for process in set(running) - codes.keys():
                if process.poll() is not None:
                    codes[process], seconds[process] = process.returncode, time.monotonic() - began
            assert time.monotonic() < began + timeout, self.log(0)[-3000:] + self.log(1)[-3000:]
            time.sleep(0.05)
        return [codes[process] for process in running], [round(seconds[process], 1) for process in running]

    def ends(self, running, timeout=120) -> tuple[list[int], list[float]]:
        """As `end`, and nothing is left on either host."""
        codes_and_seconds = self.end(running, timeout)
        end = time.monotonic() + 5  # the nursery of a launcher ends just after it
        while self.pids(0) + self.pids(1):
            assert time.monotonic() < end
            time.sleep(0.05)
        return codes_and_seconds

    def pids(self, host: int, **environment) -> list[int]:
        """The processes on a host that have these environment variables."""
        found = []
        pids = set(map(int, ip("netns", "pids", self.spaces[host]).split()))
        if host in self.nurseries:
            pids.discard(self.nurseries[host].process.pid)
        for pid in pids:
            try:
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:  # it has just ended
                continue
            if all(f"{name}={value}".encode() in words for name, value in environment.items()):
                found.append(pid)
        return found

    def kill(self, host: int, **environment):
        """kill -9; of all processes where no environment is given: the host is gone."""
        for pid in self.pids(host, **environment):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def empty(self, host: int):
        while self.pids(host):
            self.kill(host)

    def clear(self):
        """End what runs on the hosts, and have them as they were at first."""
        for host in range(len(self.spaces)):
            self.empty(host)
        for process in self.processes:
            process.wait(10)
        self.processes.clear()
        self.plug("up")
        self.write_etc_hosts(ADDRESSES)

    def remove(self):
        for nursery in self.nurseries.values():
            nursery.process.kill()
            nursery.process.wait()
        for host, space in enumerate(self.spaces):
            try:
                self.empty(host)
                ip("netns", "delete", space)  # and the cable with it
            except OSError:  # not made
                pass
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)
        subprocess.run(["ip", "netns", "delete", self.switch], capture_output=True)
        for process in self.processes:
            process.wait(10)
