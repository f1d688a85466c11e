"""What each promise costs in lines: the table of CONTRIBUTING.md beside the code of today.

python tests/docs/price_list.py
"""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = [*(ROOT / "utils").rglob("*.py")]


def lines_of(module: str) -> int:
    """The lines of a module of utils/, such as `parallel/ddp`, or of a whole folder, such as `checkpoint/`."""
    folder = ROOT / "utils"
    files = (folder / module).rglob("*.py") if module.endswith("/") else [folder / f"{module}.py"]
    return sum(len(file.read_text().splitlines()) for file in files)


def rows() -> dict[str, tuple[int, list[str]]]:
    """By promise: the lines that the table allows, and the modules."""
    table = re.findall(r"^\| ([^|]+) \| ([\d,]+) \| ([^|]+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    return {promise: (int(lines.replace(",", "")), re.findall(r"`(.+?)`", names)) for promise, lines, names in table}


if __name__ == "__main__":
    for promise, (allowed, modules) in rows().items():
        print(f"{sum(map(lines_of, modules)):5} of {allowed:5} lines  {promise}")
