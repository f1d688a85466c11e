"""Text for language models: read document by document, tokenized once into files, and packed into sequences."""

from __future__ import annotations

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
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from utils.atomic_files import write_atomically
from utils.console import show, stop
from utils.fingerprint import digest

from .cache import build_cached, cache_folder, file_signature, read_intact, read_manifest, write_manifest
from .files import announce, list_files, read_schema, split_files, stop_if_unreadable
from .hub import load_dataset

if TYPE_CHECKING:
    from tokenizers import Tokenizer

STDLIB = "stdlib"
# Tests, generated tables, and what not every installation has.
NOT_IN_STDLIB = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
EOS = "<|endoftext|>"
IGNORE_INDEX = -100  # the default of torch's cross_entropy
TEST_FRACTION = 1 / 32  # of the documents, if a dataset has no test split
LEARN_FROM = 2**21  # characters; more take longer, for nearly the same tokens
PIECE = 2**17  # characters; a longer document is tokenized in pieces of one to two times as many
LARGEST_PIECE = 2**25  # characters; its tokens are in memory, about 100 bytes for each of them
REACH = 16  # characters before and after a cut that must not change the words on its other side: see pieces_of
AT_ONCE = 64, 2**21  # pieces and characters that are tokenized together
SAVED_EVERY = 2**25  # characters; after a kill, at most as many are tokenized again
COUNTED_AT_ONCE = 2**24  # tokens
FORMAT = 5  # of the files in the cache
SPLITS = ("train", "test")
FILES = {"train": "train.bin", "test": "test.bin"}
BEGUN = (*FILES.values(), "test_mask.npy", "tokenizer.json")
PREPARED = {"train": "train.bin", "test": "val.bin"}  # nanoGPT's names
LLM_C = (20240520, 20240801)  # the first number of its files of tokens
EXAMPLE = "roneneldan/TinyStories"
TEXT_TYPES = r"(large_)?string(_view)?|null|dictionary<values=(large_)?string,.*"  # of pyarrow
PACKING = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
LINES = tuple(f"{lines}{packed}" for lines in (".jsonl", ".ndjson") for packed in ("", *PACKING))
NOT_READ = (
    *(".csv", ".tsv", ".json", ".arrow", ".feather", ".xls", ".xlsx", ".ods", ".db", ".sqlite", ".pkl", ".npy", ".npz"),
    *(".gz", ".zst", ".bz2", ".xz", ".lz4", ".7z", ".rar", ".zip", ".tar", ".tgz", ".pdf", ".doc", ".docx", ".epub"),
)


def import_tokenizers():
    """The package tokenizers, which only this module needs."""
    try:
        import tokenizers
    except ModuleNotFoundError:
        stop("text needs the package tokenizers: pip install -r scripts/requirements.txt")
    return tokenizers


def learn_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer with up to `vocabulary` tokens: EOS, the 256 bytes and merges. Deterministic."""
    tokenizers = import_tokenizers()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
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
        tokenizer = import_tokenizers().Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises no narrower type
        stop(f"{file} is not a readable tokenizer: {error}")
    if max(tokenizer.get_vocab().values(), default=0) >= tokenizer.get_vocab_size():
        stop(f"{file} has no tokens, or gaps in their ids: number them consecutively from 0")
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.normalized]
    normalize = tokenizer.normalizer.normalize_str if tokenizer.normalizer else str
    last = {normalize(content): content for content in added}
    for content in added:
        if (other := last[normalize(content)]) != content:  # the package takes one of them at random
            stop(f"{file} has the added tokens {content!r} and {other!r}, which its normalizer makes equal: remove one")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.add_special_tokens([EOS])
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" within a text is ordinary characters
    return tokenizer


class PackedText(torch.utils.data.Dataset):
    """Documents concatenated, with EOS before and after each, and cut into sequences of `context` tokens.

    Sequences may begin and end inside a document. Every token except the first is a target exactly once. They are read
    from a file with `pread`: unlike a memory map, it does not count as memory of the process.

    An item is (inputs, targets), both int32 (context,). The last sequence is padded with EOS and IGNORE_INDEX.

    Args:
        file: the tokens.
        dtype: of the file.
        eos: the token.
        num_bytes: of the whole text in UTF-8; None: the tokenizer loses a part of it.

    Attributes:
        tokens_per_byte: for the whole text, with one EOS per document; None: unknown.
    """

    deterministic = True

    def __init__(self, file: Path, dtype: str, context: int, eos: int, num_bytes: int | None):
        self.arguments = file, dtype, context, eos, num_bytes
        self.file, self.dtype, self.context, self.eos = open(file, "rb"), np.dtype(dtype), context, eos  # noqa: SIM115
        self.num_targets = os.fstat(self.file.fileno()).st_size // self.dtype.itemsize - 1
        self.tokens_per_byte = self.num_targets / num_bytes if num_bytes else None

    def __len__(self) -> int:
        return math.ceil(self.num_targets / self.context)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        size, start = self.dtype.itemsize, range(len(self))[index] * self.context
        wanted = min(self.context, self.num_targets - start) + 1
        content = os.pread(self.file.fileno(), wanted * size, start * size)
        if len(content) != wanted * size:
            stop(f"{self.file.name} has become shorter: it must not change during a run", alone=True)
        tokens = torch.from_numpy(np.frombuffer(content, self.dtype).astype(np.int32))
        padding = (0, self.context + 1 - wanted)
        return F.pad(tokens[:-1], padding, value=self.eos), F.pad(tokens[1:], padding, value=IGNORE_INDEX)

    def __reduce__(self):
        return PackedText, self.arguments  # an open file cannot be pickled

    def bits_per_byte(self, losses: torch.Tensor) -> dict[str, torch.Tensor]:
        """The metric of losses in nats per token: its mean over all targets is the bits per byte of the whole text.

        Empty for a tokenizer that loses a part of the text, such as the case of letters: its bits say less.
        """
        if self.tokens_per_byte is None:
            return {}
        return {"bits_per_byte": losses * (self.tokens_per_byte / math.log(2))}


def count_targets(batch: list[torch.Tensor]) -> torch.Tensor:
    """Number of targets in each sequence of a PackedText, (N,): its weight in a mean over tokens."""
    _, targets = batch
    return (targets != IGNORE_INDEX).sum(1)


# Documents


class Corpus(NamedTuple):
    """Where the documents of a dataset are."""

    dataset: str  # as given on the command line, for messages
    kind: str  # "text", "JSON lines", "parquet", "Hub", or "tokens": see PREPARED
    splits: dict[str, dict]  # files by name, or a datasets.Dataset, by split: "train", "test", or "": all
    column: str | None  # with the text, of rows and lines
    left_out: list[str]

    def signatures(self) -> list:
        """What differs after the data were changed."""
        return [
            (split, name, getattr(file, "_fingerprint", None) or file_signature(file))
            for split, files in self.splits.items()
            for name, file in files.items()
        ]


class Document(NamedTuple):
    split: str  # "" if the dataset has none
    name: str  # "": the text stands for it
    parts: Iterable[str]  # of the text, each of up to PIECE characters


def find_corpus(dataset: str, text_column: str | None = None) -> Corpus:
    """Look for documents; nothing is read but the first line or schema.

    Args:
        dataset: STDLIB, the sources of Python's standard library; a folder of text files, of JSON lines, which may be
            compressed, of parquet files, or with the files PREPARED; or a Hub id. Names of files or folders with the
            words train and test (see `split_files`) are the splits.
        text_column: of rows and lines; None: `text`, or else the only one with strings.
    """
    if dataset == STDLIB:
        files, _ = list_files(sysconfig.get_path("stdlib"))
        sources = {n: file for n, file in files.items() if n.endswith(".py") and NOT_IN_STDLIB.isdisjoint(n.split("/"))}
        return Corpus(dataset, "text", {"": sources}, None, [])
    files, left_out = list_files(dataset)
    if PREPARED["train"] in files:
        splits = {split: {name: f"{dataset}/{name}"} for split, name in PREPARED.items()}
        others = sorted({*files} - {*PREPARED.values(), "tokenizer.json"})
        return Corpus(dataset, "tokens", splits, None, [*left_out, *others])
    if files or Path(dataset).is_dir():
        kinds = {kind_of(dataset, name): name for name in files}
        if len(kinds) > 1:
            stop(f"--dataset {dataset} has files of several kinds, {', '.join(kinds.values())}: keep them apart")
        kind, (splits, others) = next(iter(kinds), "text"), split_files(dataset, files)
    else:
        rows, others = load_dataset(dataset, EXAMPLE)
        kind, splits = "Hub", {split: {split: rows[split]} for split in rows}
    if "test" not in splits and "train" in splits:
        splits = {"": splits["train"]}
    sources = [file for files in splits.values() for file in files.values()] if kind != "text" else []
    columns = next(filter(None, map(columns_of, sources)), {})
    wanted = [text_column] if text_column else ["text"] if "text" in columns else [*filter(columns.get, columns)]
    if columns and (len(wanted) != 1 or wanted[0] not in columns):
        stop(f"--dataset {dataset} has the columns {', '.join(columns)}: choose the one with text by --text_column")
    return Corpus(dataset, kind, splits, wanted[0] if columns else None, [*left_out, *others])


def kind_of(dataset: str, name: str) -> str:
    if name.lower().endswith(LINES):
        return "JSON lines"
    if name.lower().endswith(NOT_READ):
        stop(f"--dataset {dataset}: {name} is not read: make it JSON lines (.jsonl, an object on each) or parquet")
    return "parquet" if name.lower().endswith(".parquet") else "text"


def columns_of(source) -> dict[str, bool]:
    """The columns of a file of rows or lines, or of a datasets.Dataset, and whether they may be text."""
    if isinstance(source, str) and not source.lower().endswith(".parquet"):
        entry = next((entry for _, entry in read_lines(source)), {})
        return {name: isinstance(value, str | None) for name, value in entry.items()}
    schema = read_schema(source) if isinstance(source, str) else source.features.arrow_schema
    return {field.name: re.fullmatch(TEXT_TYPES, str(field.type)) is not None for field in schema}


def read_documents(corpus: Corpus) -> Iterator[Document]:
    """The non-empty documents, each time in the same order. Bytes that are not UTF-8 become U+FFFD."""
    for split, files in corpus.splits.items():
        for name, file in files.items():
            if corpus.kind == "text":
                if file_signature(file)[1]:
                    yield Document(split, name, read_parts(file))
                continue
            is_lines = corpus.kind == "JSON lines"
            for number, text in read_lines(file, corpus.column) if is_lines else read_rows(file, corpus.column):
                if text not in (None, "", b""):
                    where = f"{name}:{number}"
                    yield Document(split, where if is_lines else "", parts_of(text, where))


def read_parts(file: str) -> Iterator[str]:
    with stop_if_unreadable(file), open(file, encoding="utf-8", errors="replace", newline="") as content:
        while part := content.read(PIECE):
            if "\0" in part:
                stop(f"--dataset: {file} is not a text file, it contains NUL bytes: remove it")
            yield part


def parts_of(text: str | bytes, where: str) -> Iterator[str]:
    if not isinstance(text, str | bytes):
        stop(f"--dataset: {where} has {type(text).__name__} {text!r:.60} where the text should be: see --text_column")
    encoded = text if isinstance(text, bytes) else text.encode(errors="replace")  # JSON may have halves of characters
    text = encoded.decode(errors="replace")
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def read_lines(file: str, column: str | None = None) -> Iterator[tuple[int, object]]:
    """The entries of a file of JSON lines, or what they have in a column, with the number of their line."""
    import pyarrow

    number, packing = 0, PACKING.get(os.path.splitext(file)[1].lower())
    try:
        with pyarrow.input_stream(file, compression=packing) as stream:
            for number, line in enumerate(io.BufferedReader(stream), 1):
                if not line.strip():
                    continue
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    raise ValueError(f"it is of type {type(entry).__name__}, not an object")
                if column and column not in entry:
                    stop(f"--dataset: {file}:{number} has no {column!r}, but {', '.join(entry)}")
                yield number, entry[column] if column else entry
    except (OSError, ValueError) as error:
        stop(f"--dataset: {file}:{number or 1} is not a line of JSON ({error}): repair or remove it")


def read_rows(source, column: str) -> Iterator[tuple[int, object]]:
    """What the rows of a parquet file or a datasets.Dataset have in a column, with their number."""
    import pyarrow.parquet

    with stop_if_unreadable(source if isinstance(source, str) else f"the split {source.split}"):
        if isinstance(source, str):
            rows = pyarrow.parquet.ParquetFile(source)
            if column not in rows.schema_arrow.names:
                stop(f"--dataset: {source} has no column {column!r}, but {', '.join(rows.schema_arrow.names)}")
            batches = rows.iter_batches(256, columns=[column])
        else:
            batches = source.select_columns([column]).with_format("arrow").iter(256)
        yield from enumerate(row for batch in batches for row in batch.column(0).to_pylist())


def assign_splits(documents: Iterable[Document]) -> tuple[np.ndarray, np.ndarray]:
    """Whether each document is for testing, bool, and its number of characters.

    Without a test split, a hash of their names decides. Equal texts are on one side, by the first one's name.
    """
    splits, lengths, hashes = array("b"), array("q"), bytearray()
    for split, name, parts in documents:
        sha, length = hashlib.sha256(), 0
        for part in parts:
            length += len(part)
            sha.update(part.encode())
        splits.append(split == "test")
        lengths.append(length)
        if not split:
            hashes += (hashlib.sha256(os.fsencode(name)) if name else sha).digest()[:8] + sha.digest()[:8]
    test_mask = np.array(splits, bool)
    if hashes:
        name_hashes, text_hashes = np.frombuffer(hashes, ">u8").reshape(-1, 2).T
        unique, first, which = np.unique(text_hashes, return_index=True, return_inverse=True)
        test_rows = np.argsort(name_hashes[first], kind="stable")[: math.ceil(len(unique) * TEST_FRACTION)]
        test_mask = np.isin(which, test_rows)
    return test_mask, np.array(lengths)


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
    """The packed text for training and for testing, and the tokenizer.

    The first process that needs them tokenizes the documents, one after the other, into files in the cache, and the
    others wait; later runs find them there. After a kill, tokenizing goes on where it was.

    Args:
        dataset: see `find_corpus`; or a folder with the files PREPARED, and their tokenizer.json.
        tokenizer_file: tokenizer.json; None: learn one from the documents for training.
        vocabulary: number of tokens of a learned tokenizer.
        cache_dir: None: beside the cache of Hugging Face.
        text_column: see `find_corpus`.
        token_dtype: of the files PREPARED; None: uint16, or uint32 where the tokenizer has more than 65,536 tokens.
    """
    corpus = find_corpus(dataset, text_column)
    if corpus.kind == "tokens":
        tokenizer_file = tokenizer_file or f"{dataset}/tokenizer.json"
    elif token_dtype:
        stop(f"--token_dtype {token_dtype} is for a folder with {PREPARED['train']}, which {dataset} is not: omit it")
    tokenizer = load_tokenizer(Path(tokenizer_file)) if tokenizer_file else None
    about = [corpus.column, corpus.signatures(), tokenizer.to_str() if tokenizer else vocabulary, token_dtype]
    folder = cache_folder(cache_dir, "tokens") / digest([FORMAT, *about])

    def build() -> None:
        if corpus.kind == "tokens":
            without_eos = import_tokenizers().Tokenizer.from_file(tokenizer_file)
            count_tokens(corpus, folder, tokenizer, np.dtype(token_dtype or dtype_of(without_eos.get_vocab_size())))
        else:
            write_tokens(corpus, folder, tokenizer, vocabulary)

    manifest = build_cached(
        lambda: read_manifest(folder / "manifest.json"), build, folder, f"the tokens of --dataset {dataset}"
    )
    announce(dataset, manifest["about"], corpus.left_out)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    eos, dtype = tokenizer.token_to_id(EOS), manifest["dtype"]
    files = [(folder / manifest["files"][split], manifest["bytes"][split]) for split in SPLITS]
    train, test = (PackedText(file, dtype, context, eos, num_bytes) for file, num_bytes in files)
    return train, test, tokenizer


def dtype_of(vocabulary: int) -> str:
    """The type of a token in a file."""
    return "uint16" if vocabulary <= 2**16 else "uint32"


def finish_tokens(folder: Path, files: dict, num_bytes: dict, dtype: str, about: str) -> None:
    """Write manifest.json, with which the tokens are complete."""
    content = {"files": files, "bytes": num_bytes, "dtype": dtype, "about": about}
    write_manifest(folder / "manifest.json", content, ["tokenizer.json", *files.values()])


def count_tokens(corpus: Corpus, folder: Path, tokenizer: Tokenizer, dtype: np.dtype) -> None:
    """Check the tokens in the files PREPARED of a dataset, and write manifest.json, which refers to them."""
    if not isinstance(tokenizer.decoder, import_tokenizers().decoders.ByteLevel):
        stop(f"--dataset {corpus.dataset} has tokens, but its tokenizer is not byte-level: use the text instead")
    tokens, size, files, num_bytes, counts = tokenizer.get_vocab(), tokenizer.get_vocab_size(), {}, {}, []
    token_bytes = np.array([len(token) if token != EOS else 0 for token in sorted(tokens, key=tokens.get)])
    for split, name in PREPARED.items():
        path, length, _ = file_signature(Path(corpus.dataset, name))
        if length % dtype.itemsize or length < 2 * dtype.itemsize:
            stop(f"{path} has {length} bytes, which are not two or more tokens of {dtype.itemsize} bytes")
        if np.isin(np.fromfile(path, "<i4", 1), LLM_C).any():
            stop(f"{path} begins with a header of llm.c: remove its 1024 bytes, by tail -c +1025")
        counted = np.zeros(size, np.int64)
        for start in range(0, length // dtype.itemsize, COUNTED_AT_ONCE):
            part = np.fromfile(path, dtype, COUNTED_AT_ONCE, offset=start * dtype.itemsize)
            if len(wrong := np.flatnonzero((part < 0) | (part >= size))):
                stop(
                    f"{path} has the token {part[wrong[0]]} at place {start + wrong[0]}, but the tokenizer has only "
                    f"{size}; it was read as {dtype}: see --token_dtype"
                )
            if len(part) >= 4 and not part[1::2].any():
                stop(f"every second token of {path} is 0, read as {dtype}: set a wider --token_dtype")
            counted += np.bincount(part, minlength=size)
        files[split], num_bytes[split] = path, max(int(counted @ token_bytes), 1)
        counts.append(f"{length // dtype.itemsize:,} tokens")
    write_atomically(folder / "tokenizer.json", lambda path: tokenizer.save(str(path)))
    about = f"{counts[0]} for training, {counts[1]} for testing, of {dtype}"
    finish_tokens(folder, files, num_bytes, str(dtype), about)


def begin_tokens(corpus: Corpus, folder: Path, tokenizer: Tokenizer | None, vocabulary: int) -> None:
    """Choose the documents for testing, learn the tokenizer unless there is one, and begin both files with EOS."""
    test_mask, lengths = assign_splits(read_documents(corpus))
    if test_mask.all() or not test_mask.any():
        stop(f"--dataset {corpus.dataset} needs a non-empty document for training and one for testing")
    if tokenizer is None:
        step = 1 + int(lengths[~test_mask].sum()) // LEARN_FROM
        tokenizer = learn_tokenizer(select_texts(read_documents(corpus), ~test_mask, step), vocabulary)
    write_atomically(folder / "test_mask.npy", lambda path: np.save(path, test_mask))
    write_atomically(folder / "tokenizer.json", lambda path: tokenizer.save(str(path)))
    eos = np.array([tokenizer.token_to_id(EOS)], dtype_of(tokenizer.get_vocab_size()))
    for name in FILES.values():
        write_atomically(folder / name, eos.tofile)
    progress = {"pieces": 0, "documents": 0, "characters": 0, "of": int(lengths.sum()), "lossless": True}
    write_manifest(folder / "progress.json", progress | {"bytes": dict.fromkeys(SPLITS, 0)}, BEGUN)


def write_tokens(corpus: Corpus, folder: Path, tokenizer: Tokenizer | None, vocabulary: int) -> None:
    """Tokenize all documents into the FILES of `folder`, and then write manifest.json."""
    signatures = corpus.signatures()
    read_progress = functools.partial(read_manifest, folder / "progress.json", FILES.values())
    progress = read_intact(read_progress, folder, f"the tokens of --dataset {corpus.dataset}")
    if progress is None:
        begin_tokens(corpus, folder, tokenizer, vocabulary)
        progress = read_progress()
    tokenizer, test_mask = load_tokenizer(folder / "tokenizer.json"), np.load(folder / "test_mask.npy")
    eos, dtype = tokenizer.token_to_id(EOS), dtype_of(tokenizer.get_vocab_size())
    files = {split: open(folder / name, "ab") for split, name in FILES.items()}  # noqa: SIM115
    for split, file in files.items():
        file.truncate(progress["digests"][FILES[split]][0])  # to the size that was written last

    def save() -> None:
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
        write_manifest(folder / "progress.json", progress, BEGUN)

    start, first, last = time.monotonic(), progress["characters"], progress["characters"]
    documents = zip(read_documents(corpus), test_mask.tolist(), strict=False)
    documents = (document._replace(split=SPLITS[is_test]) for document, is_test in documents)
    for batch in batches_of(itertools.islice(pieces_of(documents, tokenizer), progress["pieces"], None)):
        encodings = tokenizer.encode_batch_fast([text for _, text, _, _ in batch], add_special_tokens=False)
        for (split, text, is_first, is_last), encoding in zip(batch, encodings, strict=True):
            tokens = [*encoding.ids, eos] if is_last else encoding.ids
            files[split].write(np.array(tokens, dtype).tobytes())
            progress["bytes"][split] += len(text.encode())
            progress["pieces"] += 1
            progress["documents"] += is_last
            progress["characters"] += len(text)
            if is_first and encoding in (encodings[0], encodings[-1]):  # a sample
                progress["lossless"] &= tokenizer.decode(encoding.ids, skip_special_tokens=False) == text
        if progress["characters"] - last >= SAVED_EVERY:
            save()
            last = progress["characters"]
            if (seconds := time.monotonic() - start) > 5:
                minutes = seconds / (last - first) * (progress["of"] - last) / 60
                show(f"tokenizing --dataset {corpus.dataset}: {last / progress['of']:.0%}, {minutes:.0f} min left")
    save()
    done = progress["documents"], progress["characters"]
    if done != (len(test_mask), progress["of"]) or corpus.signatures() != signatures:
        (folder / "progress.json").unlink()
        stop(f"--dataset {corpus.dataset} has changed while it was tokenized: it must not change during a run")
    num_test, column = int(test_mask.sum()), f", column {corpus.column}" if corpus.column else ""
    about = f"{corpus.kind}{column}; {len(test_mask) - num_test:,} documents for training, {num_test:,} for testing"
    about += ", chosen by a hash" if "" in corpus.splits else ""
    if not progress["lossless"]:
        about += "; the tokenizer loses a part of the text, so bits_per_byte is left out"
    finish_tokens(folder, FILES, progress["bytes"] if progress["lossless"] else dict.fromkeys(SPLITS), dtype, about)


def pieces_of(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[str, str, bool, bool]]:
    """The documents, in pieces whose tokens, one after the other, are the tokens of the whole document.

    Each comes after its split, and before whether it is the first, and the last, of its document.
    """
    added = [len(token.content) for token in tokenizer.get_added_tokens_decoder().values()]
    words_of = separate_words(tokenizer)
    reach = REACH + 2 * max(added, default=0)  # twice, as a normalizer may shorten the text
    for split, name, parts in documents:
        text, is_first = "", True
        for part in parts:
            if len(text) >= PIECE and tokenizer.pre_tokenizer and (place := find_cut(text, words_of, reach)):
                yield split, text[:place], is_first, False
                text, is_first = text[place:], False
            text += part
            if len(text) > LARGEST_PIECE:
                stop(
                    f"--dataset: {name or 'a row'} has {LARGEST_PIECE / 1e6:.0f} million characters without a place at "
                    "which the tokenizer separates tokens for certain: split it into documents"
                )
        yield split, text, is_first, True


def separate_words(tokenizer: Tokenizer) -> Callable[[str], list]:
    """A function that separates a text into added tokens and words, as the tokenizer does.

    It returns each byte of the words, and whether a word begins with it: the tokens themselves do not tell, as [UNK]
    may stand for any word.
    """
    tokenizers = import_tokenizers()
    all_bytes = {f"<0x{byte:02X}>": byte for byte in range(256)}
    separator = tokenizers.Tokenizer(tokenizers.models.BPE(all_bytes, [], byte_fallback=True))
    separator.normalizer, separator.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    separator.add_tokens([*tokenizer.get_added_tokens_decoder().values()])
    separator.encode_special_tokens = tokenizer.encode_special_tokens

    def words_of(text: str) -> list:
        encoding = separator.encode(text, add_special_tokens=False)
        words = encoding.word_ids
        begins = (word != before for word, before in zip(words, [None, *words], strict=False))
        return [*zip(encoding.ids, begins, strict=True)]

    return words_of


def find_cut(text: str, words_of: Callable[[str], list], reach: int) -> int:
    """The last place, but for `reach` characters, at which the words on both sides are independent; 0: none.

    A pre-tokenizer looks for words from the left to the right, from wherever the word before ends. That may be at any
    of the last `reach` characters, so the place has to separate two words for all of them.
    """

    def separates(place: int) -> bool:
        before, after = text[place - reach : place], text[place : place + reach]
        if not before.strip() or not after.strip():  # a normalizer may strip spaces at the ends of a text
            return False
        befores, words_after = (before[start:] for start in reversed(range(reach))), words_of(after)
        return all(words_of(before) + words_after == words_of(before + after) for before in befores)

    first, end = max(reach, len(text) - 2**12), len(text) - reach
    places = [first + match.start() for match in re.finditer(r"\b", text[first:end])]
    return next((place for place in places[:-100:-1] if separates(place)), 0)


def batches_of(pieces: Iterable[tuple]) -> Iterator[list[tuple]]:
    """As many at a time as can be tokenized together: an Encoding takes far more memory than its ids."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[1])
        if len(batch) == AT_ONCE[0] or size >= AT_ONCE[1]:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def select_texts(documents: Iterable[Document], wanted: np.ndarray, step: int) -> Iterator[str]:
    """Each `step`-th part of the documents that are wanted."""
    chosen = (document.parts for document, is_wanted in zip(documents, wanted, strict=False) if is_wanted)
    return itertools.islice(itertools.chain.from_iterable(chosen), 0, None, step)
