"""The report of tests/distributed/test_topologies.py: a machine, what was checked on it, and the figures.

An item carries what its row needs in `user_properties`, which pytest-xdist brings from the workers
to the process that prints the summary and writes the report.
"""

import platform
from importlib.metadata import version

import torch

from benchmarks.common import table
from tools.doctor import output_of
from utils.console import plural
from utils.extras.banner import cpu_name, git_commit

COLUMNS = dict.fromkeys(("config", "check", "figure", "tolerance", "outcome"), "{}")
SPEED_COLUMNS = {"config": "{}", "processes": "{}", "devices": "{}"}
SPEED_COLUMNS |= {"MNIST, images/s": "{:,.0f}", "ResNet-50, images/s": "{:,.1f}"}


def describe(item, place: int) -> None:
    """Give an item of test_topologies.py the properties that its row begins with.

    place: of the row in the table.
    """
    config = item.callspec.params["topology"].name
    others = [str(value) for name, value in item.callspec.params.items() if name != "topology"]
    check = item.originalname.removeprefix("test_").replace("_", " ")
    item.user_properties.append(("place", place))
    item.user_properties.append(("config", config))
    item.user_properties.append(("check", ", ".join([check, *others])))


def reason(result) -> str:
    """Why a test was skipped or failed, in one line."""
    if result.outcome == "skipped":
        _, _, text = result.longrepr
        return text.removeprefix("Skipped: ")
    crash = getattr(result.longrepr, "reprcrash", None)
    text = crash.message if crash else str(result.longrepr)
    return next((line for line in text.splitlines() if line.strip()), "")[:200]


def rows(results: list) -> tuple[list[list], list[list]]:
    """The rows of the table of checks, and those of the table of speeds."""
    checks, speeds = [], []
    found = [(dict(result.user_properties), result) for result in results if hasattr(result, "user_properties")]
    found = [(known, result) for known, result in found if "place" in known]
    for known, result in sorted(found, key=lambda pair: pair[0]["place"]):
        outcome = result.outcome
        if outcome != "passed":
            outcome = f"{'**failed**' if outcome == 'failed' else outcome}: {reason(result)}"
        cells = [known["config"], known["check"], known.get("figure"), known.get("tolerance")]
        checks.append([*cells, outcome.replace("|", "\\|")])
        if "speed" in known:
            speeds.append([known["config"], *known["speed"]])
    return checks, speeds


def machine() -> list[str]:
    """What the figures depend on, a line each."""
    gpus = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        gpus.append(f"{found.name}, {found.total_memory / 2**30:.0f} GiB")
    if gpus:
        driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        on = f"driver {driver.partition(chr(10))[0]}, CUDA {torch.version.cuda}, NCCL {nccl}"
    packages = [f"{name} {version(name)}" for name in ("torch", "accelerate")]
    return [
        f"CPU: {torch.multiprocessing.cpu_count()} cores, {cpu_name() or platform.machine()}",
        *([f"GPUs: {'; '.join(gpus)}", f"GPU software: {on}"] if gpus else ["GPUs: none"]),
        f"software: Python {platform.python_version()}, {', '.join(packages)}, {platform.system()}",
        f"commit: {git_commit() or 'unknown'}",
    ]


def render(results: list) -> str | None:
    """The report of the results of a pytest session; None if it ran no test of a topology."""
    checks, speeds = rows(results)
    if not checks:
        return None
    outcomes = [row[-1].partition(":")[0].strip("*") for row in checks]
    counts = [f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "skipped")]
    parts = [
        "# Every config on this machine",
        "\n".join(f"- {line}" for line in machine()),
        f"{plural(len(checks), 'check')}: {', '.join(counts)}.",
        table(COLUMNS, checks),
    ]
    if speeds:
        parts += ["## Speed", table(SPEED_COLUMNS, speeds)]
    return "\n\n".join(parts) + "\n"
