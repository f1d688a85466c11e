"""Helper of the scripts beside it: writes the pictures of what they measured."""

from collections.abc import Callable
from pathlib import Path

from utils.atomic_files import write_atomically
from utils.console import show


def save_picture(picture: Path, draw: Callable) -> None:
    """Write the matplotlib Figure that `draw()` returns as a PNG. Without matplotlib, a line says what to install."""
    try:
        figure = draw()
    except ModuleNotFoundError as error:
        show(f"{picture.name} is not drawn without {error.name}: pip install -r scripts/requirements.txt")
    else:
        write_atomically(picture, lambda part: figure.savefig(part, dpi=120))
