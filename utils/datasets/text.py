"""Text for language models: read, tokenized, and packed into sequences."""

import glob
import hashlib
import math
import os
import sysconfig
from pathlib import Path

import numpy as np
import psutil
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from ..console import stop
from .hub import TEST_SPLITS, load_dataset

try:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
except ModuleNotFoundError:
    stop("text needs the package tokenizers: pip install -r scripts/requirements.txt")

STDLIB = "stdlib"
# Tests, generated tables, and what not every installation has.
NOT_IN_STDLIB = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
EOS = "<|endoftext|>"
IGNORE_INDEX = -100  # the default of torch's cross_entropy
TEST_FRACTION = 1 / 32  # of the documents, if a dataset has no test split
LEARN_FROM = 2**21  # characters; more take longer, for nearly the same tokens


def learn_tokenizer(texts: list[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer with up to `vocabulary` tokens: EOS, the 256 bytes and merges. Deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts[:: 1 + sum(map(len, texts)) // LEARN_FROM], trainer)
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" within a text is ordinary characters
    return tokenizer


def load_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json, without truncation and padding; EOS is added if it is missing."""
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises no narrower type
        stop(f"{file} is not a readable tokenizer: {error}")
    if max(tokenizer.get_vocab().values(), default=0) >= tokenizer.get_vocab_size():
        stop(f"{file} has no tokens, or gaps in their ids: number them consecutively from 0")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.add_special_tokens([EOS])
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" within a text is ordinary characters
    return tokenizer


class PackedText(TensorDataset):
    """Documents concatenated, with EOS before and after each, and cut into sequences of `context` tokens.

    Sequences may begin and end inside a document. Every token except the first is a target exactly once.

    Attributes:
        tensors: inputs and targets, int32 (N, context). The last sequence is padded with EOS and IGNORE_INDEX.
        tokens_per_byte: for the whole text in UTF-8, with one EOS per document.
    """

    def __init__(self, texts: list[str], tokenizer: Tokenizer, context: int):
        eos = tokenizer.token_to_id(EOS)
        parts = [[eos]]
        for start in range(0, len(texts), 64):  # a few at a time: an Encoding takes far more memory than its ids
            for encoding in tokenizer.encode_batch_fast(texts[start : start + 64], add_special_tokens=False):
                parts.append(np.array([*encoding.ids, eos], np.int32))
        stream = torch.from_numpy(np.concatenate(parts, dtype=np.int32))
        num_targets = len(stream) - 1
        padding = (0, -num_targets % context)
        inputs, targets = F.pad(stream[:-1], padding, value=eos), F.pad(stream[1:], padding, value=IGNORE_INDEX)
        super().__init__(inputs.view(-1, context), targets.view(-1, context))
        self.tokens_per_byte = num_targets / sum(len(text.encode()) for text in texts)

    def bits_per_byte(self, losses: torch.Tensor) -> torch.Tensor:
        """Convert losses from nats per token; the mean over all targets gives the bits per byte of the whole text."""
        return losses * (self.tokens_per_byte / math.log(2))


def count_targets(batch: list[torch.Tensor]) -> torch.Tensor:
    """Number of targets in each sequence of a PackedText, (N,): its weight in a mean over tokens."""
    _, targets = batch
    return (targets != IGNORE_INDEX).sum(1)


def load_text(dataset: str) -> tuple[list[str], list[str]]:
    """The non-empty documents for training and for testing. Bytes that are not UTF-8 become U+FFFD.

    Args:
        dataset: "stdlib", the sources of Python's standard library; a folder of text files, in train/ and test/ or
            anywhere in it, or of parquet files; or a Hub id. The text is in the column `text`, or else in the only
            string column.
    """
    folder = Path(sysconfig.get_path("stdlib") if dataset == STDLIB else dataset)
    pattern, excluded = ("**/*.py", NOT_IN_STDLIB) if dataset == STDLIB else ("**", set())
    # Unlike rglob, it follows links to folders, and leaves out hidden files.
    names = glob.glob(pattern, root_dir=folder, recursive=True)
    files = {name: folder / name for name in names if excluded.isdisjoint(Path(name).parts)}
    files = {name: file for name, file in files.items() if file.is_file()}
    suffixes = {file.suffix for file in files.values()}
    if not folder.is_dir() or ".parquet" in suffixes:
        if suffixes - {".parquet", ".md", ".json"}:  # a dataset's README.md and dataset_infos.json are not documents
            stop(f"--dataset {dataset} has parquet files and other files: keep them in different folders")
        train, test = load_rows(dataset)
    else:
        check_memory(dataset, sum(file.stat().st_size for file in files.values()))
        documents = [(name, read(file)) for name, file in sorted(files.items())]
        folders = [f"{split}/" for split in ("train", *TEST_SPLITS)]
        train, *tests = [[text for name, text in documents if text and name.startswith(top)] for top in folders]
        test = next(filter(None, tests), [])
        if not train or not test:
            train, test = split_by_hash(documents)
    if not train or not test:
        stop(f"--dataset {dataset} needs a non-empty document for training and one for testing")
    return train, test


def read(file: Path) -> str:
    content = file.read_bytes()
    if b"\0" in content:
        stop(f"--dataset: {file} is not a text file, it contains NUL bytes: remove it")
    return content.decode(errors="replace")


def check_memory(dataset: str, num_bytes: int) -> None:
    """Stop if the text, its tokens and a copy of these do not fit into memory."""
    available = psutil.virtual_memory().available
    if 5 * num_bytes > available:
        stop(
            f"--dataset {dataset} has {num_bytes / 1e9:.1f} GB of text, all of which is kept in memory as tokens: "
            f"use at most {available / 5e9:.1f} GB, a fifth of the free memory"
        )


def split_by_hash(documents: list[tuple[str, str]]) -> tuple[list[str], list[str]]:
    """Split (name, text) pairs into texts for training and for testing, by a hash of each text's name."""
    documents = sorted(document for document in documents if document[1])
    names = {text: name for name, text in reversed(documents)}  # equal texts: the first name, so all are on one side
    by_hash = sorted(names, key=lambda text: hashlib.sha256(os.fsencode(names[text])).digest())
    test = set(by_hash[: math.ceil(len(names) * TEST_FRACTION)])
    return [text for _, text in documents if text not in test], [text for _, text in documents if text in test]


def load_rows(dataset: str) -> tuple[list[str], list[str]]:
    """As `load_text`, through `datasets.load_dataset`; without a test split, texts are split by their hash."""
    splits = load_dataset(dataset, example="roneneldan/TinyStories")
    check_memory(dataset, max(rows.dataset_size or 0 for rows in splits.values()))
    if "train" not in splits:
        stop(f"--dataset {dataset} has the splits {', '.join(splits)}, but no train")
    train, *tests = [read_rows(dataset, splits[name]) for name in ("train", *TEST_SPLITS) if name in splits]
    return (train, tests[0]) if tests else split_by_hash([(text, text) for text in train])


def read_rows(dataset: str, rows) -> list[str]:
    columns = [name for name, kind in rows.features.items() if getattr(kind, "dtype", "") in ("string", "large_string")]
    if "text" not in columns and len(columns) != 1:
        stop(f"--dataset {dataset} has the columns {', '.join(rows.features)}: name the one with the text `text`")
    return [text for text in rows["text" if "text" in columns else columns[0]] if text]
