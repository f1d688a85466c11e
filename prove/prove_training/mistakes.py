"""The mistakes that `stages` names: each is a section of MISTAKES.md, whose quotation says what to do."""

import functools
from pathlib import Path

PAGE = Path(__file__).with_name("MISTAKES.md")
FRAMEWORKS = ("Trainer", "Lightning", "By hand")  # the last one: the script averages its gradients itself


@functools.cache
def sections() -> dict[str, str]:
    """The text of each mistake, by its id."""
    parts = [part.partition("\n") for part in PAGE.read_text().split("\n## ")[1:]]
    return {heading: text for heading, _, text in parts if heading[0].islower()}


def id_of(kind: str) -> str:
    """The heading of a kind of finding, such as "not-reduced"."""
    return kind.replace("_", "-")


def advice(kind: str, framework: str = "") -> str:
    """What to do about a mistake.

    Args:
        framework: one of FRAMEWORKS, whose own advice comes first, or "".
    """
    lines = [line[1:].strip() for line in sections()[id_of(kind)].splitlines() if line.startswith(">")]
    said = [" ".join(part.split()) for part in "\n".join(lines).split("\n\n")]
    own = [part.removeprefix(f"{framework}: ") for part in said if part.startswith(f"{framework}: ")]
    return (own or said)[0]


def correction(kind: str) -> list[str]:
    """The wrong lines of an example, and the right ones, as a diff."""
    return sections()[id_of(kind)].partition("```diff\n")[2].partition("```")[0].splitlines()
