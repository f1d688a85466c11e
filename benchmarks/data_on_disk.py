"""Data that do not fit into memory.

    python benchmarks/data_on_disk.py

Two workers each; guides/data_beyond_memory.md says how to use what is measured.

- images, cold and warm: thousands of images/s, in a shuffled order and not decoded, from files of 50 kB and from tar
  files of 1000 of them; cold: none of them in the cache of the operating system. webdataset, where it is installed,
  reads the tar files from beginning to end, with a shuffle buffer of 1000
- tokens: MB/s from JSON lines to tokens on disk, with the same tokenizer: transformer.py's first run; `datasets` alone,
  load_dataset and map in batches, with two processes
"""

import functools
import json
import os
import random
import sys
import tarfile
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import datasets
import torch
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from utils.data.tar_files import TarFiles
from utils.data.text import STDLIB, find_sources, learn_tokenizer, load_tokens, read_documents

IMAGE = 50_000  # bytes
PER_TAR = 1000
WORKERS = 2


def parse_args():
    parser = common.make_parser(__doc__, rounds=3)
    parser.add_argument("--images", type=common.positive_int, default=20_000, help="number of images (%(default)s)")
    parser.add_argument("--megabytes", type=common.positive_int, default=100, help="of text (%(default)s)")
    return parser.parse_args()


def sizes_of(paths: list[Path]) -> list[int]:
    """Of files, which are read one after the other, as torchvision's ImageFolder does, and not decoded."""
    return [len(path.read_bytes()) for path in paths]


def size_of(sample: dict) -> int:
    return len(sample["jpg"])


def write_images(folder: Path, count: int) -> tuple[list[Path], list[Path]]:
    """The same images as files and in tar files."""
    files, tars = [], []
    for first in range(0, count, PER_TAR):
        tars.append(folder / f"{first // PER_TAR:03}.tar")
        with tarfile.open(tars[-1], "w") as tar:
            for number in range(first, min(first + PER_TAR, count)):
                files.append(folder / f"{number:06}.jpg")
                files[-1].write_bytes(os.urandom(IMAGE))
                tar.add(files[-1], files[-1].name)
    os.sync()  # what is not written yet would stay in the cache
    return files, tars


def leave_cache(paths: list[Path]) -> None:
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_all(loader, count: int, cold: list[Path] = ()) -> float:
    """Thousands of images/s, of which all have to come."""
    leave_cache(cold)
    began = time.perf_counter()
    found = [int(size) for sizes in loader for size in sizes]
    seconds = time.perf_counter() - began
    assert found == [IMAGE] * count
    return count / seconds / 1000


def loader_of(dataset, collate=None) -> DataLoader:
    order = torch.randperm(len(dataset)).tolist()
    return DataLoader(dataset, 64, sampler=order, num_workers=WORKERS, collate_fn=collate)


def webdataset_loader(tars: list[Path]) -> DataLoader:
    import webdataset

    # empty_check=False: a worker may have no file.
    samples = webdataset.WebDataset([*map(str, tars)], shardshuffle=len(tars), empty_check=False)
    return DataLoader(samples.shuffle(1000).map(size_of), 64, num_workers=WORKERS)


def images(args, folder: Path) -> dict[str, dict]:
    files, tars = write_images(folder, args.images)
    loaders = {"files": (loader_of(files, sizes_of), files)}
    if find_spec("webdataset"):
        loaders["webdataset"] = webdataset_loader(tars), tars
    loaders["TarFiles"] = loader_of(TarFiles(tars, size_of, cache_dir=str(folder))), tars
    ways = {way: functools.partial(read_all, loader, args.images) for way, (loader, _) in loaders.items()}
    cold = {way: functools.partial(ways[way], paths) for way, (_, paths) in loaders.items()}
    each = {"images, cold": cold, "images, warm": ways}
    return {part: common.take_turns(ways, args.rounds) for part, ways in each.items()}


def stdlib_texts() -> list[str]:
    """The sources of Python's standard library."""
    sources, column, _ = find_sources(STDLIB, None, None)
    return ["".join(parts) for *_, parts in read_documents(sources, column)]


def write_text(file: Path, size: int) -> None:
    """JSON lines with sources of Python's standard library."""
    texts = stdlib_texts()
    with open(file, "w") as out:
        while out.tell() < size:
            for text in random.sample(texts, 100):
                out.write(json.dumps({"text": text}) + "\n")


def tokens(args, folder: Path) -> dict[str, list[float]]:
    text = folder / "text" / "all.jsonl"
    text.parent.mkdir()
    write_text(text, args.megabytes * 10**6)
    size = text.stat().st_size / 1e6
    datasets.disable_progress_bars()
    tokenizer = learn_tokenizer(stdlib_texts(), 1024)
    tokenizer.save(str(folder / "tokenizer.json"))

    def tokenize(rows: dict) -> dict:
        encodings = tokenizer.encode_batch_fast(rows["text"], add_special_tokens=False)
        return {"ids": [encoding.ids for encoding in encodings]}

    def by_transformer() -> float:
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            began = time.perf_counter()
            load_tokens(str(text.parent), str(folder / "tokenizer.json"), 0, 128, cache)
            return size / (time.perf_counter() - began)

    def by_map() -> float:
        with tempfile.TemporaryDirectory(dir=folder) as cache:
            began = time.perf_counter()
            rows = datasets.load_dataset("json", data_files=str(text), cache_dir=cache, split="train")
            rows.map(tokenize, batched=True, num_proc=WORKERS, remove_columns="text")
            seconds = time.perf_counter() - began
        os.unsetenv("TOKENIZERS_PARALLELISM")  # `map` leaves it at false for this process, too
        return size / seconds

    return common.take_turns({"datasets.map": by_map, "transformer.py": by_transformer}, args.rounds)


def measure(args) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        return {**images(args, Path(folder)), "tokens": tokens(args, Path(folder))}


def report(measured) -> list[str]:
    return [common.compare("part", measured.items(), "1000 images/s or MB/s", "first", "{:.2f}")]


if __name__ == "__main__":
    common.main(parse_args(), measure, report)
