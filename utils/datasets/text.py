"""Text for language models: read from files, parquet or the Hub, split, and packed into lines of tokens."""

import gzip
import hashlib
import lzma
import math
import re
import sysconfig
from pathlib import Path

import numpy as np
import psutil
import torch
from torch.utils.data import TensorDataset

from ..console import stop
from .tokens import END

STDLIB = "stdlib"  # the --dataset that every machine has
# Folders of what is tests, generated from tables, or not there in every installation.
NOT_IN_STDLIB = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
FILLED_UP = -100  # what torch's cross_entropy ignores
TEST_PARTS = 32  # one part of the documents is for the test
ORDER3_BYTES = 2**24  # of the training text, that the order-3 model counts


class PackedText(TensorDataset):
    """Documents one after the other, END before and after each, cut into lines of `context` tokens; for GlobalLoader.

    A line may end within a document, and begin within one: each token but the first of all is predicted once.

    Args:
        documents: none of them empty.

    Attributes:
        tensors: tokens and the tokens that follow them, int16 or int32 (N, context) each. The last line is filled up
            with END, and with FILLED_UP to predict.
        tokens_per_byte: of the whole text; each END after a document is a token.
    """

    def __init__(self, documents: list[bytes], tokenizer, context: int):
        dtype = np.int16 if tokenizer.vocabulary <= 2**15 else np.int32
        parts = [np.full(1, END, dtype)]
        for document in documents:
            parts += [tokenizer.encode(document).astype(dtype), parts[0]]
        num_tokens = sum(map(len, parts)) - 1
        parts.append(np.full(-num_tokens % context, FILLED_UP, dtype))
        stream = torch.from_numpy(np.concatenate(parts))
        tokens = stream[:-1].clamp(min=END)
        super().__init__(tokens.view(-1, context), stream[1:].clone().view(-1, context))
        self.tokens_per_byte = num_tokens / sum(map(len, documents))

    def bits_per_byte(self, losses: torch.Tensor) -> torch.Tensor:
        """Of losses in nats per token. Their mean over all tokens is what a byte of the whole text costs, exactly."""
        return losses * (self.tokens_per_byte / math.log(2))


def count_targets(batch: list[torch.Tensor]) -> torch.Tensor:
    """How many tokens each line of a PackedText predicts, (N,): its weight in a mean over tokens."""
    _, targets = batch
    return (targets != FILLED_UP).sum(1)


def load_text(dataset: str) -> tuple[list[bytes], list[bytes]]:
    """The documents for training and for the test; the empty ones are left out.

    Args:
        dataset: "stdlib", the sources of Python's standard library; a folder of text files or of parquet files; or a
            Hub id. Rows of a data set have their text in the column `text`, or in the first one of strings.

    Raises:
        SystemExit: if there are not two documents, a file is not a text, or memory is too small for all of them.
    """
    folder = Path(sysconfig.get_path("stdlib") if dataset == STDLIB else dataset)
    if dataset == STDLIB:
        files = [file for file in folder.rglob("*.py") if NOT_IN_STDLIB.isdisjoint(file.relative_to(folder).parts)]
    elif not folder.is_dir() or any(folder.rglob("*.parquet")):
        return load_rows(dataset)
    else:
        files = [file for file in folder.rglob("*") if file.is_file()]
        files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
    check_memory(dataset, sum(file.stat().st_size for file in files))
    return split_by_hash(dataset, {file.relative_to(folder).as_posix(): read(file) for file in files})


def read(file: Path) -> bytes:
    """Raises: SystemExit if it is not a text."""
    with file.open("rb") as opened:
        content = opened.read(4096)
        if b"\0" not in content:
            content += opened.read()
    if b"\0" in content:
        stop(f"--dataset: {file} is not a text file, it has NUL bytes: remove it")
    return content


def check_memory(dataset: str, num_bytes: int) -> None:
    """Raises: SystemExit if memory cannot hold the text, its tokens and a copy of them."""
    available = psutil.virtual_memory().available
    if 5 * num_bytes > available:
        stop(
            f"--dataset {dataset} has {num_bytes / 1e9:.1f} GB of text, and all of it is kept in memory as tokens: "
            f"take at most {available / 5e9:.1f} GB, a fifth of the memory that is free"
        )


def split_by_hash(dataset: str, documents: dict[str, bytes]) -> tuple[list[bytes], list[bytes]]:
    """One part in TEST_PARTS of the named documents for the test: the same ones on every machine, in any order."""
    names = [name for name, document in documents.items() if document]
    if len(names) < 2:
        stop(
            f"--dataset {dataset} has {len(names)} text files or rows that are not empty: one of them is for the test, "
            "so two are needed; cut a long file into several"
        )
    names.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    num_test = math.ceil(len(names) / TEST_PARTS)
    test, train = sorted(names[:num_test]), sorted(names[num_test:])
    return [documents[name] for name in train], [documents[name] for name in test]


def load_rows(dataset: str) -> tuple[list[bytes], list[bytes]]:
    """As `load_text`, through `datasets.load_dataset`; without a test split, by the hash of each text."""
    import datasets  # not above: a wrong flag need not wait for it

    if not Path(dataset).is_dir() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", dataset):
        stop(f"--dataset {dataset} is not a folder, nor a Hub id such as roneneldan/TinyStories, nor {STDLIB}")
    datasets.disable_progress_bars()
    try:
        splits = datasets.load_dataset(dataset)
    except Exception as error:  # the library raises some twenty kinds here; all of them mean that there is no data
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        stop(f"--dataset {dataset} cannot be loaded: {reason}")
    check_memory(dataset, max(rows.dataset_size or 0 for rows in splits.values()))
    train, *tests = [splits[name] for name in ("train", "test", "validation", "val") if name in splits]
    texts = [text.replace("\0", "").encode() for text in train[text_column(dataset, train)]]
    if not tests:
        return split_by_hash(dataset, {hashlib.sha256(text).hexdigest(): text for text in texts})
    test_texts = [text.replace("\0", "").encode() for text in tests[0][text_column(dataset, tests[0])]]
    return list(filter(None, texts)), list(filter(None, test_texts))


def text_column(dataset: str, rows) -> str:
    columns = [name for name, kind in rows.features.items() if getattr(kind, "dtype", "") in ("string", "large_string")]
    if not columns:
        stop(f"--dataset {dataset} has the columns {', '.join(rows.features)}, and none of strings")
    return "text" if "text" in columns else columns[0]


def bits_per_byte_of_others(train: list[bytes], test: list[bytes]) -> dict[str, float]:
    """What a byte of the test costs others: two compressors, which learn from the test alone, and an order-3 model."""
    text = b"".join(test)
    return {
        "gzip": 8 * len(gzip.compress(text, 9)) / len(text),
        "xz": 8 * len(lzma.compress(text, preset=9)) / len(text),
        "order3": order3(train, test),
    }


def order3(train: list[bytes], test: list[bytes]) -> float:
    """Bits per byte of the test in a model that counts, in the training text, what follows each three bytes.

    Counts of three, two, one and no bytes are mixed as Witten and Bell do, https://doi.org/10.1109/18.87000.
    """
    streams = []
    for documents in (train, test):
        stream = np.frombuffer(b"\0\0\0" + b"\0".join(documents) + b"\0", np.uint8).astype(np.int64)
        streams.append(stream[:ORDER3_BYTES])
    seen, asked = streams
    probability = np.full(len(asked) - 3, 1 / 256)
    for order in range(4):
        keys, counts = np.unique(grams(seen, order), return_counts=True)
        contexts, first, distinct = np.unique(keys >> 8, return_index=True, return_counts=True)
        totals = np.add.reduceat(counts, first)
        wanted = grams(asked, order)
        count = look_up(wanted, keys, counts)
        total, kinds = (look_up(wanted >> 8, contexts, values) for values in (totals, distinct))
        mixed = (count + kinds * probability) / np.maximum(total + kinds, 1)
        probability = np.where(total > 0, mixed, probability)
    return float(-np.log2(probability).sum() / sum(map(len, test)))


def grams(stream: np.ndarray, order: int) -> np.ndarray:
    """Each byte from the fourth on as a number, with the `order` bytes before it in the higher digits."""
    return sum(stream[3 - back : len(stream) - back] << 8 * back for back in range(order + 1))


def look_up(wanted: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The values of keys, which are sorted; 0 for one that is not among them."""
    places = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)
