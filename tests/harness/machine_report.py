"""The report of the tests marked `gpu`, and of test_topologies.py on a CPU: a verdict, the machine, a row per check.

An item carries what its row needs in `user_properties`, which pytest-xdist brings from the workers
to the process that prints the summary and writes the report.
"""

import platform
import re
from collections import Counter
from importlib.metadata import version

import torch

from benchmarks.common import table
from tools.doctor import output_of
from utils.banner import cpu_name, git_commit
from utils.console import plural

COLUMNS = dict.fromkeys(("config", "check", "figure", "tolerance", "seconds", "outcome"), "{}")
SPEED_COLUMNS = {"config": "{}", "processes": "{}", "devices": "{}", "script": "{}", "per second": "{:,.0f}"}
SPEED_COLUMNS |= {"of": "{}", "TFLOP/s per device": "{:.3g}", "of its peak": "{:.1%}", "memory, GiB": "{:.2f}"}
# TFLOP/s in bf16, TF32 and float32 by torch's name of a GPU: NVIDIA's data sheets and white papers, without sparsity,
# with sums in float32. A GeForce above its boost clock does more.
PEAKS = {
    "NVIDIA B200": (2250, 1100, 75),
    "NVIDIA H100 80GB HBM3|NVIDIA H200": (989, 495, 67),
    "NVIDIA H100 PCIe": (756, 378, 51),
    "NVIDIA A100.*": (312, 156, 19.5),
    "NVIDIA L40S": (362, 183, 91.6),
    "NVIDIA L4": (121, 60, 30.3),
    "NVIDIA A10": (125, 62.5, 31.2),
    "NVIDIA RTX A6000": (155, 77.4, 38.7),
    "NVIDIA GeForce RTX 5090": (209, 105, 105),
    "NVIDIA GeForce RTX 4090": (165, 82.6, 82.6),
    "NVIDIA GeForce RTX 3090": (71, 35.6, 35.6),
}


def peak_tflops(gpu: str, kind: str) -> float | None:
    """The peak of a GPU with `kind`: "bf16", "tf32" or "float32"; None: unknown."""
    known = (peaks for names, peaks in PEAKS.items() if re.fullmatch(names, gpu))
    return dict(zip(("bf16", "tf32", "float32"), next(known, ()), strict=False)).get(kind)


def describe(item, place: int) -> None:
    """Give an item the properties that its row begins with.

    place: of the row in the table.
    """
    name, _, identity = item.name.removesuffix("]").partition("[")
    parameters = dict(item.callspec.params) if identity else {}
    topology = parameters.pop("topology", None)
    others = map(str, parameters.values()) if topology else filter(None, [identity.strip("-")])
    item.user_properties.append(("place", place))
    item.user_properties.append(("config", topology.name if topology else ""))
    item.user_properties.append(("check", ", ".join([name.removeprefix("test_").replace("_", " "), *others])))


def reason(result) -> str:
    """Why a test was skipped or failed, in one line."""
    if result.outcome == "skipped":
        _, _, text = result.longrepr
        return text.removeprefix("Skipped: ")
    crash = getattr(result.longrepr, "reprcrash", None)
    text = crash.message if crash else str(result.longrepr)
    return next((line for line in text.splitlines() if line.strip()), "")[:200]


def rows(results: list) -> tuple[list[list], list[list]]:
    """The rows of the table of checks, and those of the table of speeds.

    Files that could not be collected and tests in which a worker of pytest-xdist crashed have no properties: they are
    rows too. A test that passed, but whose fixtures failed behind it, has one row.
    """
    checks, speeds = [], []
    failed = {result.nodeid for result in results if result.outcome == "failed"}
    results = [result for result in results if result.outcome == "failed" or result.nodeid not in failed]
    found = [(dict(getattr(result, "user_properties", ())), result) for result in results]
    for known, result in found:
        if "place" not in known and (not hasattr(result, "user_properties") or result.when == "???"):
            known |= {"place": -1, "config": "", "check": result.nodeid}
    found = [(known, result) for known, result in found if "place" in known]
    for known, result in sorted(found, key=lambda pair: pair[0]["place"]):
        outcome, seconds = result.outcome, round(getattr(result, "duration", 0))
        if outcome != "passed":
            outcome = f"{'**failed**' if outcome == 'failed' else outcome}: {reason(result)}"
        cells = [known["config"], known["check"], known.get("figure"), known.get("tolerance"), seconds, outcome]
        checks.append([cell.replace("|", "\\|") if isinstance(cell, str) else cell for cell in cells])
        if outcome == "passed":
            speeds += [[known["config"], *speed] for speed in known.get("speed", ())]
    return checks, speeds


def verdict(checks: list[list], without_result: int, stand_ins: bool) -> str:
    """One line: the GPUs, how many checks passed, which failed, and what did not run."""
    names = Counter(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    gpus = " + ".join(f"{count} x {name}" for name, count in names.items()) or "no GPU"
    outcomes = [row[-1].partition(":")[0].strip("*") for row in checks]
    parts = [f"{gpus}: {outcomes.count('passed')} of {plural(len(checks) + without_result, 'check')} passed"]
    for kind in ("failed", "skipped"):
        if chosen := [row for row, outcome in zip(checks, outcomes, strict=True) if outcome == kind]:
            said = [f"{row[1]} ({row[0]})" if row[0] else row[1] for row in chosen]
            if kind == "skipped":
                why = Counter(row[-1].partition(": ")[2] for row in chosen)
                said = [f"{count} x {text}" for text, count in why.most_common()]
            parts.append(f"{len(chosen)} {kind}: {', '.join(said)}")
    if without_result:
        parts.append(f"{without_result} without a result: the session ended early")
    if stand_ins:
        parts.insert(0, "TRIAL OF THE TESTS, which says nothing about GPUs: configs of the CPU stand in")
    return "; ".join(parts)


def machine(command: str = "") -> list[str]:
    """What the figures depend on, a line each. command: the words after `pytest`."""
    packages = [f"{name} {version(name)}" for name in ("torch", "accelerate")]
    return [
        f"command: `pytest {command}`",
        f"CPU: {torch.multiprocessing.cpu_count()} cores, {cpu_name() or platform.machine()}",
        f"software: Python {platform.python_version()}, {', '.join(packages)}, {platform.system()}",
        f"commit: {git_commit() or 'unknown'}",
        *(gpus() or ["GPUs: none"]),
    ]


def gpus() -> list[str]:
    """The lines about GPUs, their links and software; without a GPU, none."""
    count, lines = torch.cuda.device_count(), []
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        kernels = f"compute capability {found.major}.{found.minor}"
        lines.append(f"GPU {index}: {found.name}, {found.total_memory / 2**30:.0f} GiB, {kernels}")
    if not count:
        return lines
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    header = re.search(r"CUDA Version: *([\d.]+)", output_of("nvidia-smi"))
    lines += [
        f"torch: CUDA {torch.version.cuda}, NCCL {nccl}, kernels for {' '.join(torch.cuda.get_arch_list())}",
        f"CUDA of the driver: {header[1] if header else 'unknown'}",
    ]
    if count > 1:
        can = torch.cuda.can_device_access_peer
        ours = range(count)
        peers = [" ".join("-" if a == b else str(int(can(a, b))) for b in ours) for a in ours]
        lines.append(f"peer to peer, GPU by GPU: {' / '.join(peers)}")
    query = "driver_version,power.limit,pcie.link.gen.max,pcie.link.width.max,mig.mode.current,ecc.mode.current"
    for name, output in (
        (query, output_of("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")),
        ("nvidia-smi topo -m", output_of("nvidia-smi", "topo", "-m").partition("\n\n")[0]),
    ):
        shown = "\n".join(f"      {line.expandtabs()}" for line in output.splitlines() if line.strip())
        lines.append(f"{name}:\n\n{shown}\n" if shown else f"{name}: unknown")
    return lines


def render(results: list, collected: frozenset = frozenset(), command: str = "", stand_ins: bool = False) -> str | None:
    """The report of the results of a pytest session; None if it ran none of these tests.

    Args:
        collected: the ids of all tests of the session, to find those without a result.
        command: the words after `pytest`.
        stand_ins: whether configs of the CPU stood in for those of GPUs.
    """
    ran = [result for result in results if result.outcome != "skipped"]
    if not any(name == "place" for result in ran for name, _ in getattr(result, "user_properties", ())):
        return None
    checks, speeds = rows(results)
    without_result = len(collected - {result.nodeid for result in results})
    notes = [text for result in results for name, text in getattr(result, "user_properties", ()) if name == "machine"]
    parts = [
        f"# {verdict(checks, without_result, stand_ins)}",
        "\n".join(f"- {line}" for line in [*machine(command), *notes]),
        "Seconds of a launch count for the first check that needs it.",
        table(COLUMNS, checks),
    ]
    if speeds:
        parts += ["## Speed", table(SPEED_COLUMNS, speeds)]
    return "\n\n".join(parts) + "\n"
