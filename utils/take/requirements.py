"""The packages that files import, and their lines in requirements.txt."""

import ast
import re
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parents[2] / "requirements.txt"
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}  # where the name in an import is a different one


def imported(path: Path) -> set[str]:
    """Top-level names of all packages that a file imports, without the standard library."""
    names = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names


def distribution(requirement: str) -> str:
    """The normalised name at the start of a line of requirements.txt, or of an import."""
    name = re.match(r"[\w.-]*", DISTRIBUTIONS.get(requirement, requirement))[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def narrowed(packages: set[str]) -> str:
    """requirements.txt with only its comments and the lines of these packages."""
    wanted = {distribution(name) for name in packages}
    lines = FILE.read_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith("#") or distribution(line) in wanted)


def missing(packages: set[str]) -> set[str]:
    """The packages that requirements.txt does not have."""
    listed = {distribution(line) for line in FILE.read_text().splitlines()}
    return {name for name in packages if distribution(name) not in listed}
