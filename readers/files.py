"""The files of a folder of data, and the splits that they belong to: one rule for all readers."""

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from utils.console import is_local_main, plural, show, stop

# The words that `datasets` takes for splits.
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
}
TEST_SPLITS = ("test", "validation")  # the first of these that exists is used
BESIDE_DATA = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|dataset_infos?)(\.\w+)?|(_success|_.*metadata|thumbs\.db|desktop\.ini)"
)


def list_files(dataset: str | Path) -> tuple[dict[str, str], list[str]]:
    """The paths of a folder's files by their names in it, in order, and the names of what only lies beside data.

    Links are followed, and hidden files are left out. Both are empty for a Hub id.
    """
    files = {}

    def add(folder: str, within: str, above: tuple[str, ...]) -> None:
        above = *above, os.path.realpath(folder)
        for entry in os.scandir(folder):
            if entry.name.startswith(".") or entry.name == "__MACOSX":
                continue
            if not entry.is_dir():
                files[within + entry.name] = entry.path
                if not entry.is_file():
                    stop(f"--dataset {dataset}: {entry.path} is not a file, or a link to nothing: remove it")
            elif entry.is_symlink() and os.path.realpath(entry.path) in above:
                stop(f"--dataset {dataset} has a link to a folder, {entry.path}, that leads back to itself: remove it")
            else:
                add(entry.path, f"{within}{entry.name}/", above)

    if os.path.isdir(dataset):
        with stop_if_unreadable(str(dataset)):
            add(str(dataset), "", tuple(map(str, Path(os.path.realpath(dataset)).parents)))
    beside = [name for name in files if BESIDE_DATA.fullmatch(name.rpartition("/")[2].lower())]
    if len(beside) == len(files):
        beside = []
    return {name: files[name] for name in sorted(files.keys() - beside)}, sorted(beside)


def find_split(dataset: str, name: str) -> tuple[str, int]:
    """The split of a file and the part of its path that says so, the first with one of SPLIT_WORDS; "" and -1: none."""
    for number, part in enumerate(name.split("/")):
        words = SPLIT_WORDS.keys() & re.split(r"[-._ 0-9]+", part.lower())
        splits = {SPLIT_WORDS[word] for word in words}
        if len(splits) > 1:
            stop(f"--dataset {dataset}: {name} has words of two splits, {' and '.join(sorted(words))}: rename it")
        if splits:
            return splits.pop(), number
    return "", -1


def split_files(dataset: str, files: dict[str, str]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """{"train": files, "test": files}, or {"": files} if no name has one of SPLIT_WORDS; and what is left out.

    Without files for testing, they are all in "train".
    """
    splits = {}
    for name, path in files.items():
        splits.setdefault(find_split(dataset, name)[0], {})[name] = path
    if "" in splits and len(splits) > 1:
        named = next(name for name in files if name not in splits[""])
        stop(
            f"--dataset {dataset}: the name of {named} says its split, and that of {next(iter(splits['']))} does not: "
            "move all files into folders train/ and test/, or all into one folder train/"
        )
    if files and not {"", "train"} & {*splits}:
        stop(f"--dataset {dataset} has the splits {', '.join(splits)}, but no train")
    tests = [split for split in TEST_SPLITS if split in splits]
    left_out = [f"{plural(len(splits[split]), 'file')} of {split}" for split in tests[1:]]
    used = {split: splits[split] for split in ("", "train") if split in splits}
    return used | ({"test": splits[tests[0]]} if tests else {}), left_out


@contextlib.contextmanager
def stop_if_unreadable(file: str) -> Iterator[None]:
    """End the process, with the name of the file, where the code below cannot read it."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        stop(f"--dataset: {getattr(error, 'filename', None) or file} cannot be read: {reason}")


def read_schema(file: str):
    """The pyarrow.Schema of a parquet file."""
    import pyarrow.parquet

    with stop_if_unreadable(file):
        return pyarrow.parquet.read_schema(file)


def announce(dataset: str, used: str, left_out: list[str]) -> None:
    """Print what is read of a dataset, and what is not."""
    if is_local_main():
        names = ", ".join(left_out[:9]) + (f" and {len(left_out) - 9} more" if len(left_out) > 9 else "")
        show(f"--dataset {dataset}: {used}" + (f"; left out: {names}" if names else ""))
