"""The files of a folder of data, and the splits that they belong to: one rule for all data."""

import contextlib
import glob
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..console import is_local_main, join, show, stop

# The words that `datasets` takes for splits.
SPLIT_WORDS = dict.fromkeys(("train", "training"), "train") | dict.fromkeys(
    ("validation", "valid", "val", "dev"), "validation"
)
SPLIT_WORDS |= dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")
TEST_SPLITS = ("test", "validation")  # the first of these that exists is used
BESIDE_DATA = re.compile(
    r"(readme|licen[cs]e|copying|notice|citation|dataset_infos?)(\.\w+)?|(_success|_.*metadata|thumbs\.db|desktop\.ini)"
    r"|class(e|name)s\.txt"
)


def list_files(dataset: str | Path) -> tuple[dict[str, str], list[str]]:
    """The paths of a folder's files by their names in it, in order, and the names of what only lies beside data.

    Links are followed, and hidden files are left out. Both are empty for a Hub id.
    """
    files = {}

    def add(folder: str, within: str) -> None:
        for entry in os.scandir(folder):
            if entry.name.startswith(".") or entry.name == "__MACOSX":
                continue
            if entry.is_dir():  # of a link that leads back to itself, too many levels at last
                add(entry.path, f"{within}{entry.name}/")
            else:
                files[within + entry.name] = entry.path

    if os.path.isdir(dataset):
        with stop_if_unreadable(str(dataset)):
            add(str(dataset), "")
    beside = sorted(name for name in files if BESIDE_DATA.fullmatch(name.rpartition("/")[2].lower()))
    beside = beside if len(beside) < len(files) else []
    return {name: files[name] for name in sorted(files.keys() - beside)}, beside


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


def choose_splits(dataset: str, splits: dict) -> tuple[dict, list[str]]:
    """Of splits by their names, "train" and "test", and what is left out; alone, a split without a word is "train"."""
    by_kind = {SPLIT_WORDS.get(name, name or "train"): name for name in splits}
    if "train" not in by_kind:
        stop(f"--dataset {dataset} has the splits {', '.join(splits)}, but no train")
    used = [by_kind[kind] for kind in ("train", *TEST_SPLITS) if kind in by_kind][:2]
    left_out = [f"the split {name}" for name in splits if name not in used]
    return dict(zip(("train", "test"), map(splits.get, used), strict=False)), left_out


def find_data(dataset: str, kinds: dict[str, str], other: str, cache_dir: str | None) -> tuple[str, dict, list[str]]:
    """The kind of a dataset, its splits "train" and, if there is one, "test", and what is left out.

    `kinds` says what files are by the end of their names, and `other` what all others are. Parquet and CSV files and a
    Hub id are "rows", of which a split is a `datasets.Dataset`; of others it is {name: path}.
    """
    files, left_out = list_files(dataset)
    found = {name: next((kinds[end] for end in kinds if name.lower().endswith(end)), other) for name in files}
    of_kind = {kind: name for name, kind in found.items()}
    if len(of_kind) > 1:
        stop(f"--dataset {dataset} has files of several kinds, {' and '.join(of_kind.values())}: keep them apart")
    kind, splits = next(iter(of_kind), None), {}
    for name, path in files.items():
        splits.setdefault(find_split(dataset, name)[0], {})[name] = path
    if "" in splits and len(splits) > 1:
        words = f"the name of {next(iter(splits['']))} says no split, as those of other files do"
        stop(f"--dataset {dataset}: {words}: move all files into folders train/ and test/, or all into train/")
    if kind in ("parquet", "csv", None):
        kind, splits = "rows", load_rows(dataset, kind, splits, cache_dir)
    splits, others = choose_splits(dataset, splits)
    return kind, splits, left_out + others


def load_rows(dataset: str, kind: str | None, files: dict[str, dict[str, str]], cache_dir: str | None) -> dict:
    """The splits of a dataset, each a `datasets.Dataset`; of a Hub id, if there is no kind of files."""
    import datasets  # slow: errors in flags should not wait for it
    import pyarrow.parquet

    if kind or not is_local_main():
        datasets.disable_progress_bars()
    if not kind and (not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", dataset) or Path(dataset).exists()):
        stop(f"--dataset {dataset} is neither a folder with data nor a Hub id")
    try:
        if not kind:
            return datasets.load_dataset(dataset, cache_dir=cache_dir)
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # it would ask the Hub, for 3 s or more without a network
        paths = {split or "whole": [*map(os.path.abspath, files[split].values())] for split in files}
        options = {"keep_default_na": False} if kind == "csv" else {}  # else the texts "NA" and "null" are left out
        if kind == "parquet":  # for all files, `datasets` takes the names of the classes of the first
            schemas = map(pyarrow.parquet.read_schema, itertools.chain(*paths.values()))
            features = [datasets.Features.from_arrow_schema(schema).values() for schema in schemas]
            classes = {str([feature for feature in each if hasattr(feature, "names")]) for each in features}
            if len(classes) > 1:
                raise ValueError(f"its files number their classes differently: {' and '.join(classes)}")
        # A name with [brackets] would be taken for a pattern, and match others.
        paths = {split: [*map(glob.escape, of_split)] for split, of_split in paths.items()}
        rows = datasets.load_dataset(kind, data_files=paths, cache_dir=cache_dir, **options)
        return {split: rows[split or "whole"] for split in files}
    except Exception as error:  # some twenty types; all of them mean that there is no data
        reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        stop(f"--dataset {dataset} cannot be read as {kind or 'a dataset of the Hub'}: {reason:.500}")


@contextlib.contextmanager
def stop_if_unreadable(file: str) -> Iterator[None]:
    """End the process, with the name of the file, where the code below cannot read it."""
    try:
        yield
    except (OSError, ValueError) as error:
        place, reason = getattr(error, "filename", None) or file, getattr(error, "strerror", None) or error
        stop(f"--dataset: {place} cannot be read: {reason}")


def announce(dataset: str, used: str, left_out: list[str]) -> None:
    """Print what is read of a dataset, and what is not."""
    if is_local_main():
        show(f"--dataset {dataset}: {used}" + f"; left out: {join(left_out)}" * bool(left_out))
