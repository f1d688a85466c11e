"""Each call in a Python block of a page has arguments that the function of that name takes."""

import ast
import builtins
import contextlib
import functools
import importlib
import inspect
import pkgutil
import re
import textwrap

import pytest
import torch
from conftest import ROOT
from pages import TEXTS
from torch import nn

import utils
from utils.accelerator import TrainingAccelerator
from utils.loader import Batch, GlobalLoader
from utils.metrics import Metrics
from utils.run import Run

FENCE = re.compile(r"^ *```(?:py|python|diff)\n(.*?)^ *```$", re.S | re.M)
PROVE = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "prove").rglob("*.md"))}
PAGES = {page: FENCE.findall(text) for page, text in {**TEXTS, **PROVE}.items()}
OBJECTS = {  # what a name on a page is an object of, if the block does not say it
    **{"run": Run, "accelerator": TrainingAccelerator, "metrics": Metrics, "batch": Batch, "others": Batch},
    **dict.fromkeys(["train_loader", "test_loader", "labelled_loader", "unlabelled_loader"], GlobalLoader),
    "optimizer": torch.optim.Optimizer,
}


@functools.cache
def names_on_pages() -> dict:
    """What blocks use without importing it: some modules, and what is defined in utils/."""
    known = {name: importlib.import_module(name) for name in ("argparse", "atexit", "functools", "torch", "pytest")}
    known |= {**vars(builtins), "nn": nn, "F": nn.functional, "dist": torch.distributed}
    for _, name, _ in pkgutil.walk_packages(utils.__path__, "utils."):
        module = importlib.import_module(name)
        known |= {key: value for key, value in vars(module).items() if getattr(value, "__module__", None) == name}
    return {**known, "launch": utils.launch, "fsdp": utils.parallel.fsdp}


def names_and_classes(tree: ast.Module) -> tuple[dict, dict[str, type]]:
    """The names that a block may use, and the classes of objects."""
    known, classes = {**names_on_pages()}, {**OBJECTS}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)):
            node = ast.parse(ast.unparse(node)).body[0]
            node.decorator_list = []
            with contextlib.suppress(ImportError):  # of a library that is not installed
                exec(ast.unparse(node), known)
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            made_by = known.get(ast.unparse(node.value.func))
            if inspect.isclass(made_by):
                classes[ast.unparse(node.targets[0])] = made_by
    return known, classes


def bound_calls(block: str) -> list[str]:
    """The calls of functions that are known here; TypeError or AttributeError at a wrong one."""
    tree = ast.parse(re.sub(r"^\.\.\.\n(?= )", "if ...:\n", block, flags=re.M))
    (known, classes), bound = names_and_classes(tree), []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        path = ast.unparse(call.func)
        owner, _, name = path.rpartition(".")
        if not re.fullmatch(r"[\w.]+", path):  # a method of what another call returns
            continue
        try:
            function = functools.partial(getattr(classes[owner], name), None) if owner in classes else eval(path, known)
            signature = inspect.signature(function)
        except (NameError, TypeError, ValueError):  # an object of the user; a function of C, such as torch.cat
            continue
        arguments = [part for part in call.args if not isinstance(part, ast.Starred) and ast.unparse(part) != "..."]
        keywords = [keyword.arg for keyword in call.keywords if keyword.arg]
        left_out = len(arguments) < len(call.args) or len(keywords) < len(call.keywords)
        bind = signature.bind_partial if left_out else signature.bind
        bind(*arguments, **dict.fromkeys(keywords))
        bound.append(path)
    return bound


def right_lines(block: str) -> str:
    """A block without its indentation, and without the lines that a diff takes away."""
    if re.search(r"^[-+]", block, re.M):
        block = re.sub(r"^[+ ]", "", re.sub(r"^-.*\n", "", block, flags=re.M), flags=re.M)
        block = re.sub(r":( *#.*)?\n\Z", r": ...\n", block)  # a loop without its body
    return textwrap.dedent(block)


@pytest.mark.filterwarnings("ignore:Unknown pytest.mark.prove")  # known where prove-training is installed
@pytest.mark.parametrize("page", [page for page, blocks in PAGES.items() if blocks])
def test_the_calls_on_a_page_have_arguments_that_their_functions_take(page):
    bound = [call for block in PAGES[page] for call in bound_calls(right_lines(block))]
    assert bound or len(PAGES[page]) == 1


@pytest.mark.parametrize(
    "block",
    [
        "loader = GlobalLoader(data, 64, accelerator, sed=0)",
        "run.start(..., checkpoints={})",
        "loader = GlobalLoader(data, 64, accelerator)\nloader.from_step()",
        "from utils.data.tar_files import TarFiles\nTarFiles(decode, ['wav'], 'clips')\nTarFiles('clips')",
        "import safetensors.torch\nsafetensors.torch.load_files('model.safetensors')",
    ],
)
def test_a_call_that_would_fail_is_found(block):
    with pytest.raises((TypeError, AttributeError)):
        bound_calls(block)
