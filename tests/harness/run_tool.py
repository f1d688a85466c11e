"""A command of tools/ in this process."""

import sys
from unittest import mock


def run_tool(main, capsys, *words) -> tuple[int, str]:
    """The exit code of a command's `main`, and what it printed."""
    with mock.patch.object(sys, "argv", ["tool", *map(str, words)]):
        try:
            code = main()
        except SystemExit as stopped:
            code = stopped.code
    printed = capsys.readouterr()
    return code, printed.out + printed.err
