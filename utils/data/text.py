"""Text for language models: documents, tokenized once, and packed into sequences of tokens."""

import functools
import hashlib
import io
import itertools
import json
import math
import os
import re
import sysconfig
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow
import tokenizers
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from ..atomic_files import write_atomically
from ..console import show, stop
from ..fingerprint import digest
from .cache import build_once, cache_folder, file_signature
from .files import announce, find_data, list_files, stop_if_unreadable

STDLIB = "stdlib"
# Tests, generated tables, and what not every installation has.
NOT_IN_STDLIB = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
EOS = "<|endoftext|>"
IGNORE_INDEX = -100  # the default of torch's cross_entropy
TEST_FRACTION = 1 / 32  # of the documents, if a dataset has no test split
LEARN_FROM = 2**21  # characters; more take longer, for nearly the same tokens
PART = 2**17  # characters that are read at a time
PIECE = 2**15  # characters; a longer document is tokenized in pieces of one to two times as many
AT_ONCE = 64  # pieces that are tokenized together: an Encoding takes far more memory than its ids
FORMAT = 7  # of the files in the cache
FACTS = np.dtype([("is_test", "?"), ("length", "i8"), ("name_hash", "S8"), ("text_hash", "S8")])  # of a document
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
KINDS = dict.fromkeys([f"{end}{packed}" for end in (".jsonl", ".ndjson") for packed in ("", *COMPRESSIONS)], "lines")
KINDS |= {".parquet": "parquet", ".csv": "csv"}
NO_TEXT = ".tsv .json .arrow .xlsx .sqlite .pkl .npy .npz .pdf .docx .epub .gz .zst .bz2 .xz .lz4 .7z .zip .tar .tgz"
KINDS |= dict.fromkeys(NO_TEXT.split(), "no text")  # each would be tokenized as the bytes that it has


def learn_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer with up to `vocabulary` tokens: EOS, the 256 bytes and merges. Deterministic."""
    tokenizer = Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" within a text is ordinary characters
    return tokenizer


def load_tokenizer(file: Path) -> Tokenizer:
    """The tokenizer in a tokenizer.json, without truncation and padding; EOS is added if it is missing."""
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises no narrower type
        stop(f"{file} is not a readable tokenizer: {error}")
    if max(tokenizer.get_vocab().values(), default=0) >= tokenizer.get_vocab_size():  # the size of the embedding
        stop(f"{file} has no tokens, or gaps in their ids: number them consecutively from 0")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.add_special_tokens([EOS])
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" within a text is ordinary characters
    return tokenizer


class PackedText(torch.utils.data.Dataset):
    """Documents concatenated, with EOS before and after each, and cut into sequences of `context` tokens.

    Sequences may begin and end inside a document. Every token except the first is a target exactly once. An item is
    (inputs, targets), both int32 (context,). The last sequence is padded with EOS and IGNORE_INDEX.

    `num_bytes` is the length of the whole text in UTF-8; None: unknown, or the tokenizer loses a part of it.
    """

    deterministic = True

    def __init__(self, file: Path, dtype: str, context: int, eos: int, num_bytes: int | None):
        self.tokens, self.context, self.eos = np.memmap(file, dtype, "r"), context, eos
        self.num_targets = len(self.tokens) - 1
        self.tokens_per_byte = self.num_targets / num_bytes if num_bytes else None

    def __len__(self) -> int:
        return math.ceil(self.num_targets / self.context)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = range(len(self))[index] * self.context
        tokens = torch.from_numpy(self.tokens[start : start + self.context + 1].astype(np.int32))
        padding = (0, self.context + 1 - len(tokens))
        return F.pad(tokens[:-1], padding, value=self.eos), F.pad(tokens[1:], padding, value=IGNORE_INDEX)

    def bits_per_byte(self, losses: torch.Tensor) -> dict[str, torch.Tensor]:
        """The metric of losses in nats per token: its mean over all targets is the bits per byte of the whole text."""
        return {"bits_per_byte": losses * (self.tokens_per_byte / math.log(2))} if self.tokens_per_byte else {}


def count_targets(batch: list[torch.Tensor]) -> torch.Tensor:
    """Number of targets in each sequence of a PackedText, (N,): its weight in a mean over tokens."""
    _, targets = batch
    return (targets != IGNORE_INDEX).sum(1)


# Documents


def find_sources(dataset: str, text_column: str | None, cache_dir: str | None) -> tuple[list, str | None, list[str]]:
    """Split, name and rows of each source of text, the column of the rows (None: files of text), and what is left out.

    A dataset is STDLIB, the sources of Python's standard library; a folder of text, parquet or CSV files, or of JSON
    lines, which may be compressed; or a Hub id. The column is `text`, or else the only one with strings.
    """
    if dataset == STDLIB:
        files, _ = list_files(sysconfig.get_path("stdlib"))
        names = (name for name in files if name.endswith(".py") and NOT_IN_STDLIB.isdisjoint(name.split("/")))
        return [("train", name, files[name]) for name in names], None, []
    kind, splits, left_out = find_data(dataset, KINDS, "text", cache_dir)
    if kind == "no text":
        stop(f"--dataset {dataset} has files that are no text: make them JSON lines (an object on each) or parquet")
    by_name = {split: {split: rows} if kind == "rows" else rows for split, rows in splits.items()}
    sources = [(split, name, rows) for split, of_split in by_name.items() for name, rows in of_split.items()]
    if kind == "text":
        return sources, None, left_out
    if kind == "lines":
        first = next((entry for *_, file in sources for _, entry in read_lines(file)), {})
        columns = {name: isinstance(value, str | None) for name, value in first.items()}
    else:
        columns = {field.name: "string" in str(field.type) for field in sources[0][2].features.arrow_schema}
    names = [text_column] if text_column else ["text"] if "text" in columns else [*filter(columns.get, columns)]
    if len(names) != 1 or names[0] not in columns:
        stop(f"--dataset {dataset} has the columns {', '.join(columns)}: choose the one with text by --text_column")
    return sources, names[0], left_out


def read_documents(sources: list, column: str | None) -> Iterator[tuple[str, bytes, Iterable[str]]]:
    """Split, name (of a row, its text) and parts of the text, of each document that is not empty."""
    for split, name, rows in sources:
        if column is None:
            if os.path.getsize(rows):
                yield split, os.fsencode(name), read_parts(rows)
            continue
        is_file = isinstance(rows, str)
        batches = [] if is_file else rows.select_columns([column]).with_format("arrow").iter(256)
        texts = itertools.chain.from_iterable(batch.column(0).to_pylist() for batch in batches)
        for number, text in read_lines(rows, column) if is_file else enumerate(texts):
            if not isinstance(text, str | None):  # `datasets` would write it as JSON, and take that for the text
                stop(f"--dataset: {name}:{number} has {type(text).__name__} {text!r:.60} where the text should be")
            if text:
                text = text.encode(errors="replace").decode()  # JSON may have halves of characters
                parts = (text[start : start + PART] for start in range(0, len(text), PART))
                yield split, os.fsencode(f"{name}:{number}") if is_file else text.encode(), parts


def read_parts(file: str) -> Iterator[str]:
    """The text of a file. Bytes that are not UTF-8 become U+FFFD."""
    with stop_if_unreadable(file), open(file, encoding="utf-8", errors="replace", newline="") as content:
        while part := content.read(PART):
            if "\0" in part:  # UTF-16, or not text at all
                stop(f"--dataset: {file} is not a text file, it contains NUL bytes: remove it")
            yield part


def read_lines(file: str, column: str | None = None) -> Iterator[tuple[int, object]]:
    """The number of each line of JSON lines, and the entry, or what it has in a column.

    Not by `datasets`, which leaves out lines without the column, and whose process ends by signal 11 at a line `null`.
    """
    number, compression = 0, COMPRESSIONS.get(os.path.splitext(file)[1].lower())
    try:
        with pyarrow.input_stream(file, compression=compression) as stream:
            for number, line in enumerate(io.BufferedReader(stream), 1):
                if line.strip():
                    entry = json.loads(line)
                    yield number, {**entry} if column is None else entry[column]
    except (OSError, ValueError, TypeError, LookupError) as error:
        stop(f"--dataset: {file}:{number or 1} is not a JSON object with {column or 'text'!r} ({error!r}): repair it")


def facts_of(split: str, name: bytes, parts: Iterable[str]) -> tuple:
    """What is known of a document, a row of FACTS."""
    sha, length = hashlib.sha256(), 0
    for part in parts:
        sha.update(part.encode())
        length += len(part)
    return split == "test", length, hashlib.sha256(name).digest()[:8], sha.digest()[:8]


def cut_pieces(parts: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """A text in pieces of up to 2 PIECE characters, and whether it is the last one; none of an empty text.

    The cut is between a word and a space, where the tokenizers of GPT-2 and its successors separate tokens, too.
    """
    text = ""
    for part in parts:
        text += part
        while len(text) > 2 * PIECE:
            cut = re.compile(r"(?<=[^\W_])(?=\s)").search(text, PIECE, 2 * PIECE)
            place = cut.start() if cut else 2 * PIECE
            yield text[:place], False
            text = text[place:]
    if text:
        yield text, True


# Tokens


def load_tokens(
    dataset: str,
    tokenizer_file: str | None,
    vocabulary: int,
    context: int,
    cache_dir: str | None,
    text_column: str | None = None,
    token_dtype: str | None = None,
) -> tuple[PackedText, PackedText, Tokenizer]:
    """The packed text for training and for testing, and the tokenizer; tokenized once, into files in the cache.

    A dataset is as in `find_sources`; or a folder with train.bin and val.bin of `token_dtype`, as nanoGPT writes them,
    and tokenizer.json. Without a tokenizer, one of `vocabulary` tokens is learned from the documents for training.
    """
    if Path(dataset, "train.bin").is_file():
        return load_prepared(dataset, tokenizer_file or f"{dataset}/tokenizer.json", context, token_dtype)
    if token_dtype:
        stop(f"--token_dtype {token_dtype} is for a folder with train.bin, which {dataset} is not: omit it")
    sources, column, left_out = find_sources(dataset, text_column, cache_dir)
    tokenizer = load_tokenizer(tokenizer_file) if tokenizer_file else None
    signed = [(*names, getattr(rows, "_fingerprint", None) or file_signature(rows)) for *names, rows in sources]
    # The tokenizer's own JSON: a pickled one differs from run to run.
    key = digest([FORMAT, column, signed, tokenizer.to_str() if tokenizer else vocabulary])
    folder = cache_folder(cache_dir, "tokens", key)
    build = functools.partial(write_tokens, dataset, sources, column, tokenizer, vocabulary, folder)
    manifest = build_once(folder, build)
    announce(dataset, manifest["about"] + (f" of column {column}" if column else ""), left_out)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    options = dtype_of(tokenizer.get_vocab_size()), context, tokenizer.token_to_id(EOS)
    train, test = (PackedText(folder / f"{name}.bin", *options, size) for name, size in manifest["bytes"].items())
    return train, test, tokenizer


def dtype_of(vocabulary: int) -> str:
    return "uint16" if vocabulary <= 2**16 else "uint32"


def write_tokens(
    dataset: str, sources: list, column: str | None, tokenizer: Tokenizer | None, vocabulary: int, folder: Path
) -> dict:
    """Write train.bin, test.bin and tokenizer.json into `folder`. The documents are read several times.

    Not by `datasets.map`: the text and the tokens would lie on the disk once more, and long documents be cut before.
    """
    show(f"tokenizing --dataset {dataset}, once, into {folder}")
    facts = np.fromiter(itertools.starmap(facts_of, read_documents(sources, column)), FACTS)
    is_test = facts["is_test"]
    if not any(split == "test" for split, *_ in sources):
        # A hash of the names decides; equal texts are on one side, by the first one's name.
        _, first, which = np.unique(facts["text_hash"], return_index=True, return_inverse=True)
        order = np.argsort(facts["name_hash"][first], kind="stable")
        is_test = np.isin(which, order[: math.ceil(len(order) * TEST_FRACTION)])
    if is_test.all() or not is_test.any():
        stop(f"--dataset {dataset} needs a non-empty document for training and one for testing")

    if tokenizer is None:
        step = 1 + int(facts["length"][~is_test].sum()) // LEARN_FROM
        texts = (parts for *_, parts in itertools.compress(read_documents(sources, column), ~is_test))
        parts = itertools.islice(itertools.chain.from_iterable(texts), 0, None, step)
        tokenizer = learn_tokenizer(parts, vocabulary)
    write_atomically(folder / "tokenizer.json", lambda path: tokenizer.save(str(path)))
    documents = zip(np.where(is_test, "test", "train"), read_documents(sources, column), strict=True)
    pieces = ((split, *piece) for split, (*_, parts) in documents for piece in cut_pieces(parts))
    sizes, is_lossless = write_pieces(folder, tokenizer, pieces)
    about = f"{(~is_test).sum():,} documents for training, {is_test.sum():,} for testing"
    if not is_lossless:
        about += ", without bits_per_byte, as the tokenizer loses a part of the text,"
        sizes = dict.fromkeys(sizes)
    return {"bytes": sizes, "about": about}


def write_pieces(folder: Path, tokenizer: Tokenizer, pieces: Iterator[tuple[str, str, bool]]) -> tuple[dict, bool]:
    """Write the tokens of pieces (split, text, is_last) of documents into <split>.bin.

    Returns:
        The length of the texts of each split in UTF-8; whether a sample of them is what its tokens give.
    """
    eos, dtype = tokenizer.token_to_id(EOS), dtype_of(tokenizer.get_vocab_size())
    sizes, is_lossless, shown = {"train": 0, "test": 0}, True, time.monotonic()
    with open(folder / "train.bin", "wb") as train, open(folder / "test.bin", "wb") as test:
        files = {"train": train, "test": test}
        for file in files.values():
            file.write(np.array([eos], dtype))
        while batch := [*itertools.islice(pieces, AT_ONCE)]:
            encodings = tokenizer.encode_batch_fast([text for _, text, _ in batch], add_special_tokens=False)
            is_lossless &= tokenizer.decode(encodings[0].ids, skip_special_tokens=False) == batch[0][1]
            for (split, text, is_last), encoding in zip(batch, encodings, strict=True):
                files[split].write(np.array(encoding.ids + [eos] * is_last, dtype))
                sizes[split] += len(text.encode())
            if time.monotonic() > shown + 60:
                show(f"tokenized {sum(sizes.values()) / 1e6:,.0f} MB")
                shown = time.monotonic()
    return sizes, is_lossless


def load_prepared(dataset: str, tokenizer_file: str, context: int, dtype: str | None) -> tuple:
    """Tokens as nanoGPT prepares them, as they are; without bits_per_byte, as the length of the text is unknown."""
    tokenizer, found = load_tokenizer(tokenizer_file), []
    size = Tokenizer.from_file(tokenizer_file).get_vocab_size()  # without EOS
    for path in (f"{dataset}/train.bin", f"{dataset}/val.bin"):
        with stop_if_unreadable(path):  # also a part of a token, and no token
            data = PackedText(path, dtype or dtype_of(size), context, tokenizer.token_to_id(EOS), None)
            first, last = data.tokens.min(), data.tokens.max()
            if first < 0 or last >= size or not data.tokens[1::2].any():
                about = f"tokens {first} to {last} of a tokenizer of {size}, or each second is 0"
                raise ValueError(f"as {data.tokens.dtype}, it has {about}: see --token_dtype")
        found.append(data)
    files, left_out = list_files(dataset)
    left_out += sorted({*files} - {"train.bin", "val.bin", "tokenizer.json"})
    announce(dataset, " and ".join(f"{len(data.tokens):,} tokens of {data.tokens.dtype}" for data in found), left_out)
    return *found, tokenizer
