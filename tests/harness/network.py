"""A network on one machine: two namespaces with an address, a name and an /etc/hosts each, and a switch between."""

import os
import shutil
import subprocess
from pathlib import Path

NAMES = ("alpha", "beta")
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*words):
    done = subprocess.run(["ip", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


class Network:
    """`spaces` has the namespace of each host.

    Raises:
        OSError: with the reason, where namespaces cannot be made.
    """

    def __init__(self):
        self.spaces = [f"{name}{os.getpid()}" for name in NAMES]
        self.switch = f"switch{os.getpid()}"
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
            raise OSError("network namespaces need root, and the programs ip and unshare")
        try:
            ip("netns", "add", self.switch)
            ip("-n", self.switch, "link", "add", "switch", "type", "bridge")
            ip("-n", self.switch, "link", "set", "switch", "up")
            for space, name, address in zip(self.spaces, NAMES, ADDRESSES, strict=True):
                ip("netns", "add", space)
                cable = ("link", "add", "eth0", "netns", space, "type", "veth")
                ip(*cable, "peer", name, "netns", self.switch)
                ip("-n", self.switch, "link", "set", name, "master", "switch", "up")
                ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
                ip("-n", space, "link", "set", "lo", "up")
            self.restore()
        except OSError:
            self.remove()
            raise

    def restore(self) -> None:
        """The network as it is at first."""
        self.plug("up")
        self.write_etc_hosts(ADDRESSES)

    def plug(self, up_or_down: str) -> None:
        for space in self.spaces:
            ip("-n", space, "link", "set", "eth0", up_or_down)

    def write_etc_hosts(self, own_addresses: tuple[str, ...]) -> None:
        """Write the files that `ip netns exec` puts into /etc.

        Args:
            own_addresses: what each host's name means on that host itself.
        """
        for host, space in enumerate(self.spaces):
            folder = Path("/etc/netns") / space
            folder.mkdir(parents=True, exist_ok=True)
            addresses = [own_addresses[n] if n == host else ADDRESSES[n] for n in range(len(self.spaces))]
            lines = [f"{address} {name}\n" for address, name in zip(addresses, NAMES, strict=True)]
            (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
            (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")  # nobody: names come from the file alone

    def enter(self, host: int) -> list[str]:
        """The beginning of a command line that runs the rest of it on a host."""
        words = ["ip", "netns", "exec", self.spaces[host], "unshare", "--uts", "sh", "-c"]
        return [*words, 'hostname "$0"; exec "$@"', NAMES[host]]

    def pids(self, host: int) -> list[int]:
        return list(map(int, ip("netns", "pids", self.spaces[host]).split()))

    def remove(self) -> None:
        """Also what is there of a network that was not made to its end."""
        for space in [*self.spaces, self.switch]:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)  # and its cable with it
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)
