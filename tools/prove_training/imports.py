"""Imports what a script imports of installed libraries once, before its processes are forked: that takes seconds."""

import ast
import contextlib
import importlib
import io
import os
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from unittest import mock

OF_RANKS = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}
loaded = []  # names of modules


def of_script(script: Path, folder: Path) -> Iterator[tuple[str, str | None]]:
    """The installed modules, and names in them, that the script and the modules beside it import at their top level."""
    waiting = [script]
    for file in waiting:
        with contextlib.suppress(OSError, ValueError, SyntaxError):
            for node in ast.parse(file.read_bytes()).body:
                names = [(each.name, None) for each in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and not node.level:
                    names = [(node.module, each.name) for each in node.names]
                for name, attribute in names:
                    place = folder / name.replace(".", "/")
                    own = [each for each in (place.with_suffix(".py"), place / "__init__.py") if each.is_file()]
                    waiting += [each for each in own if each not in waiting]
                    spec = None if own else PathFinder.find_spec(name.partition(".")[0])
                    if spec and "site-packages" in (spec.origin or ""):  # and not elsewhere on PYTHONPATH
                        yield name, attribute


def load_common() -> None:
    import torch._dynamo  # noqa: F401  which every optimizer imports

    with contextlib.suppress(ImportError):  # a script in plain PyTorch does not need it
        import accelerate.local_sgd  # noqa: F401  and all that `recording` asks of it


def load(script: Path, folder: Path) -> bool:
    """Import it. Returns whether processes may share it: no module asks for its rank, or starts threads."""
    load_common()
    before, threads = set(sys.modules), threading.active_count()
    wanted, getitem = set(), os._Environ.__getitem__

    def watched(environment, name):
        wanted.add(name)
        return getitem(environment, name)

    nothing = io.StringIO()
    with (
        mock.patch.object(os._Environ, "__getitem__", watched),
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(nothing),
    ):
        for name, attribute in of_script(script, folder):
            try:
                module = importlib.import_module(name)
                if attribute:
                    getattr(module, attribute, None)  # libraries import some of their modules when asked for
            except (Exception, SystemExit):
                return False
    loaded.extend(sys.modules.keys() - before)
    return not wanted & OF_RANKS and threading.active_count() <= threads


def replace(replacements: dict) -> None:
    """Have these modules use the replacements of functions, by their ids, as if they were imported after them."""
    for name in loaded:
        for key, value in list(vars(sys.modules[name]).items()) if name in sys.modules else []:
            while id(value) in replacements:
                value = replacements[id(value)]
                setattr(sys.modules[name], key, value)
