"""Each message that when_something_goes_wrong.md quotes is one that the code prints."""

import ast
import re

from conftest import ROOT
from pages import guide, section

# Of torch, torchrun, Accelerate and the kernel.
OTHERS = """
    EADDRINUSE | port `29500`, but another process is utilizing it | ValueError: Cuda is not available.
    The config file at FILE had unknown keys (['ipex_config'])
    Module 'accuracy' doesn't exist on the Hugging Face Hub either | SignalException
    unable to allocate shared memory(shm) for file | DataLoader worker (pid 7) is killed by signal: Killed
    ConnectionResetError | BrokenPipeError | EOFError | rebuild_storage_fd
    'DataLoader' object has no attribute 'num_samples'
    Bus error | Expected to mark a variable ready only once | Expected to have finished reduction in the prior iteration
"""


def texts_of(source: str):
    """The string literals; what an f-string fills in is a null character."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_each_quoted_message_is_in_the_code():
    files = [file for room in ("utils", "scripts", "tools") for file in (ROOT / room).rglob("*.py")]
    printed = "\n".join([OTHERS, *(text for file in files for text in texts_of(file.read_text()))])
    table = section(guide("when_something_goes_wrong"), "What a message means")
    quoted = re.findall(r"`([^`]+)`", "\n".join(re.findall(r"^\|([^|]*)\|", table, re.M)))
    assert len(quoted) > 15
    for message in quoted:
        for part in re.split(r"…|\.{3}|\d+", message):
            assert part.strip(" .") in printed, message
