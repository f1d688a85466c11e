"""Copy a script, and what it needs of utils/, into a folder of your own.

    python -m utils.take mnist_mlp ../mine
    python -m utils.take mnist_mlp ../mine --with profiling,curves,prove --with_data
    python -m utils.take prove ../mine

Files are copied byte for byte. A script of this project keeps its path, as in ../mine/scripts/mnist_mlp.py: there it
finds utils/ and data/, and the commands in its docstring and in the configs stay true. A script from elsewhere goes
beside utils/.

    with every script   the core: the modules directly in utils/, and utils/checkpoint/
    if it is imported   modules of utils/features/ and utils/datasets/, modules beside the script
    by --with NAME      more features, datasets and commands; the ones left out are listed

Only the standard library is needed to run this.
"""

import argparse
import keyword
import modulefinder
import os
import re
import shlex
import sys
from pathlib import Path

from ..console import plural, stop
from . import requirements

UTILS = Path(__file__).resolve().parents[1]
ROOT, NAME = UTILS.parent, UTILS.name
ROOMS = ("features", "datasets")  # a script gets a module in one of these only if it asks for it
COMMANDS = {path.parent.name: path.parent for path in sorted(UTILS.glob("*/__main__.py"))}
OPTIONS = {path.stem: path for room in ROOMS for path in sorted(UTILS.glob(f"{room}/[!_]*.py"))} | COMMANDS
CORE = {
    path
    for path in [*UTILS.glob("*.py"), *UTILS.glob("*/*.py")]
    if path.parent.name not in ROOMS and path.parent not in COMMANDS.values()
}


class Finder(modulefinder.ModuleFinder):
    """Finds the modules that an import statement names, wherever it stands. Runs nothing.

    The core has no import statement for a feature: it asks `features.feature(name)`, if `features.has(name)`.
    """

    def find_module(self, name, path, parent=None):
        try:
            return super().find_module(name, path, parent)
        except AttributeError:  # of a folder without __init__.py
            raise ImportError(name) from None

    def files(self) -> set[Path]:
        return {Path(module.__file__) for module in self.modules.values() if module.__file__}  # not sys


def find_script(word: str) -> Path:
    """The file, or the folder of a command, that a SCRIPT argument means. Raises: SystemExit if there is none."""
    ours = {path.stem: path for path in sorted((ROOT / "scripts").rglob("*.py"))} | COMMANDS
    path = ours.get(word) or Path(word).resolve()
    if word not in COMMANDS and (path.suffix != ".py" or not path.is_file()):
        stop(f"SCRIPT {word} does not exist: pass one of {', '.join(ours)}, or the path of a .py file")
    return path


def imported_by_script(path: Path) -> set[Path]:
    """A script and the files that it imports. Raises: SystemExit if one of utils/ is missing, or cannot be known."""
    finder = Finder([str(ROOT), str(path.parent)])
    try:
        finder.run_script(str(path))
    except SyntaxError as error:
        stop(f"{path} cannot be read as Python: {error}")
    for name in finder.any_missing():
        if name.startswith(f"{NAME}.") and "__main__" in finder.badmodules[name]:
            stop(f"{path} imports {name}: there is no such module here")
    hidden = rf"^.*(import_module|__import__)\(.*\b{NAME}\b.*|^\s*from {NAME}[.\w]* import \*.*"
    for file in finder.files():
        found = UTILS not in file.parents and re.search(hidden, file.read_bytes().decode(errors="replace"), re.M)
        if found:
            stop(f"{file} hides which modules it imports: write import statements for `{found[0].strip()}`")
    return finder.files()


def find_files(scripts: list[Path], chosen: list[Path]) -> dict[Path, Path]:
    """The files to copy of utils/, of scripts, and beside scripts, by their paths in the copy.

    chosen: modules in utils/, and folders of commands.
    """
    files = {}
    for script in scripts:
        for path in imported_by_script(script):
            name = path.relative_to(ROOT if ROOT in path.parents else script.parent)
            if files.setdefault(name, path) != path:
                stop(f"{path} and {files[name]} would both be {name} in the copy: copy one at a time")
    if Path(NAME, "__init__.py") in files:
        chosen = [*chosen, *CORE]
    finder = Finder([str(ROOT)])
    for path in chosen:
        for file in path.glob("*.py") if path.is_dir() else [path]:
            finder.import_hook(".".join(file.relative_to(ROOT).with_suffix("").parts))
    pages = {page for path in chosen if path.is_dir() for page in path.glob("*.md")}
    return files | {path.relative_to(ROOT): path for path in finder.files() | pages}


def with_package(files: dict[Path, bytes], package: str, others: set[str]) -> dict[Path, bytes]:
    """The files with utils/ by another name: its folder, and each line of a script that begins with `from utils`.

    Raises:
        SystemExit: if it cannot be this name, among other reasons as one of the `others`, or a script imports utils
            in a different way too.
    """
    if not package.isidentifier() or keyword.iskeyword(package) or package in {*sys.stdlib_module_names, *others}:
        stop(f"--package {package} is not an identifier, or has a meaning already: pass a different name")
    result = {}
    for name, text in files.items():
        if name.parts[0] == NAME:  # imports in there are relative
            name = Path(package, *name.parts[1:])
        elif name.suffix == ".py":
            text = re.sub(rf"(?m)^([ \t]*from ){NAME}\b".encode(), rf"\g<1>{package}".encode(), text)
            if re.search(rf"(?m)^[ \t]*import .*\b{NAME}\b|; *from {NAME}\b".encode(), text):
                stop(f"{name} has an import that --package cannot change: write `from {NAME} import ...`")
        result[name] = text
    return result


def write_new(folder: Path, files: dict[Path, bytes]) -> None:
    """Write files by their paths in `folder`. Raises: SystemExit, before the first is written, if one is there."""
    for name in sorted({path for file in files for path in (file, *file.parents)}):
        path = folder / name
        if os.path.lexists(path) and (name in files or not path.is_dir()):
            stop(f"{path} exists, and nothing is overwritten: pass a different FOLDER, or remove what is there")
    try:
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with open(folder / name, "xb") as file:
                file.write(text)
    except OSError as error:
        stop(f"{folder} cannot be written: {error}")


def take(words: list[str], folder: Path, extras: list[str], package: str, with_data: bool) -> str:
    """Copy, and return what was copied and how to run it.

    Args:
        words: the SCRIPT arguments.
        extras: what --with names.

    Raises:
        SystemExit: before anything is written, if something does not exist, does not fit, or would be overwritten.
    """
    starts = [find_script(word) for word in words]
    for name in extras:
        if name not in (*OPTIONS, "all"):
            stop(f"--with {name} does not exist: pass all, or some of {','.join(OPTIONS)}")
    chosen = [path for name, path in OPTIONS.items() if path in starts or name in extras or "all" in extras]
    scripts = [path for path in starts if path not in chosen]
    sources = find_files(scripts, chosen)
    modules = {name: path for name, path in sources.items() if name.suffix == ".py"}
    beside = {part for name in modules if name.parts[0] != NAME for part in name.with_suffix("").parts}
    packages = set().union(*map(requirements.imported, modules.values())) - beside - {NAME}

    data = ROOT / "data" / "mnist"
    if with_data and not data.is_dir():
        stop(f"--with_data: {data} does not exist, leave the flag out")
    for path in [ROOT / "LICENSE", *ROOT.glob("accelerate_configs/**/*.*"), *(data.glob("*") if with_data else ())]:
        sources[path.relative_to(ROOT)] = path
    files = {name: path.read_bytes() for name, path in sources.items()}
    files[Path("requirements.txt")] = requirements.narrowed(packages).encode()
    if package != NAME:
        files = with_package(files, package, packages | beside | {"accelerate_configs"})
    write_new(folder, files)
    return summary(folder, scripts, modules, packages, package, with_data)


def summary(
    folder: Path, scripts: list[Path], modules: dict[Path, Path], packages: set[str], package: str, with_data: bool
) -> str:
    """What was copied, what is left out, and how to run it.

    Args:
        modules: the Python files by their paths in the copy.
        packages: libraries that they import.
    """
    outside = [name for name in modules if name.parts[0] != NAME]
    copied, left_out = [], []
    for name, path in OPTIONS.items():
        (copied if {path, path / "__main__.py"} & {*modules.values()} else left_out).append(name)
    lines = [f"copied to {folder}", *(f"  {name}" for name in outside)]
    if len(outside) < len(modules):
        core = plural(len(CORE & {*modules.values()}), "core module")
        lines.append(f"  {package}/  {', '.join([core, *copied])}")
    lines.append("  accelerate_configs/, LICENSE, requirements.txt" + ", data/mnist/" * with_data)
    if len(outside) < len(modules):
        lines.append(f"left out, and added by --with NAME,NAME: {', '.join(left_out)}")
    unknown = requirements.missing(packages)
    if unknown:
        lines.append(f"imported, but neither copied nor in requirements.txt: {', '.join(sorted(unknown))}")
    for path in scripts:
        if not with_data and b"ylecun/mnist" in path.read_bytes():
            lines.append(f"{path.name} will download MNIST: --with_data copies it")
        if ROOT not in path.parents and b"sys.path." in path.read_bytes():
            lines.append(f"{path.name} changes sys.path: check that it finds {package}/ in the copy")
    lines += [f"to run it, in {shlex.quote(str(folder))}", "  pip install -r requirements.txt"]
    for name in outside:
        if modules[name] in scripts:
            lines.append(f"  accelerate launch --config_file accelerate_configs/cpu.yaml {shlex.quote(str(name))}")
    lines += [f"  python -m {package}.{name}" for name in copied if name in COMMANDS]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {__package__}", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    add = parser.add_argument
    add(
        "script",
        metavar="SCRIPT",
        nargs="+",
        help="mnist_mlp or another of scripts/, prove or another command, or a path",
    )
    add("folder", metavar="FOLDER", type=Path, help="created if it does not exist")
    add("--with", metavar="NAME,NAME", dest="extras", default="", help=f"add these, or all: {', '.join(OPTIONS)}")
    add("--package", metavar="NAME", default=NAME, help=f"a different name for the copy of {NAME}")
    add("--with_data", action="store_true", help="copy data/mnist too, 10 MB")
    args = parser.parse_args()
    print(take(args.script, args.folder, args.extras.split(",") if args.extras else [], args.package, args.with_data))
