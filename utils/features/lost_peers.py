"""Several machines: a sentence in place of a traceback when a peer is lost, and gloo's interface.

To do without this module, delete it and the lines of launch.py that name its functions.
"""

import os
import re
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import psutil
from accelerate.utils import gather_object

from ..console import own_line, report_to_launcher, show
from ..topology import resume_command
from .hang_watchdog import who_is_late

# What gloo, NCCL and their store say when another process is gone or silent. Their other errors,
# such as those about wrong shapes, do not match.
LOST = re.compile(
    "connection (closed|reset|refused)|broken pipe|time(d )?out|unreachable|no route|remote process", re.IGNORECASE
)

# {"host": ..., "address": ...} of each rank, from `introduce_peers`; empty until then.
PEERS = []


def explain_lost_peers(can_resume: bool = True) -> None:
    """Have the error of a collective whose other end is gone or silent printed as one sentence.

    Each process that sees such an error prints the sentence. It names this rank, the line of code
    that waited, and the ranks on the machine that the error names, or else on the machines that do
    not answer. Other errors keep their traceback. Call it before the process group is made; without
    a launcher it does nothing.

    Args:
        can_resume: the script has a --resume; the sentence then ends with the command to continue.
    """
    if "RANK" not in os.environ:
        return
    rank = int(os.environ["RANK"])
    host = socket.gethostname()
    other_hook = sys.excepthook

    def explain(kind, error, trace):
        if not (issubclass(kind, RuntimeError) and LOST.search(str(error))):
            return other_hook(kind, error, trace)
        # Without gloo's "[source file:line] " in front and its advice behind.
        reason = re.sub(r"^\[\S+\] ", "", str(error)).splitlines()[0]
        reason = reason.split(". This is typically")[0]
        lost = " or ".join(lost_ranks(reason)) or "another process"
        late = who_is_late()
        if late is not None:
            reason = f"{reason}; {late}"
        advice = f"; to continue: {resume_command()}" if can_resume else ""
        sentence = f"error: rank {rank} on {host} lost {lost}{own_line(trace)}: {reason}{advice}"
        report_to_launcher(sentence)
        show(sentence, "red", sys.stderr)

    sys.excepthook = explain


def introduce_peers() -> None:
    """Tell all processes the host and the address of each. Collective: call it on every rank.

    `explain_lost_peers` needs them to name the ranks that were lost.
    """
    PEERS[:] = gather_object([{"host": socket.gethostname(), "address": own_address()}])


def lost_ranks(reason: str) -> list[str]:
    """The ranks on a machine that `reason` names, or else on machines that are not up.

    Returns:
        "rank R on HOST" for each of them.
    """
    addresses = {peer["address"] for peer in PEERS} - {None, own_address()}
    lost = set()
    for address in addresses:
        if re.search(rf"\b{re.escape(address)}\b", reason):
            lost.add(address)
    if not lost:
        with ThreadPoolExecutor(64) as pool:
            answers = pool.map(is_up, addresses)
            lost = {address for address, up in zip(addresses, answers, strict=True) if not up}
    names = []
    for rank, peer in enumerate(PEERS):
        if peer["address"] in lost:
            names.append(f"rank {rank} on {peer['host']}")
    return names


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
