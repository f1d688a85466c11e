"""utils/: each module says what it is for, and imports point in one direction."""

import ast
import graphlib
import importlib.util
import re

from conftest import ROOT


def modules() -> dict[str, ast.Module]:
    """The parsed files of utils/ by name, such as utils.parallel.fsdp; a package has the name of its folder."""
    files = [file for file in (ROOT / "utils").rglob("*.py") if file != ROOT / "utils" / "__init__.py"]
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for file in files]
    return {name: ast.parse(file.read_text()) for name, file in zip(names, files, strict=True)}


def imports_of(name: str, is_package: bool, tree: ast.Module) -> set[str]:
    """Everything that a file imports, by full name, also inside of functions: of `from a import b` both a and a.b."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = name if is_package else name.rpartition(".")[0]
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def test_no_imports_form_a_circle_or_point_to_what_uses_the_folder():
    found, graph = modules(), {}
    for name, tree in found.items():
        imported = imports_of(name, any(other.startswith(f"{name}.") for other in found), tree)
        above = {"scripts", "tools", "benchmarks", "examples", "tests", "prove", "prove_training"}
        assert not {other for other in imported if other.split(".")[0] in above}, name
        if not name.startswith("utils.data."):  # so a copy can do without that folder
            assert not {other for other in imported if other.startswith("utils.data")}, name
        # A package's own files belong to it: they may use each other, but in a circle.
        graph[name] = imported & found.keys() - {name}
    assert sum(map(len, graph.values())) >= len(graph)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_the_first_line_of_each_module_says_what_it_is_for():
    for name, tree in modules().items():
        assert not tree.body or ast.get_docstring(tree), name


def test_the_files_to_read_first_are_as_long_as_it_says():
    """Within a tenth: `name.py[, from X on]  lines  what it has`."""
    text = ast.get_docstring(ast.parse((ROOT / "utils" / "__init__.py").read_text()))
    rows = re.findall(r"^ *([\w/.]+)(?:, from (\w+) on)? {2,}(\d+) ", text, re.M)
    assert len(rows) == 8
    for name, first, said in rows:
        lines = (ROOT / name if "/" in name and (ROOT / name).exists() else ROOT / "utils" / name).read_text()
        lines = lines[lines.index(f"class {first}(") if first else 0 :].splitlines()
        assert abs(len(lines) - int(said)) <= int(said) / 10, (name, len(lines))
