"""Text for language models: read document by document, tokenized once into files, and packed into sequences."""

import glob
import hashlib
import io
import itertools
import json
import math
import os
import sysconfig
import time
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from utils.atomic_files import write_atomically, write_json
from utils.console import show, stop
from utils.fingerprint import digest

from .cache import cache_folder, identity, make_once
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
LARGEST_DOCUMENT = 2**28  # characters; its tokens are in memory, about 30 bytes for each of them
SAVED_EVERY = 2**25  # characters; after a kill, at most as many are tokenized again
LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
COUNTED_AT_ONCE = 2**24  # tokens
FORMAT = 2  # of the files in the cache
SPLITS = ("train", "test")
PREPARED = {"train": "train.bin", "test": "val.bin"}  # nanoGPT's names
EXAMPLE = "roneneldan/TinyStories"

Document = tuple[str, str, str]  # split, "" if the dataset has none; name; text


def learn_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer with up to `vocabulary` tokens: EOS, the 256 bytes and merges. Deterministic."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
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
    if max(tokenizer.get_vocab().values(), default=0) >= tokenizer.get_vocab_size():
        stop(f"{file} has no tokens, or gaps in their ids: number them consecutively from 0")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.add_special_tokens([EOS])
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" within a text is ordinary characters
    return tokenizer


class PackedText(torch.utils.data.Dataset):
    """Documents concatenated, with EOS before and after each, and cut into sequences of `context` tokens.

    Sequences may begin and end inside a document. Every token except the first is a target exactly once. They are read
    from a file of uint16 or uint32 with `pread`: unlike a memory map, it does not count as memory of the process.

    An item is (inputs, targets), both int32 (context,). The last sequence is padded with EOS and IGNORE_INDEX.

    Args:
        file: the tokens.
        dtype: of the file; see `dtype_of`.
        eos: the token.
        num_bytes: of the whole text in UTF-8.

    Attributes:
        tokens_per_byte: for the whole text, with one EOS per document.
    """

    deterministic = True

    def __init__(self, file: Path, dtype: str, context: int, eos: int, num_bytes: int):
        self.arguments = file, dtype, context, eos, num_bytes
        self.file, self.dtype, self.context, self.eos = open(file, "rb"), np.dtype(dtype), context, eos  # noqa: SIM115
        self.num_targets = os.fstat(self.file.fileno()).st_size // self.dtype.itemsize - 1
        self.tokens_per_byte = self.num_targets / num_bytes

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

    def bits_per_byte(self, losses: torch.Tensor) -> torch.Tensor:
        """Convert losses from nats per token; the mean over all targets gives the bits per byte of the whole text."""
        return losses * (self.tokens_per_byte / math.log(2))


def count_targets(batch: list[torch.Tensor]) -> torch.Tensor:
    """Number of targets in each sequence of a PackedText, (N,): its weight in a mean over tokens."""
    _, targets = batch
    return (targets != IGNORE_INDEX).sum(1)


# Documents


def files_of(dataset: str) -> dict[str, Path]:
    """The files of a folder, or of STDLIB, by their names in it, in order; empty for a Hub id."""
    folder = Path(sysconfig.get_path("stdlib") if dataset == STDLIB else dataset)
    pattern, excluded = ("**/*.py", NOT_IN_STDLIB) if dataset == STDLIB else ("**", set())
    # Unlike rglob, it follows links to folders, and leaves out hidden files.
    names = sorted(glob.glob(pattern, root_dir=folder, recursive=True)) if folder.is_dir() else []
    files = {name: folder / name for name in names if excluded.isdisjoint(Path(name).parts)}
    return {name: file for name, file in files.items() if file.is_file()}


def read_documents(dataset: str) -> Iterator[Document]:
    """The non-empty documents, each time in the same order. Bytes that are not UTF-8 become U+FFFD.

    Args:
        dataset: STDLIB, the sources of Python's standard library; a folder of text files, of JSON lines, which may be
            compressed, in train/ and test/ or anywhere in it, or of parquet files; or a Hub id. The text of rows and
            lines is in the column `text`, or else in the only string column.
    """
    files = files_of(dataset)
    suffixes = {file.suffix for file in files.values()}
    if ".parquet" in suffixes or (not files and not Path(dataset).is_dir()):
        if suffixes - {".parquet", ".md", ".json"}:  # a dataset's README.md and dataset_infos.json are not documents
            stop(f"--dataset {dataset} has parquet files and other files: keep them in different folders")
        yield from read_rows(dataset)
        return
    test = next((f"{name}/" for name in TEST_SPLITS if has_text(files, f"{name}/")), None)
    is_split = test is not None and has_text(files, "train/")
    for split, top in (("train", "train/"), ("test", test)) if is_split else (("", ""),):
        for name in [name for name in files if name.startswith(top)]:
            if name.endswith(LINES):
                yield from ((split, f"{name}:{number}", text) for number, text in read_lines(files[name]))
            elif text := read(files[name]):
                yield split, name, text


def has_text(files: dict[str, Path], top: str) -> bool:
    return any(name.startswith(top) and file.stat().st_size for name, file in files.items())


def read(file: Path) -> str:
    content = file.read_bytes()
    if b"\0" in content:
        stop(f"--dataset: {file} is not a text file, it contains NUL bytes: remove it")
    return content.decode(errors="replace")


def read_lines(file: Path) -> Iterator[tuple[int, str]]:
    """The non-empty texts of a file of JSON lines, with the number of their line."""
    import pyarrow

    number = 0
    try:
        with pyarrow.input_stream(str(file), compression="detect") as stream:
            for number, line in enumerate(io.BufferedReader(stream), 1):
                entry = json.loads(line) if line.strip() else {}
                columns = [name for name, value in entry.items() if isinstance(value, str)]
                if entry and "text" not in columns and len(columns) != 1:
                    stop(f"--dataset: {file}:{number} has no `text`, and not one string, but {', '.join(entry)}")
                if columns and (text := entry["text" if "text" in columns else columns[0]]):
                    yield number, text.encode(errors="replace").decode()  # JSON may have halves of characters
    except (OSError, ValueError, AttributeError) as error:
        stop(f"--dataset: {file}:{number or 1} is not a line of JSON ({error}): repair or remove it")


def read_rows(dataset: str) -> Iterator[Document]:
    """As `read_documents`, through `datasets.load_dataset`; of a folder, without its copy of the rows on the disk."""
    splits = load_dataset(dataset, EXAMPLE, streaming=Path(dataset).is_dir())
    if "train" not in splits:
        stop(f"--dataset {dataset} has the splits {', '.join(splits)}, but no train")
    tests = [name for name in TEST_SPLITS if name in splits][:1]
    for name in ("train", *tests):
        kinds = {column: getattr(kind, "dtype", "") for column, kind in splits[name].features.items()}
        columns = [column for column, kind in kinds.items() if kind in ("string", "large_string")]
        if "text" not in columns and len(columns) != 1:
            stop(f"--dataset {dataset} has the columns {', '.join(kinds)}: name the one with the text `text`")
        column = "text" if "text" in columns else columns[0]
        split = ("train" if name == "train" else "test") if tests else ""
        try:
            for rows in splits[name].select_columns([column]).iter(256):
                yield from ((split, text, text) for text in rows[column] if text)
        except Exception as error:  # of many types; `datasets` prints the name of the file
            stop(f"--dataset {dataset} cannot be read ({' '.join(str(error).split())}): fix the file, or remove it")


def survey(documents: Iterable[Document]) -> tuple[np.ndarray, np.ndarray]:
    """Whether each document is for testing, bool, and its number of characters.

    Without a test split, a hash of their names decides. Equal texts are on one side, by the first one's name.
    """
    splits, lengths, hashes = array("b"), array("q"), array("Q")
    for split, name, text in documents:
        if len(text) > LARGEST_DOCUMENT:
            stop(f"--dataset: {name[:100]!r} has {len(text) / 1e6:.0f} million characters: split it into documents")
        splits.append(split == "test")
        lengths.append(len(text))
        if not split:
            of_name = first_bytes(name)
            hashes.extend((of_name, of_name if text is name else first_bytes(text)))
    is_test = np.array(splits, bool)
    if hashes:
        names, texts = np.array(hashes).reshape(-1, 2).T
        unique, first, which = np.unique(texts, return_index=True, return_inverse=True)
        tested = np.argsort(names[first], kind="stable")[: math.ceil(len(unique) * TEST_FRACTION)]
        is_test = np.isin(np.arange(len(unique)), tested)[which]
    return is_test, np.array(lengths)


def first_bytes(text: str) -> int:
    """The first 8 bytes of a SHA-256, as a number."""
    return int.from_bytes(hashlib.sha256(os.fsencode(text)).digest()[:8], "big")


# Tokens


def load_tokens(
    dataset: str, tokenizer_file: str | None, vocabulary: int, context: int, cache_dir: str | None
) -> tuple[PackedText, PackedText, Tokenizer]:
    """The packed text for training and for testing, and the tokenizer.

    The first process that needs them tokenizes the documents, one after the other, into files in the cache, and the
    others wait; later runs find them there. After a kill, tokenizing goes on where it was.

    Args:
        dataset: see `read_documents`; or a folder with the files PREPARED, tokens of 2 bytes each, or 4 where the
            tokenizer has more than 65,536, and their tokenizer.json.
        tokenizer_file: tokenizer.json; None: learn one from the documents for training.
        vocabulary: number of tokens of a learned tokenizer.
        cache_dir: None: beside the cache of Hugging Face.
    """
    is_prepared = Path(dataset, PREPARED["train"]).is_file()
    if is_prepared and tokenizer_file is None:
        tokenizer_file = f"{dataset}/tokenizer.json"
    tokenizer = load_tokenizer(Path(tokenizer_file)) if tokenizer_file else None
    about = [(name, *identity(file)) for name, file in files_of(dataset).items()]
    if not about and not Path(dataset).is_dir():
        about = [(name, rows._fingerprint) for name, rows in load_dataset(dataset, EXAMPLE).items()]
    key = digest([FORMAT, dataset, about, tokenizer.to_str() if tokenizer else vocabulary])
    folder = cache_folder(cache_dir, "tokens") / key

    def make_tokens() -> None:
        if is_prepared:
            count_tokens(dataset, folder, tokenizer)
        else:
            write_tokens(dataset, folder, tokenizer, vocabulary)

    make_once([folder / "manifest.json"], make_tokens, f"the tokens of --dataset {dataset}")
    manifest, tokenizer = json.loads((folder / "manifest.json").read_text()), load_tokenizer(folder / "tokenizer.json")
    eos, dtype = tokenizer.token_to_id(EOS), dtype_of(tokenizer)
    files = [(folder / manifest["files"][split], manifest["bytes"][split]) for split in SPLITS]
    train, test = (PackedText(file, dtype, context, eos, num_bytes) for file, num_bytes in files)
    return train, test, tokenizer


def dtype_of(tokenizer: Tokenizer) -> str:
    """The type of a token in a file."""
    return "uint16" if tokenizer.get_vocab_size() <= 2**16 else "uint32"


def count_tokens(dataset: str, folder: Path, tokenizer: Tokenizer) -> None:
    """Check the tokens in the files PREPARED of a dataset, and write manifest.json, which refers to them."""
    if not isinstance(tokenizer.decoder, decoders.ByteLevel):
        stop(f"--dataset {dataset} has tokens, but its tokenizer is not byte-level: use the text instead")
    tokens, size, counted = tokenizer.get_vocab(), tokenizer.get_vocab_size(), {}
    num_bytes = np.array([len(token) if token != EOS else 0 for token in sorted(tokens, key=tokens.get)])
    dtype = np.dtype(dtype_of(tokenizer))
    for split, name in PREPARED.items():
        path, length, _ = identity(Path(dataset, name))
        if length % dtype.itemsize or length < 2 * dtype.itemsize:
            stop(f"{path} has {length} bytes, which are not two or more tokens of {dtype.itemsize} bytes")
        counts = np.zeros(size, np.int64)
        for start in range(0, length // dtype.itemsize, COUNTED_AT_ONCE):
            part = np.fromfile(path, dtype, COUNTED_AT_ONCE, offset=start * dtype.itemsize)
            if part.max() >= size:
                place = int((part >= size).argmax())
                stop(f"{path} has the token {part[place]} at place {start + place}, but the tokenizer has only {size}")
            counts += np.bincount(part, minlength=size)
        counted[split] = max(int(counts @ num_bytes), 1)
    write_atomically(folder / "tokenizer.json", lambda path: tokenizer.save(str(path)))
    files = {split: str(Path(dataset, name).resolve()) for split, name in PREPARED.items()}
    write_json(folder / "manifest.json", {"dataset": dataset, "files": files, "bytes": counted})


def write_tokens(dataset: str, folder: Path, tokenizer: Tokenizer | None, vocabulary: int) -> None:
    """Tokenize all documents into train.bin and test.bin of `folder`, and then write manifest.json."""
    progress = {"documents": 0, "tokens": dict.fromkeys(SPLITS, 0), "bytes": dict.fromkeys(SPLITS, 0)}
    saved = folder / "progress.json"
    if saved.exists() and (folder / "tokenizer.json").exists():
        progress = json.loads(saved.read_text())
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        is_test = np.load(folder / "is_test.npy")
    else:
        is_test, lengths = survey(read_documents(dataset))
        if is_test.all() or not is_test.any():
            stop(f"--dataset {dataset} needs a non-empty document for training and one for testing")
        if tokenizer is None:
            chosen = np.flatnonzero(~is_test)[:: 1 + lengths[~is_test].sum() // LEARN_FROM]
            tokenizer = learn_tokenizer(at(read_documents(dataset), chosen), vocabulary)
        np.save(folder / "is_test.npy", is_test)
        write_atomically(folder / "tokenizer.json", lambda path: tokenizer.save(str(path)))
    eos, dtype = tokenizer.token_to_id(EOS), dtype_of(tokenizer)
    files = {split: open(folder / f"{split}.bin", "ab") for split in SPLITS}  # noqa: SIM115
    start = time.monotonic()
    for split, file in files.items():
        file.truncate(progress["tokens"][split] * np.dtype(dtype).itemsize)
        if not progress["tokens"][split]:
            file.write(np.array([eos], dtype).tobytes())
            progress["tokens"][split] = 1
    documents, first = itertools.islice(read_documents(dataset), progress["documents"], None), progress["documents"]
    while chunk := list(chunks_of(documents)):
        if progress["documents"] + len(chunk) > len(is_test):
            break
        for place in range(0, len(chunk), 64):  # a few at a time: an Encoding takes far more memory than its ids
            texts = [text for _, _, text in chunk[place : place + 64]]
            for text, encoding in zip(texts, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True):
                split = "test" if is_test[progress["documents"]] else "train"
                files[split].write(np.array([*encoding.ids, eos], dtype).tobytes())
                progress["tokens"][split] += len(encoding) + 1
                progress["bytes"][split] += len(text.encode())
                progress["documents"] += 1
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
        write_json(saved, progress)
        done, left = progress["documents"], len(is_test) - progress["documents"]
        if (seconds := time.monotonic() - start) > 5:
            minutes = seconds / (done - first) * left / 60
            show(f"tokenizing --dataset {dataset}: {done / len(is_test):.0%}, {minutes:.0f} min left")
    if progress["documents"] != len(is_test):
        stop(f"--dataset {dataset} has changed while it was tokenized: it must not change during a run")
    names = {split: f"{split}.bin" for split in SPLITS}
    write_json(folder / "manifest.json", progress | {"dataset": dataset, "files": names})


def at(documents: Iterable[Document], places: np.ndarray) -> Iterator[str]:
    """The texts of the documents at these places."""
    wanted = set(places.tolist())
    return (text for place, (_, _, text) in enumerate(documents) if place in wanted)


def chunks_of(documents: Iterator[Document]) -> Iterator[Document]:
    """The next documents, of about SAVED_EVERY characters together."""
    size = 0
    while size < SAVED_EVERY and (document := next(documents, None)):
        size += len(document[2])
        yield document
