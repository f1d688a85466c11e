"""Imports the script's installed libraries once, before forking: importing them takes seconds."""

import ast
import contextlib
import io
import os
import sys
import threading
from importlib.machinery import PathFinder
from pathlib import Path
from unittest import mock

OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
loaded = []  # names of modules


def is_installed(statement: ast.stmt, folder: Path) -> bool:
    """Whether a statement imports from site-packages, and nothing that is in the script's folder."""
    names = [alias.name for alias in statement.names] if isinstance(statement, ast.Import) else []
    if isinstance(statement, ast.ImportFrom) and not statement.level:
        names = [statement.module]
    tops = [name.partition(".")[0] for name in names]
    specs = [not list(folder.glob(f"{top}*")) and PathFinder.find_spec(top) for top in tops]
    return bool(specs) and all(spec and "site-packages" in (spec.origin or "") for spec in specs)


def load_common(script: Path, folder: Path) -> None:
    import torch._dynamo  # noqa: F401  which every optimizer imports

    with contextlib.suppress(ImportError):  # a script in plain PyTorch does not need them
        import accelerate.local_sgd  # noqa: F401  and all that `recording` asks of it

        if b"accelerate" in script.read_bytes() and is_installed(ast.parse("import datasets").body[0], folder):
            import datasets  # noqa: F401  which Accelerator.prepare imports on several processes


def load(script: Path, folder: Path) -> bool:
    """Import it. Returns whether processes may share it: no module asks for its rank, or starts threads."""
    load_common(script, folder)
    before, threads, nothing = set(sys.modules), threading.active_count(), io.StringIO()
    wanted, getitem = set(), os._Environ.__getitem__

    def watched(environment, name):
        wanted.add(name)
        return getitem(environment, name)

    with (
        mock.patch.object(os._Environ, "__getitem__", watched),
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(nothing),
    ):
        try:
            for statement in ast.parse(script.read_bytes()).body:
                if is_installed(statement, folder):
                    exec(compile(ast.Module([statement], []), str(script), "exec"), {})
        except (Exception, SystemExit):
            return False
    loaded.extend(sys.modules.keys() - before)
    return not wanted & OF_RANKS and threading.active_count() <= threads


def replace(replacements: dict) -> None:
    """Replace functions, given by their ids, in the modules that have imported them already."""
    for name in loaded:
        for key, value in list(vars(sys.modules[name]).items()) if name in sys.modules else []:
            while id(value) in replacements:
                value = replacements[id(value)]
                setattr(sys.modules[name], key, value)
