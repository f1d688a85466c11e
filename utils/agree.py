"""Compare values between processes, and stop all processes if they differ. Every function here is collective."""

import math
import operator
import socket
from collections.abc import Callable

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from .console import Stop, show_error, stop
from .flags import PER_MACHINE


def compare(values: dict, is_same: Callable = operator.eq) -> tuple[dict, list[str], dict[str, tuple]]:
    """Compare JSON values by name, which a process may lack, with rank 0's. Collective.

    Returns:
        Rank 0's values; the first rank that has others, and rank 0, such as ["rank 1 on beta", "rank 0 on alpha"]; and
        their two values of each name that differs. If all are the same: an empty dict.
    """
    everyone = gather_object([(socket.gethostname(), values)])
    first_host, first = everyone[0]
    for rank, (host, other) in enumerate(everyone):
        pairs = {name: (other.get(name), first.get(name)) for name in {**first, **other}}
        if differing := {name: pair for name, pair in pairs.items() if not is_same(*pair)}:
            return first, [f"rank {rank} on {host}", f"rank 0 on {first_host}"], differing
    return first, [], {}


def same_on_all(facts: dict) -> dict:
    """Return `facts`; stop if they differ between processes, except for PER_MACHINE of flags.py. Collective.

    With different arguments or data, machines would train one model with two recipes, or wait for each other forever.
    """
    compared = {name: value for name, value in facts.items() if name not in PER_MACHINE}
    _, ranks, differing = compare(compared)
    if differing:
        stop(describe_differences(ranks, differing))
    return facts


def same_result(numbers: dict[str, float]) -> dict[str, float]:
    """Return rank 0's numbers of a test on every rank: all save the same best model, and stop together. Collective.

    Stops at results that differ by more than rounding, which machines of two kinds have: each process would have
    tested its own samples only.
    """
    first, ranks, differing = compare(numbers, is_close)
    if differing:
        stop(
            f"the processes have different test results: {describe_differences(ranks, differing)}; use "
            "run.new_metrics(), or add up the parts of all processes with accelerator.reduce"
        )
    return first


def describe_differences(ranks: list[str], differing: dict[str, tuple]) -> str:
    pairs = "; ".join(f"{name} {other!r}, not {value!r}" for name, (other, value) in differing.items())
    return f"{ranks[0]} has {pairs} as {ranks[1]}"


def is_close(value: float | None, other: float | None) -> bool:
    """Whether two numbers, or two missing ones, differ by no more than rounding."""
    if value is None or other is None:
        return value is other
    return math.isclose(value, other, rel_tol=1e-5, abs_tol=1e-6) or (math.isnan(value) and math.isnan(other))


def on_main(accelerator: Accelerator, work: Callable):
    """Do `work()` on the main process and return its result on all processes. Collective.

    Raises:
        SystemExit: on every process, if it fails with OSError or SystemExit: none is left waiting.
    """
    result = problem = None
    if accelerator.is_main_process:
        try:
            result = work()
        except OSError as error:
            problem = f"{error.filename or 'a file'}: {error.strerror or error}"
            show_error(problem, alone=False)
        except SystemExit as error:  # `stop` has printed it
            problem = str(error)
    result, problem = broadcast_object_list([result, problem])
    if problem is not None:
        if not accelerator.is_main_process:
            show_error(problem, alone=False)  # each machine says why
        raise Stop(problem)
    return result
