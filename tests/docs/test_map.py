"""utils/__init__.py is the map of utils/: nothing is missing on it, and nothing on it is missing."""

import ast
import re

from conftest import ROOT

UTILS = ROOT / "utils"


def on_the_map() -> dict[str, set[str]]:
    """The names in each part of the docstring, by the room of the part: "" for the core and for the commands."""
    text = ast.get_docstring(ast.parse((UTILS / "__init__.py").read_text()))
    names, room = {}, ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            heading = re.match(r"(\w+/):", line)
            room = heading[1] if heading else ""
        elif entry := re.match(r"    ([\w/]+) {2,}\S", line):
            names.setdefault(room, set()).add(entry[1])
    return names


def modules(folder) -> set[str]:
    return {path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")}


def test_every_module_and_room_is_on_the_map_and_nothing_else():
    rooms = {f"{path.parent.name}/" for path in UTILS.glob("*/__init__.py")}
    listed = {room for room in on_the_map() if room}
    assert on_the_map()[""] == modules(UTILS) | (rooms - listed)
    for room in listed:
        assert on_the_map()[room] == modules(UTILS / room), room


def test_every_command_can_be_run_by_its_name():
    commands = {path.parent.name for path in UTILS.glob("*/__main__.py")}
    text = (UTILS / "__init__.py").read_text().partition("Commands:")[2]
    assert set(re.findall(r"^    (\w+)/", text, re.M)) == commands
