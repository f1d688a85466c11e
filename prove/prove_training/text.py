"""Lines on the screen, and the words in them."""

import os
import re
import sys

COLOURS = {"red": 31, "green": 32, "yellow": 33}
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")  # characters that control a terminal
COLOUR = re.compile(r"\x1b\[[\d;]*m")


class CannotTell(Exception):
    """Why there is no verdict."""


def show(text: str, colour: str = "", file=None) -> None:
    """Print a line, its first word in a colour on a terminal."""
    file = file or sys.stdout
    text = CONTROL.sub(lambda match: ascii(match[0])[1:-1], without_colours(text))
    if colour and file.isatty() and not os.environ.get("NO_COLOR"):
        first, space, others = text.partition(" ")
        text = f"\033[1;{COLOURS[colour]}m{first}\033[0m{space}{others}"
    print(text, file=file, flush=True)


def without_colours(text: str) -> str:
    return COLOUR.sub("", text)


def plural(count: int, word: str) -> str:
    """`count` and `word` in the singular or the plural: "1 process", "2 processes"."""
    ending = "" if count == 1 else "es" if word.endswith(("s", "ch")) else "s"
    return f"{count} {word}{ending}"


def and_join(parts: list) -> str:
    *others, last = map(str, parts or [""])
    return f"{', '.join(others)} and {last}" if others else last
