"""What a run may have beside its core: each module here can be left out. README.md lists them."""

import importlib
from importlib.util import find_spec
from types import ModuleType

from ..console import stop


def has(name: str) -> bool:
    """Whether the feature is here."""
    return find_spec(f"{__name__}.{name}") is not None


def feature(name: str, asked_by: str = "this run") -> ModuleType:
    """The module of a feature, imported now.

    Args:
        asked_by: what needs it, for the error: a flag, or a config file.

    Raises:
        SystemExit: if its file is not here.
    """
    if not has(name):
        stop(
            f"{asked_by} needs the feature {name}, and there is no {'/'.join(__name__.split('.'))}/{name}.py: "
            f"copy it there, or take it along with `--with {name}`"
        )
    return importlib.import_module(f"{__name__}.{name}")
