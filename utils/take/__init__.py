"""Copy a script and the modules that it needs into a folder of your own.

    python -m utils.take mnist_mlp ../my_project
    python -m utils.take mnist_mlp doctor ../my_project --package training --with_data

The folder then has the script, a package with the modules that the script imports, the Accelerate
configs, LICENSE and requirements.txt, and needs nothing from here. Files that exist are never
overwritten. Only the standard library is needed to run this.
"""

import argparse
import ast
import io
import keyword
import os
import re
import shlex
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from ..console import plural, stop

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(__file__).resolve().parents[1].name
CONFIGS = "accelerate_configs"
CONFIG_SUFFIXES = (".yaml", ".md", ".sbatch")
# Packages whose name in an import differs from their name in requirements.txt.
DISTRIBUTIONS = {"PIL": "pillow", "yaml": "pyyaml"}
ORIGIN = "# From the accelerate training scripts, MIT license: see LICENSE.\n"

# The package in text: as a path (utils/datasets/images_in_memory.py, ../utils/), in dotted form (utils.data), or in an
# import. Not accelerate.utils or my/utils/x.py.
PACKAGE_IN_TEXT = re.compile(rf"(?<![\w./-])((?:\.\./)*){PACKAGE}(?=/|\.[A-Za-z_])|(?<=from ){PACKAGE}(?= import\b)")
PACKAGE_AS_WORD = re.compile(rf"(?<![\w./-]){PACKAGE}(?![\w/-])")
# How a script makes `utils` importable: Path(__file__).resolve().parents[1], or with .parent.parent
FOLDER_ABOVE = re.compile(
    r"(?:str\()?Path\(__file__\)(?:\.resolve\(\)|\.absolute\(\))?"
    r"(?:\.parents\[(?P<index>\d+)\]|(?P<chain>(?:\.parent)+))\)?"
)


class Source:
    """A Python file, parsed."""

    def __init__(self, path: Path):
        """Raises: SystemExit if `path` cannot be read or is no Python source."""
        self.path = path
        self.is_ours = path.resolve().parent == ROOT / PACKAGE  # a module of our package
        try:
            with tokenize.open(path) as file:
                self.text = file.read()
            self.tree = ast.parse(self.text)
        except (OSError, SyntaxError, ValueError) as error:
            stop(f"{path} cannot be read as Python: {error}")

    def imported_modules(self) -> set[str]:
        """Names of the modules of our package that this file imports, inside functions too."""
        names = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    first, _, rest = alias.name.partition(".")
                    if first == PACKAGE and rest:
                        names.add(rest.partition(".")[0])
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                if node.level == 0:
                    first, _, module = module.partition(".")
                    if first != PACKAGE:
                        continue
                elif node.level > 1 or not self.is_ours:
                    continue
                if module:
                    names.add(module.partition(".")[0])
                else:  # from utils import data: a module, or a name that __init__.py defines
                    names.update(alias.name for alias in node.names if is_module(alias.name))
        return names

    def imported_packages(self) -> set[str]:
        """Top-level names of all other packages that this file imports, as in the import."""
        names = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module.partition(".")[0])
        return names - set(sys.stdlib_module_names) - {PACKAGE}

    def rewritten(self, package: str, scripts: list[str]) -> str:
        """The text of the copy.

        Imports of `utils` become imports of `package`; `scripts/NAME.py` becomes `NAME.py` for each
        name in `scripts`; lines that make `utils` importable are dropped.
        """
        text = self.text
        for start, end, new in sorted(set(self._edits(package, scripts)), reverse=True):
            text = text[:start] + new + text[end:]
        return drop_lines(text, self._path_lines())

    def _edits(self, package: str, scripts: list[str]) -> Iterator[tuple[int, int, str]]:
        """Replacements as (start, end, new text); none of them adds or removes a line."""
        starts = [0]
        for line in lines_of(self.text):
            starts.append(starts[-1] + len(line))

        def offset(line: int, column: int) -> int:
            return starts[line - 1] + column

        def offset_of(node) -> int:  # ast counts the bytes of a line in UTF-8, from 0
            begin = starts[node.lineno - 1]
            line = self.text[begin : starts[node.lineno]]
            return begin + len(line.encode()[: node.col_offset].decode(errors="ignore"))

        documentation = {
            offset_of(node.value)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        strings = []
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            kind = tokenize.tok_name[token.type]
            if kind not in ("COMMENT", "STRING", "FSTRING_MIDDLE"):
                continue
            start, end = offset(*token.start), offset(*token.end)
            strings.append((start, end))
            old = self.text[start:end]
            new = rename_in_text(old, package, scripts)
            if kind == "COMMENT" or start in documentation:
                new = PACKAGE_AS_WORD.sub(package, new)
            if new != old:
                yield start, end, new
        for start in self._names_in_code(offset_of):
            # Before Python 3.12 an f-string is one token, which was renamed as text above.
            in_string = any(begin <= start < end for begin, end in strings)
            if not in_string and self.text.startswith(PACKAGE, start):
                yield start, start + len(PACKAGE), package

    def _names_in_code(self, offset_of) -> Iterator[int]:
        """Where the code (not its text) has the name of our package."""
        package_is_bound = False
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.partition(".")[0] == PACKAGE:
                        yield offset_of(alias)
                        package_is_bound = package_is_bound or alias.asname is None
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                start = offset_of(node)
                start += re.match(r"from\s+", self.text[start:]).end()
                if node.module.partition(".")[0] == PACKAGE:
                    yield start
        if package_is_bound:  # import utils.datasets.images_in_memory; utils.data.load()
            for node in ast.walk(self.tree):
                if isinstance(node, ast.Name) and node.id == PACKAGE:
                    yield offset_of(node)

    def _path_lines(self) -> set[int]:
        """Numbers, from 1, of the lines that make `utils` importable and are not needed then."""
        lines = lines_of(self.text)
        dropped = [node for node in self.tree.body if self._makes_importable(node)]
        numbers = set()
        for node in dropped:
            numbers.update(range(node.lineno, node.end_lineno + 1))
            above = node.lineno - 1
            while above > 0 and lines[above - 1].startswith("#"):
                numbers.add(above)
                above -= 1
        if not dropped:
            return numbers
        inside = {id(child) for node in dropped for child in ast.walk(node)}
        used = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name) and id(node) not in inside:
                used.add(node.id)
        needed = {child.id for node in dropped for child in ast.walk(node) if is_name(child)}
        for node in self.tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)) and len(node.names) == 1:
                name = node.names[0].asname or node.names[0].name
                if name in needed - used:
                    numbers.update(range(node.lineno, node.end_lineno + 1))
        return numbers

    def _makes_importable(self, node: ast.stmt) -> bool:
        """Whether a statement is sys.path.insert(0, the folder that holds our package)."""
        if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            return False
        call = node.value
        if ast.unparse(call.func) not in ("sys.path.insert", "sys.path.append") or not call.args:
            return False
        argument = call.args[-1]
        if isinstance(argument, ast.Constant):
            return Path(str(argument.value)).resolve() == ROOT
        found = FOLDER_ABOVE.fullmatch(ast.unparse(argument))
        if found is None:
            return False
        if found["index"] is not None:
            index = int(found["index"])
        else:
            index = found["chain"].count(".parent") - 1
        parents = self.path.resolve().parents
        return index < len(parents) and parents[index] == ROOT


def lines_of(text: str) -> list[str]:
    """The lines, with their ends, as Python counts them: str.splitlines also ends one at a \\f."""
    return io.StringIO(text).readlines()


def is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Name)


def is_module(name: str) -> bool:
    return (ROOT / PACKAGE / f"{name}.py").is_file()


def rename_in_text(text: str, package: str, scripts: list[str]) -> str:
    """Rename the package, and the scripts' paths, in a comment, a string or a page."""
    text = PACKAGE_IN_TEXT.sub(lambda found: (found[1] or "") + package, text)
    for name in scripts:
        text = re.sub(rf"(?<![\w./-])scripts/{re.escape(name)}\.py\b", f"{name}.py", text)
    return text


def drop_lines(text: str, numbers: set[int]) -> str:
    """Drop lines, and a blank line below them if there is one above them too."""
    kept = []
    after_dropped = False
    for number, line in enumerate(lines_of(text), start=1):
        if number in numbers:
            after_dropped = True
            continue
        blank_above = not kept or not kept[-1].strip()
        if after_dropped and blank_above and not line.strip():
            continue
        kept.append(line)
        after_dropped = False
    return "".join(kept)


def commands() -> list[str]:
    """The modules of our package that are programs: python -m utils.NAME."""
    names = []
    for path in sorted((ROOT / PACKAGE).glob("*.py")):
        if path.stem != "take" and '\nif __name__ == "__main__":' in path.read_text():
            names.append(path.stem)
    return names


def find(word: str) -> Path:
    """The file that a SCRIPT argument means. Raises: SystemExit if there is none."""
    scripts = sorted(path.stem for path in (ROOT / "scripts").glob("*.py"))
    if word in scripts:
        return ROOT / "scripts" / f"{word}.py"
    if word in commands():
        return ROOT / PACKAGE / f"{word}.py"
    path = Path(word).resolve()
    if path.suffix != ".py" or not path.is_file():
        ours = ", ".join([*scripts, *commands()])
        stop(f"SCRIPT {word} does not exist: pass one of {ours}, or the path of a .py file")
    return path


def closure(sources: list[Source]) -> dict[str, Source]:
    """The modules of our package among the sources, and those that these import in any way.

    Raises: SystemExit if one of them imports a module that our package does not have.
    """
    modules = {source.path.stem: source for source in sources if source.is_ours}
    to_do = list(sources)
    while to_do:
        source = to_do.pop()
        names = source.imported_modules()
        if names or source.is_ours:
            names.add("__init__")
        for name in sorted(names - modules.keys()):
            if not is_module(name):
                shown = os.path.relpath(source.path)
                stop(f"{shown} imports {PACKAGE}.{name}, and there is no such module here")
            modules[name] = Source(ROOT / PACKAGE / f"{name}.py")
            to_do.append(modules[name])
    return modules


def distribution(requirement: str) -> str:
    """The normalised name at the start of a line of requirements.txt, or of an import."""
    name = re.match(r"[\w.-]*", DISTRIBUTIONS.get(requirement, requirement))[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(packages: set[str]) -> str:
    """Our requirements.txt with only the lines of these packages, by their names in an import."""
    wanted = {distribution(name) for name in packages}
    lines = []
    for line in (ROOT / "requirements.txt").read_text().splitlines(keepends=True):
        if line.startswith("#") or distribution(line) in wanted:
            lines.append(line)
    return "".join(lines)


def missing_requirements(packages: set[str]) -> set[str]:
    """The packages that our requirements.txt does not have, by their names in an import."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    have = {distribution(line) for line in lines}
    return {name for name in packages if distribution(name) not in have}


def check_package_name(name: str, scripts: list[str], packages: set[str]) -> None:
    """Raises: SystemExit if the package could not be imported by this name, or hides another."""
    way_out = "pass another --package"
    if not name.isidentifier() or keyword.iskeyword(name):
        stop(f"--package {name} is not a Python identifier: {way_out}")
    if name in sys.stdlib_module_names:
        stop(f"--package {name} is the name of a module of the standard library: {way_out}")
    if name in scripts:
        stop(f"--package {name} is the name of the script too: {way_out}")
    if name in packages:
        stop(f"--package {name} is the name of a package that is imported: {way_out}")
    if name == CONFIGS:
        stop(f"--package {name} is the name of the folder with the configs: {way_out}")


def config_files(package: str, script: str) -> dict[Path, bytes]:
    """The configs by their path in the copy, with the name of the script in their commands."""
    files = {}
    for path in sorted((ROOT / CONFIGS).rglob("*")):
        if path.suffix in CONFIG_SUFFIXES:
            text = rename_in_text(path.read_text(), package, [])
            text = re.sub(r"(?<![\w./-])scripts/\w+\.py\b", f"{script}.py", text)
            files[path.relative_to(ROOT)] = text.encode()
    return files


def pages(package: str, scripts: list[str], modules: dict[str, Source]) -> dict[Path, bytes]:
    """The pages of our package that its modules name, by their path in the copy."""
    files = {}
    for path in sorted((ROOT / PACKAGE).glob("*.md")):
        if any(f"{PACKAGE}/{path.name}" in module.text for module in modules.values()):
            text = rename_in_text(path.read_text(), package, scripts)
            files[Path(package) / path.name] = text.encode()
    return files


def data_files() -> dict[Path, bytes]:
    """The bundled data by their path in the copy. Raises: SystemExit if they are not here."""
    folder = ROOT / "data" / "mnist"
    if not folder.is_dir():
        stop(f"--with_data: {folder} does not exist, leave the flag out")
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(ROOT): path.read_bytes() for path in paths}


def check_folder(folder: Path, names: list[Path]) -> None:
    """Raises: SystemExit if a file would be overwritten, or a folder cannot be made."""
    for path in (folder, *folder.absolute().parents):
        if path.exists() and not path.is_dir():
            stop(f"{path} is a file: FOLDER {folder} cannot be made, pass another one")
    taken = [name for name in names if os.path.lexists(folder / name)]
    for name in names:
        for parent in list(name.parents)[:-1]:
            if os.path.lexists(folder / parent) and not (folder / parent).is_dir():
                taken.append(parent)
    if taken:
        stop(
            f"{folder} already has {taken[0]}, and nothing is overwritten: pass another FOLDER, or remove what is there"
        )


def write_files(folder: Path, files: dict[Path, bytes]) -> None:
    """Write new files. Raises: SystemExit if one cannot be written; then none of them stays."""
    written = []
    try:
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "xb") as file:  # x: fails if the file exists by now
                written.append(path)
                file.write(content)
    except OSError as error:
        for path in written:
            path.unlink()
        stop(f"{path} cannot be written: {error.strerror}; the files written before are removed")


def take(words: list[str], folder: Path, package: str, with_data: bool) -> str:
    """Copy, and return what was copied and how to run it.

    words: the SCRIPT arguments. Raises: SystemExit, before anything is written, if a script does
    not exist, the name of the package does not fit, or a file would be overwritten.
    """
    entries = [Source(find(word)) for word in words]
    programs = [entry.path.stem for entry in entries if entry.is_ours]
    scripts = [entry for entry in entries if not entry.is_ours]
    names = [script.path.stem for script in scripts]
    if len(set(names)) < len(names):
        stop(f"SCRIPT {' '.join(words)}: two of them have the same name, copy them one by one")
    modules = closure(entries)

    packages = set()
    for source in [*scripts, *modules.values()]:
        packages |= source.imported_packages()
    beside = set()
    for script in scripts:
        for name in script.imported_packages():
            path = script.path.parent / name
            if path.with_suffix(".py").is_file() or path.is_dir():
                beside.add(name)
    check_package_name(package, names, packages)

    files = {}
    for script in scripts:
        files[Path(f"{script.path.stem}.py")] = script.rewritten(package, names).encode()
    for name, module in sorted(modules.items()):
        text = module.rewritten(package, names)
        if name == "__init__":
            text = ORIGIN + text
        files[Path(package) / f"{name}.py"] = text.encode()
    texts = pages(package, names, modules)
    files.update(texts)
    files.update(config_files(package, names[0] if names else "your_script"))
    files[Path("LICENSE")] = (ROOT / "LICENSE").read_bytes()
    files[Path("requirements.txt")] = requirements(packages).encode()
    if with_data:
        files.update(data_files())
    check_folder(folder, list(files))
    write_files(folder, files)

    lines = [f"copied to {folder}"]
    lines += [f"  {name}.py" for name in names]
    if modules:
        count = plural(len(modules) - 1, "module")
        shown = sorted(modules.keys() - {"__init__"}) + [path.name for path in texts]
        lines.append(f"  {package}/  {count}: {', '.join(shown)}")
    lines.append(f"  {CONFIGS}/, LICENSE, requirements.txt" + (", data/mnist/" if with_data else ""))
    if beside:
        lines.append(f"not copied, and imported by the script: {', '.join(sorted(beside))}")
    unknown = missing_requirements(packages - beside)
    if unknown:
        lines.append(f"not in requirements.txt, and imported: {', '.join(sorted(unknown))}")
    if not with_data and any("BUNDLED_MNIST" in script.text for script in scripts):
        lines.append("data/mnist is not copied: pass --dataset to the script, or --with_data here")
    lines.append(f"to run it, in {shlex.quote(str(folder))}")
    lines.append("  pip install -r requirements.txt")
    for name in names:
        lines.append(f"  accelerate launch --config_file {CONFIGS}/cpu.yaml {name}.py")
    lines += [f"  python -m {package}.{name}" for name in programs]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PACKAGE}.take", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument(
        "script",
        metavar="SCRIPT",
        nargs="+",
        help="mnist_mlp or another name in scripts/, doctor, prove, or the path of a script of "
        f"your own that imports from {PACKAGE}",
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="made if it does not exist")
    parser.add_argument(
        "--package", metavar="NAME", default="train_utils", help=f"name of the copy of {PACKAGE} (default: train_utils)"
    )
    parser.add_argument("--with_data", action="store_true", help="copy data/mnist too, 10 MB")
    args = parser.parse_args()
    print(take(args.script, args.folder, args.package, args.with_data))


if __name__ == "__main__":
    main()
