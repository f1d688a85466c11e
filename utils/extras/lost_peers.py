"""Several machines: a sentence in place of a traceback when a peer is lost, and gloo's interface."""

import argparse
import os
import re
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import psutil
from accelerate.utils import gather_object

from ..console import own_line
from ..topology import resume_command

# What gloo, NCCL and their store say when another process is gone or silent. Their other errors,
# such as those about wrong shapes, do not match.
LOST = re.compile(
    "connection (closed|reset|refused)|broken pipe|time(d )?out|unreachable|no route|remote process", re.IGNORECASE
)


def is_lost_peer(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and LOST.search(str(error)) is not None


class LostPeers:
    """Names the ranks that an error of a collective is about.

    Args:
        args: the parsed flags. With a --resume among them, the sentence ends with the command to continue.

    Attributes:
        who_is_late: returns a sentence about ranks that were waited for, if there is one.
    """

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.who_is_late: Callable[[], str | None] = lambda: None
        self.peers: list[dict] = []  # {"host": ..., "address": ...} of each rank; none until `introduce`

    def introduce(self) -> None:
        """Tell all processes the host and the address of each. Collective."""
        self.peers = gather_object([{"host": socket.gethostname(), "address": own_address()}])

    def sentence(self, error: BaseException, trace: TracebackType | None) -> str:
        """This rank, the line of code that waited, and the ranks on the machine that the error names, or else on the
        machines that do not answer."""
        # Without gloo's "[source file:line] " in front and its advice behind.
        reason = re.sub(r"^\[\S+\] ", "", str(error)).splitlines()[0]
        reason = reason.split(". This is typically")[0]
        lost = " or ".join(self.lost_ranks(reason)) or "another process"
        late = self.who_is_late()
        if late is not None:
            reason = f"{reason}; {late}"
        advice = ""
        if hasattr(self.args, "resume"):
            advice = f"; to continue: {resume_command(getattr(self.args, 'output_dir', None))}"
        here = f"rank {os.environ['RANK']} on {socket.gethostname()}"
        return f"{here} lost {lost}{own_line(trace)}: {reason}{advice}"

    def lost_ranks(self, reason: str) -> list[str]:
        """The text "rank R on HOST" for each rank on a machine that `reason` names, or else on one that is not up."""
        addresses = {peer["address"] for peer in self.peers} - {None, own_address()}
        lost = {address for address in addresses if re.search(rf"\b{re.escape(address)}\b", reason)}
        if not lost:
            with ThreadPoolExecutor(64) as pool:
                answers = pool.map(is_up, addresses)
                lost = {address for address, up in zip(addresses, answers, strict=True) if not up}
        return [f"rank {rank} on {peer['host']}" for rank, peer in enumerate(self.peers) if peer["address"] in lost]


def own_address() -> str | None:
    """The address that this machine uses to reach rank 0.

    None if all processes are on one machine, or if there is no route.
    """
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((os.environ["MASTER_ADDR"], 1))  # sends nothing: only finds the route
        except OSError:  # an IPv6 address, or no route
            return None
        address = probe.getsockname()[0]
    if address.startswith("127."):
        return None
    return address


def is_up(address: str) -> bool:
    """Whether a machine answers within 2 s, even if it refuses the connection."""
    try:
        socket.create_connection((address, 1), timeout=2).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True


def bind_gloo_to_the_route() -> None:
    """Have gloo listen on the interface that leads to rank 0, unless GLOO_SOCKET_IFNAME is set.

    By default gloo takes the address of the machine's own host name. On a stock Debian or Ubuntu
    that is 127.0.1.1, where no other machine can reach it.
    """
    address = own_address()
    if address is None:
        return
    for interface, addresses in psutil.net_if_addrs().items():
        if address in [each.address for each in addresses]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
