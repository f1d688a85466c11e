"""Which code and which packages made a run, for run.json."""

import hashlib
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "torchvision", "accelerate", "datasets", "evaluate", "numpy")


def describe_code() -> dict:
    """The versions of Python and of each package that is installed, and the commit of the code."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "git_commit": git_commit()}


def code_digest() -> str:
    """Of the script and of utils/: machines with different code would train one model in two ways."""
    digest = hashlib.sha256()
    for path in (Path(sys.argv[0]), *sorted(Path(__file__).parents[1].rglob("*.py"))):
        if path.is_file():  # not in a notebook
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def git_commit() -> str | None:
    """The commit of the code, with "+" after it if files were changed since; None outside git."""
    here = Path(__file__).parent

    def git(*words):
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        commit = git("rev-parse", "HEAD")
        changes = commit and git("status", "--porcelain", "--untracked-files=no")
    except OSError:  # git is not installed
        return None
    return commit and commit + ("+" if changes else "")
