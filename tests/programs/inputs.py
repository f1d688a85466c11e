"""Data as people have them, made on the spot: each input is used whole, or what is left out is named, or it is refused.

    python tests/programs/inputs.py [WORDS]

Prints one line per input whose name has the words: used, named or refused; "SILENT" is a fault, and the exit code 1.
"""

import contextlib
import gzip
import io
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from tars import write_tar

from readers.image_decoding import read_image, to_rgb
from readers.images_in_memory import load_splits
from readers.tar_files import has_tar_files, load_tar_splits
from readers.text import IGNORE_INDEX, assign_splits, find_corpus, learn_tokenizer, load_tokens, read_documents


class Input(NamedTuple):
    name: str
    files: dict  # content by name: bytes, str, a tuple of the members of a tar file, or a function of the path
    read: Callable  # of the folder; returns (for training, for testing), or only the first
    expected: object  # what `read` returns; a str: a part of the error
    named: str = ""  # a part of the line that says what is left out


# Text


def texts(folder: Path, **options) -> tuple[list, list]:
    corpus = find_corpus(str(folder), **options)
    test_mask, _ = assign_splits(read_documents(corpus))
    documents = ["".join(document.parts) for document in read_documents(corpus)]
    announced.append(", ".join(corpus.left_out))
    return tuple(
        sorted(text for text, is_test in zip(documents, test_mask, strict=True) if is_test == side) for side in (0, 1)
    )


def all_texts(folder: Path, **options) -> list:
    return sorted(itertools.chain(*texts(folder, **options)))


def lines(*entries) -> bytes:
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


def of_text(rows: list[str]) -> bytes:
    return lines(*({"text": row} for row in rows))


def table(columns: dict, **options) -> Callable:
    return lambda path: pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)


KINDS = {
    "txt": lambda rows: "".join(rows),
    "md": lambda rows: "".join(rows),
    "jsonl": of_text,
    "ndjson": of_text,
    "JSONL": of_text,
    "jsonl.gz": lambda rows: gzip.compress(of_text(rows)),
    "parquet": lambda rows: table({"text": rows}),
}
PAIRS = [
    ("train.{}", "test.{}"),
    ("train.{}", "val.{}"),
    ("train/a.{}", "valid/a.{}"),
    ("Train/a.{}", "Test/a.{}"),
    ("corpus-training.{}", "corpus-dev.{}"),
    ("data/train-00000-of-00001.{}", "data/validation-00000-of-00001.{}"),
    ("wiki.train.0.{}", "wiki.eval.0.{}"),
    ("set/train2017/a.{}", "set/val2017/a.{}"),
]
ROWS = [f"row {number}" for number in range(40)]
TEXT = [
    Input(
        f"text {kind} {train.format('x')} {test.format('x')}",
        {train.format(kind): make(["a"]), test.format(kind): make(["b"])},
        texts,
        (["a"], ["b"]),
    )
    for kind, make in KINDS.items()
    for train, test in PAIRS
]
PLAIN = {"a.txt": "a", "b.txt": "b"}
BOTH = {"train.jsonl": of_text(["a"]), "test.jsonl": of_text(["b"])}
for beside in ("README.md", "readme.txt", "LICENSE", "dataset_infos.json", "_SUCCESS", "CITATION.cff", "Thumbs.db"):
    TEXT += [
        Input(f"text lines and {beside}", BOTH | {beside: "about"}, texts, (["a"], ["b"]), named=beside),
        Input(
            f"text train.txt, val.txt and {beside}",
            {"train.txt": "a", "val.txt": "b", beside: "about"},
            texts,
            (["a"], ["b"]),
            named=beside,
        ),
    ]
for suffix in (
    "csv",
    "tsv",
    "json",
    "arrow",
    "xlsx",
    "zip",
    "txt.gz",
    "tar",
    "tgz",
    "txt.xz",
    "pdf",
    "docx",
    "npy",
    "CSV",
):
    TEXT.append(Input(f"text beside .{suffix}", PLAIN | {f"c.{suffix}": "x,y"}, texts, f"c.{suffix} is not read"))
for split in ("test.txt", "val/c.txt", "train.txt", "dev_c.txt"):
    TEXT.append(Input(f"text of which only {split} names a split", PLAIN | {split: "c"}, texts, "says its split"))


def link(target: str) -> Callable:
    return lambda path: path.symlink_to(target)


def in_latin_1(path: Path) -> None:
    path.write_bytes("ä".encode("latin-1"))


TEXT += [
    Input("text without splits", PLAIN, all_texts, ["a", "b"]),
    Input("text with an empty file", PLAIN | {"c.txt": ""}, all_texts, ["a", "b"]),
    Input("text in nested folders", {"x/y/a.txt": "a", "x/b.txt": "b"}, all_texts, ["a", "b"]),
    Input("text hidden", PLAIN | {".git/config": "x", ".c.txt": "c"}, all_texts, ["a", "b"]),
    Input("text CRLF", PLAIN | {"c.txt": "c\r\nd\r"}, all_texts, ["a", "b", "c\r\nd\r"]),
    Input("text BOM", PLAIN | {"c.txt": b"\xef\xbb\xbfc"}, all_texts, ["a", "b", "\ufeffc"]),
    Input("text latin-1", PLAIN | {"c.txt": in_latin_1}, all_texts, ["a", "b", "\ufffd"]),
    Input("text UTF-16", PLAIN | {"c.txt": "c".encode("utf-16")}, texts, "contains NUL bytes"),
    Input("text binary", PLAIN | {"c.bin": bytes(range(256))}, texts, "contains NUL bytes"),
    Input("text names of odd bytes", PLAIN | {os.fsdecode(b"\xff.txt"): "c"}, all_texts, ["a", "b", "c"]),
    Input("text names with spaces and [brackets]", {"a [x] *.txt": "a", "b ?.txt": "b"}, all_texts, ["a", "b"]),
    Input("text behind a link to a file", PLAIN | {"c.txt": link("a.txt")}, all_texts, ["a", "a", "b"]),
    Input(
        "text behind a link to a folder",
        {"x/a.txt": "a", "x/b.txt": "b", "y": link("x")},
        all_texts,
        ["a", "a", "b", "b"],
    ),
    Input("text with a link to itself", PLAIN | {"y": link(".")}, texts, "leads back to itself"),
    Input("text with a link to nothing", PLAIN | {"y": link("gone")}, texts, "a link to nothing"),
    Input("text and lines", PLAIN | {"c.jsonl": of_text(["c"])}, texts, "files of several kinds"),
    Input("text and parquet", PLAIN | {"c.parquet": table({"text": ["c"]})}, texts, "files of several kinds"),
    Input("text of test only", {"test/a.txt": "a", "val/b.txt": "b"}, texts, "but no train"),
    Input("text of train only", {"train/a.txt": "a", "train/b.txt": "b"}, all_texts, ["a", "b"]),
    Input(
        "text of three splits",
        {"train.txt": "a", "test.txt": "b", "val.txt": "c"},
        texts,
        (["a"], ["b"]),
        named="1 file of validation",
    ),
    Input("text of two splits in one name", {"train_test.txt": "a", "b.txt": "b"}, texts, "words of two splits"),
    Input("text whose folder decides", {"train/test_a.txt": "a", "test/train_b.txt": "b"}, texts, (["a"], ["b"])),
    Input("text of code", {"testing_tools.py": "a", "b.py": "b"}, texts, "says its split"),
    Input("text of code in train/", {"train/test_a.py": "a", "train/b.py": "b"}, all_texts, ["a", "b"]),
    Input("text in an empty folder", {}, all_texts, []),
    Input("text README alone", {"README.md": "a"}, all_texts, ["a"]),
]

COLUMNS = {"x": "a", "y": "b"}
for name, entries, expected in [
    ("text and others", [{"url": "u", "text": "a"}, {"url": "v", "text": "b"}], ["a", "b"]),
    ("null text", [{"text": None, "url": "u"}, {"text": "a", "url": "v"}], ["a"]),
    ("empty text", [{"text": ""}, {"text": "a"}], ["a"]),
    ("no text, one string", [{"id": 1, "body": "a"}, {"id": 2, "body": "b"}], ["a", "b"]),
    ("no text, two strings", [COLUMNS], "choose the one with text by --text_column"),
    ("no text, one string and a null", [{"body": None, "url": "u"}], "choose the one with text by --text_column"),
    ("text in the first line only", [{"text": "a"}, {"body": "b"}], "has no 'text'"),
    ("text in the second line only", [{"body": "a"}, {"text": "b"}], "has no 'body'"),
    ("text of a list", [{"text": ["a"], "url": "u"}], "has list"),
    ("text of an object", [{"text": {"en": "a"}, "url": "u"}], "has dict"),
    ("text of a number", [{"text": 1, "url": "u"}], "has int"),
    ("text of true", [{"text": True}], "has bool"),
    ("text of false", [{"text": False}], "has bool"),
    ("text of zero", [{"text": 0}], "has int"),
    ("text of an empty list", [{"text": [], "url": "u"}], "has list"),
    ("text of an empty object", [{"text": {}, "url": "u"}], "has dict"),
    ("no strings", [{"id": 1}], "choose the one with text by --text_column"),
    ("a list", [["a"]], "is not a line of JSON"),
    ("a string", ["a"], "is not a line of JSON"),
    ("null", [None], "is not a line of JSON"),
    ("half a character", [{"text": "a\ud800"}], ["a?"]),
    ("NUL", [{"text": "a\0"}], ["a\0"]),
    ("an empty object", [{"text": "a"}, {}], "has no 'text'"),
    ("a nested text", [{"data": {"text": "a"}}], "choose the one with text by --text_column"),
]:
    TEXT.append(Input(f"lines {name}", {"a.jsonl": lines(*entries)}, all_texts, expected))
for name, content, expected in [
    ("blank lines", b'\n{"text": "a"}\n\n  \n', ["a"]),
    ("CRLF", b'{"text": "a"}\r\n{"text": "b"}\r\n', ["a", "b"]),
    ("BOM", b'\xef\xbb\xbf{"text": "a"}\n', ["a"]),
    ("without the last newline", b'{"text": "a"}', ["a"]),
    ("cut off", b'{"text": "a"}\n{"text": "b', "a.jsonl:2 is not a line of JSON"),
    ("of two lines each", b'{\n"text": "a"}', "a.jsonl:1 is not a line of JSON"),
    ("one array", b'[{"text": "a"}]', "is not a line of JSON"),
    ("of latin-1", b'{"text": "\xe4"}', "is not a line of JSON"),
    ("empty", b"", []),
    ("twice the same key", b'{"text": "a", "text": "b"}', ["b"]),
]:
    TEXT.append(Input(f"lines {name}", {"a.jsonl": content}, all_texts, expected))
PACKED = gzip.compress(of_text(ROWS))
TEXT += [
    Input(
        "lines gz of two members",
        {"a.jsonl.gz": gzip.compress(of_text(["a"])) + gzip.compress(of_text(["b"]))},
        all_texts,
        ["a", "b"],
    ),
    Input("lines gz cut off", {"a.jsonl.gz": PACKED[:-20]}, all_texts, "is not a line of JSON"),
    Input("lines gz damaged", {"a.jsonl.gz": PACKED[:30] + b"????" + PACKED[34:]}, all_texts, "is not a line of JSON"),
    Input("lines gz that is none", {"a.jsonl.gz": of_text(["a"])}, all_texts, "is not a line of JSON"),
    Input("lines zst", {"a.jsonl.zst": pyarrow.compress(of_text(["a"]), "zstd", asbytes=True)}, all_texts, ["a"]),
    Input(
        "lines in several files with other columns",
        {"a.jsonl": of_text(["a"]), "b.jsonl": lines({"body": "b"})},
        texts,
        "has no 'text'",
    ),
    Input("lines --text_column", {"a.jsonl": lines(COLUMNS)}, lambda folder: all_texts(folder, text_column="y"), ["b"]),
    Input(
        "lines --text_column that is not there",
        {"a.jsonl": lines(COLUMNS)},
        lambda folder: all_texts(folder, text_column="z"),
        "has the columns x, y",
    ),
]

STRINGS = {
    "large_string": pyarrow.large_string(),
    **({"string_view": pyarrow.string_view()} if hasattr(pyarrow, "string_view") else {}),
    "binary": pyarrow.binary(),
    "dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
}
for name, kind in STRINGS.items():
    TEXT.append(
        Input(
            f"parquet {name}",
            {"a.parquet": table({"text": pyarrow.array(["a", "b", None]).cast(kind)})},
            all_texts,
            ["a", "b"],
        )
    )
for name, column in {
    "map": pyarrow.array([[("k", 1)]], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
    "uuid": pyarrow.array([b"0" * 16], pyarrow.binary(16)).cast(pyarrow.uuid())
    if hasattr(pyarrow, "uuid")
    else pyarrow.array([1]),
    "struct": pyarrow.array([{"text": "x"}]),
    "null": pyarrow.nulls(1),
    "list": pyarrow.array([["x"]]),
    "date": pyarrow.array([1]).cast(pyarrow.timestamp("s")),
}.items():
    TEXT.append(
        Input(
            f"parquet beside a column of {name}",
            {"a.parquet": table({"other": column, "text": ["a"]})},
            all_texts,
            ["a"],
        )
    )
WHOLE = io.BytesIO()
pyarrow.parquet.write_table(pyarrow.table({"text": ROWS}), WHOLE)
TEXT += [
    Input(
        "parquet without rows",
        {"a.parquet": table({"text": pyarrow.array([], pyarrow.string())}), "b.parquet": table({"text": ["b"]})},
        all_texts,
        ["b"],
    ),
    Input(
        "parquet of nulls first",
        {"a.parquet": table({"text": pyarrow.nulls(2)}), "b.parquet": table({"text": ["b"]})},
        all_texts,
        ["b"],
    ),
    Input(
        "parquet with a column more",
        {"a.parquet": table({"text": ["a"]}), "b.parquet": table({"text": ["b"], "x": [1]})},
        all_texts,
        ["a", "b"],
    ),
    Input(
        "parquet without the column",
        {"a.parquet": table({"text": ["a"]}), "b.parquet": table({"body": ["b"]})},
        texts,
        "has no column 'text'",
    ),
    Input("parquet text of numbers", {"a.parquet": table({"text": [1]})}, texts, "has int"),
    Input("parquet text of lists", {"a.parquet": table({"text": [["a"]]})}, texts, "has list"),
    Input(
        "parquet of two strings",
        {"a.parquet": table({"x": ["a"], "y": ["b"]})},
        texts,
        "choose the one with text by --text_column",
    ),
    Input("parquet of one string", {"a.parquet": table({"x": [1], "y": ["b"]})}, all_texts, ["b"]),
    Input(
        "parquet --text_column",
        {"a.parquet": table({"x": ["a"], "y": ["b"]})},
        lambda folder: all_texts(folder, text_column="x"),
        ["a"],
    ),
    Input("parquet cut off", {"a.parquet": WHOLE.getvalue()[:-9]}, texts, "cannot be read"),
    Input("parquet empty", {"a.parquet": b""}, texts, "cannot be read"),
    Input(
        "parquet damaged",
        {"a.parquet": WHOLE.getvalue()[:8] + b"\xff" * 60 + WHOLE.getvalue()[68:]},
        texts,
        "cannot be read",
    ),
    Input(
        "parquet of Spark",
        {"part-0.parquet": table({"text": ["a"]}), "_SUCCESS": b""},
        all_texts,
        ["a"],
        named="_SUCCESS",
    ),
    Input("parquet many row groups", {"a.parquet": table({"text": ROWS}, row_group_size=3)}, all_texts, sorted(ROWS)),
]

# Tokens

TOKENIZER = learn_tokenizer(ROWS, 300)
SMALL = TOKENIZER.to_str()
MANY = list(range(1, 40))


def tokens(folder: Path, **options) -> list:
    with tempfile.TemporaryDirectory() as cache, contextlib.redirect_stdout(io.StringIO()) as said:
        train, _, _ = load_tokens(str(folder), None, 300, 8, cache, **options)
        found = [int(token) for _, targets in train for token in targets if token != IGNORE_INDEX]
    announced.append(said.getvalue())
    return found


def bins(dtype: str, train=MANY, **files) -> dict:
    binary = np.array(train, dtype).tobytes()
    return {"train.bin": binary, "val.bin": binary, "tokenizer.json": SMALL} | files


def wider(dtype: str) -> Callable:
    return lambda folder: tokens(folder, token_dtype=dtype)


HEADER = np.array([20240520, 1, 39] + [0] * 253, np.int32).tobytes()
TOKENS = [
    Input(f"tokens {dtype} as {dtype}", bins(dtype), wider(dtype), MANY[1:])
    for dtype in ("uint8", "uint16", "int32", "uint32", "int64")
]
TOKENS += [
    Input(f"tokens {dtype} as uint16", bins(dtype), tokens, "every second token")
    for dtype in ("int32", "uint32", "int64")
]
TOKENS += [
    Input("tokens uint16", bins("uint16"), tokens, MANY[1:]),
    Input("tokens uint8 as uint16", bins("uint8", train=[1, 200] * 20), tokens, "has the token"),
    Input("tokens out of range", bins("uint16", train=[5, 300]), tokens, "has the token 300 at place 1"),
    Input("tokens negative", bins("int32", train=[5, -1]), wider("int32"), "has the token -1 at place 1"),
    Input("tokens of odd size", bins("uint8", train=[1, 2, 3]), tokens, "are not two or more tokens"),
    Input(
        "tokens of llm.c",
        bins("uint16") | {"train.bin": HEADER + np.array(MANY, np.uint16).tobytes()},
        tokens,
        "a header of llm.c",
    ),
    Input(
        "tokens without val.bin", {"train.bin": b"\1\0\2\0", "tokenizer.json": SMALL}, tokens, "val.bin cannot be read"
    ),
    Input(
        "tokens without a tokenizer",
        {"train.bin": b"\1\0\2\0", "val.bin": b"\1\0\2\0"},
        tokens,
        "is not a readable tokenizer",
    ),
    Input(
        "tokens and other files",
        bins("uint16") | {"meta.pkl": b"x", "input.txt": "x", "readme.md": "x"},
        tokens,
        MANY[1:],
        named="left out: readme.md, input.txt, meta.pkl",
    ),
    Input(
        "tokens --token_dtype of text", PLAIN, wider("uint16"), "--token_dtype uint16 is for a folder with train.bin"
    ),
]

# Images

PIXELS = np.arange(64, dtype=np.uint8).reshape(8, 8) * 2 + 100


def image(kind: str, mode: str = "L", **options) -> bytes:
    file = io.BytesIO()
    Image.fromarray(PIXELS).convert(mode).save(file, kind, **options)
    return file.getvalue()


def of_array(pixels: np.ndarray, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def means(split) -> list:
    """The label and the mean of the pixels, to 4, of each sample."""
    rows = [split.rows[number][split.image_column] for number in range(len(split.labels))]
    pixels = [read_image(row, 0, lambda image: np.asarray(to_rgb(image)).mean()) for row in rows]
    return [(split.classes[label], round(mean / 4)) for label, mean in zip(split.labels.tolist(), pixels, strict=True)]


def images(folder: Path, **options) -> tuple[list, list]:
    with tempfile.TemporaryDirectory() as cache, contextlib.redirect_stdout(io.StringIO()) as said:
        splits = (
            load_tar_splits(str(folder), cache, **options)
            if has_tar_files(str(folder))
            else load_splits(str(folder), **options)
        )
        found = tuple(sorted(means(split)) for split in splits)
    announced.append(said.getvalue())
    return found


PNG, MEAN = image("PNG"), round(PIXELS.mean() / 4)
GOOD = {"train/cat/1.png": PNG, "train/dog/1.png": PNG, "test/cat/1.png": PNG, "test/dog/1.png": PNG}
TWO = [("cat", MEAN), ("dog", MEAN)]
IMAGES = []
for extension, kind in {
    **{
        "png": "PNG",
        "PNG": "PNG",
        "jpg": "JPEG",
        "jpeg": "JPEG",
        "JPG": "JPEG",
        "jfif": "JPEG",
        "bmp": "BMP",
        "gif": "GIF",
    },
    **{
        "tif": "TIFF",
        "tiff": "TIFF",
        "webp": "WEBP",
        "avif": "AVIF",
        "jp2": "JPEG2000",
        "mpo": "MPO",
        "pgm": "PPM",
        "tga": "TGA",
    },
}.items():
    if kind in Image.registered_extensions().values() and kind in Image.SAVE:
        IMAGES.append(
            Input(
                f"images .{extension}",
                {f"{name[:-3]}{extension}": image(kind, "RGB") for name in GOOD},
                images,
                (TWO, TWO),
            )
        )
for mode in ("1", "L", "RGB", "P", "RGBA", "LA"):
    expected = round(np.asarray(Image.fromarray(PIXELS).convert(mode).convert("L")).mean() / 4)
    IMAGES.append(
        Input(
            f"images of mode {mode}",
            GOOD | {"train/cat/1.png": image("PNG", mode)},
            images,
            ([("cat", expected), TWO[1]], TWO),
        )
    )
IMAGES.append(
    Input(
        "images CMYK",
        GOOD | {"train/cat/1.jpg": image("JPEG", "CMYK"), "train/cat/1.png": PNG},
        images,
        ([TWO[0], *TWO], TWO),
    )
)
WIDE = PIXELS.astype(np.uint16)
for name, content, expected in [
    ("16 bits png", of_array(WIDE * 257), MEAN),
    ("16 bits tiff", of_array(WIDE * 257, "TIFF"), MEAN),
    ("16 bits pgm", b"P5 8 8 65535 " + (WIDE * 257).byteswap().tobytes(), MEAN),
    ("12 bits pgm", b"P5 8 8 4095 " + (WIDE * 16 + 8).byteswap().tobytes(), MEAN),
    ("12 bits in 16 of png", of_array(WIDE * 16), "integers of unknown range"),
    ("12 bits in 16 of tiff", of_array(WIDE * 16, "TIFF"), "integers of unknown range"),
    ("8 bits in 16", of_array(WIDE), "integers of unknown range"),
    ("int32", of_array(PIXELS.astype(np.int32), "TIFF"), "integers of unknown range"),
    ("float", of_array(PIXELS.astype(np.float32), "TIFF"), "floating-point"),
    ("cut off", image("JPEG")[:-200], "cannot be decoded"),
    ("empty", b"", "cannot be decoded"),
    ("text", b"no image", "cannot be decoded"),
    ("html", b"<html>404</html>", "cannot be decoded"),
]:
    expected = expected if isinstance(expected, str) else ([("cat", expected), TWO[1]], TWO)
    IMAGES.append(Input(f"images {name}", GOOD | {"train/cat/1.png": content}, images, expected))
for train, test in [
    ("train", "val"),
    ("Train", "Test"),
    ("training", "validation"),
    ("x/train", "x/valid"),
    ("train2017", "dev2017"),
    ("imagenet-train", "imagenet-val"),
]:
    files = {name.replace("train", train, 1).replace("test", test, 1): content for name, content in GOOD.items()}
    IMAGES.append(Input(f"images {train} {test}", files, images, (TWO, TWO)))
for beside in ("README.md", "LICENSE", "train/Thumbs.db", "train/cat/desktop.ini"):
    IMAGES.append(Input(f"images and {beside}", GOOD | {beside: "about"}, images, (TWO, TWO), named=beside))
for beside, words in {
    "train/metadata.csv": "is not in a folder of its class",
    "train/metadata.jsonl": "is not in a folder of its class",
    "labels.csv": "says its split",
    "train/1.png": "is not in a folder of its class",
    "train/cat/x/1.png": "is not in a folder of its class",
    "cat/1.png": "says its split",
    "train/cat/1.heic": "is not an image that Pillow opens",
    "train/cat/1.jxl": "is not an image that Pillow opens",
    "train/cat/1.txt": "is not an image that Pillow opens",
    "train/cat/1.npy": "is not an image that Pillow opens",
    "train/cat/1.mp4": "is not an image that Pillow opens",
    "train/cat/1": "is not an image that Pillow opens",
    os.fsdecode(b"train/cat/\xff.png"): "whose name is not UTF-8",
    "test/owl/1.png": "in test, but not in train",
}.items():
    content = PNG if beside.endswith(".png") else b"\0\0\0\x18ftypheic"
    IMAGES.append(Input(f"images and {beside!a}", GOOD | {beside: content}, images, words))
IMAGES += [
    Input("images without an extension", GOOD | {"train/cat/2": PNG}, images, ([TWO[0], *TWO], TWO)),
    Input("images with a wrong extension", GOOD | {"train/cat/1.png": image("JPEG")}, images, (TWO, TWO)),
    Input("images of an unknown extension", GOOD | {"train/cat/2.image": PNG}, images, ([TWO[0], *TWO], TWO)),
    Input("images hidden", GOOD | {"train/cat/.2.png": PNG, "train/cat/._1.png": b"x"}, images, (TWO, TWO)),
    Input("images behind a link", GOOD | {"train/owl": link("cat")}, images, ([*TWO, ("owl", MEAN)], TWO)),
    Input("images of three splits", GOOD | {"val/cat/1.png": PNG}, images, (TWO, TWO), named="1 file of validation"),
    Input("images of train only", {"train/cat/1.png": PNG}, images, "it needs train and one of"),
    Input("images without splits", {"cat/1.png": PNG, "dog/1.png": PNG}, images, "it needs train and one of"),
    Input("images empty folder", {}, images, "it needs train and one of"),
    Input("images class named test", GOOD | {"train/test/1.png": PNG}, images, ([*TWO, ("test", MEAN)], TWO)),
]

# Tar files


def tar(names: list[str], label=lambda n: {"cls": str(n % 2)}, picture="png", first=0, count=2) -> dict:
    members = []
    for number in range(first, first + count):
        members += [
            (f"{number}.{picture}", PNG),
            *((f"{number}.{kind}", text.encode()) for kind, text in label(number).items()),
        ]
    return dict.fromkeys(names, tuple(members))


NUMBERS = [("0", MEAN), ("1", MEAN)]
NAMES = ["train-0.tar", "val-0.tar"]
TARS = [
    Input(f"tar {train} {test}", tar([train, test]), images, (NUMBERS, NUMBERS))
    for train, test in [
        ("train-0.tar", "test-0.tar"),
        ("train/0.tar", "val/0.tar"),
        ("Train/0.tar", "Test/0.tar"),
        ("a-training.tar", "a-dev.tar"),
        ("x/imagenet-train-000.tar", "x/imagenet-validation-000.tar"),
        ("train.TAR", "val.TAR"),
    ]
]
for packed in ("train-1.tar.gz", "train-1.tgz", "train-1.tar.xz", "train-1.tar.zst", "train/1.tar.bz2"):
    TARS.append(Input(f"tar beside {packed}", tar(NAMES) | {packed: b"x"}, images, "is compressed"))
for name, label, expected in [
    ("json", lambda n: {"json": json.dumps({"label": n % 2})}, NUMBERS),
    (
        "json of names",
        lambda n: {"json": json.dumps({"label": ["cat", "dog"][n % 2]})},
        "labels are numbers from 0, or names in",
    ),
    ("txt", lambda n: {"txt": f"{n % 2}\n"}, NUMBERS),
    ("cls and json", lambda n: {"cls": f"{n % 2}", "json": "{}"}, NUMBERS),
    ("names", lambda n: {"cls": "cat"}, "labels are numbers from 0, or names in"),
    ("captions", lambda n: {"txt": "a cat on a mat"}, "labels are numbers from 0, or names in"),
    ("none", lambda n: {}, "it has no label"),
    ("empty", lambda n: {"cls": ""}, "its label is ''"),
    ("negative", lambda n: {"cls": "-1"}, "its label is '-1'"),
    ("huge", lambda n: {"cls": "1000000000000"}, "its label is '1000000000000'"),
    ("fraction", lambda n: {"cls": "0.5"}, "its label is '0.5'"),
    ("json list", lambda n: {"json": "[1]"}, "its label is [1]"),
    ("json without label", lambda n: {"json": "{}"}, "KeyError: 'label'"),
    ("json damaged", lambda n: {"json": "{"}, "JSONDecodeError"),
    ("json true", lambda n: {"json": '{"label": true}'}, "its label is True"),
    ("target.cls", lambda n: {"target.cls": f"{n % 2}"}, NUMBERS),
]:
    TARS.append(
        Input(
            f"tar labels {name}",
            tar(NAMES, label),
            images,
            (expected, expected) if isinstance(expected, list) else expected,
        )
    )
of_names = tar(NAMES, lambda n: {"cls": ["dog", "cat"][n % 2]})
TARS += [
    Input("tar labels and classes.txt", of_names | {"classes.txt": "cat\ndog\n"}, images, (TWO, TWO)),
    Input(
        "tar labels of json and classnames.txt",
        tar(NAMES, lambda n: {"json": json.dumps({"label": ["dog", "cat"][n % 2]})}) | {"classnames.txt": "cat\ndog"},
        images,
        (TWO, TWO),
    ),
    Input(
        "tar labels and two lists of classes",
        of_names | {"classes.txt": "cat\ndog\n", "classnames.txt": "dog\ncat\n"},
        images,
        "and classnames.txt, which is not one",
    ),
    Input(
        "tar labels and Latin-1 classes.txt",
        of_names | {"classes.txt": b"\xe9\n"},
        images,
        "classes.txt cannot be read",
    ),
    Input("tar numbers and classes.txt", tar(NAMES) | {"classes.txt": "cat\ndog\n"}, images, (TWO, TWO)),
    Input(
        "tar label outside classes.txt", tar(NAMES) | {"classes.txt": "cat\n"}, images, "has the label 1, but 1 classes"
    ),
    Input(
        "tar --label_column",
        tar(NAMES, lambda n: {"cls": "7", "breed": f"{n % 2}"}),
        lambda folder: images(folder, label_column="breed"),
        (NUMBERS, NUMBERS),
    ),
    Input(
        "tar --label_column in json",
        tar(NAMES, lambda n: {"json": json.dumps({"breed": n % 2})}),
        lambda folder: images(folder, label_column="breed"),
        (NUMBERS, NUMBERS),
    ),
    Input("tar input.jpg", tar(NAMES, picture="input.png"), images, (NUMBERS, NUMBERS)),
    Input("tar .JPG", tar(NAMES, picture="PNG"), images, (NUMBERS, NUMBERS)),
    Input(
        "tar two images",
        tar(NAMES, lambda n: {"cls": f"{n % 2}", "jpg": "x"}),
        images,
        "it has 2 images (png, jpg): see --image_column",
    ),
    Input(
        "tar two images --image_column",
        tar(NAMES, lambda n: {"cls": f"{n % 2}", "jpg": "x"}),
        lambda folder: images(folder, image_column="png"),
        (NUMBERS, NUMBERS),
    ),
    Input("tar image and mask", tar(NAMES, lambda n: {"cls": f"{n % 2}", "seg.png": "x"}), images, (NUMBERS, NUMBERS)),
    Input("tar without images", tar(NAMES, picture="wav"), images, "it has 0 images"),
    Input("tar and README.md", tar(NAMES) | {"README.md": "about"}, images, (NUMBERS, NUMBERS), named="README.md"),
    Input("tar and others", tar(NAMES) | {"index.idx": "0"}, images, "index.idx, which is not one"),
    Input("tar without test", tar(["train-0.tar"]), images, "has no tar files for testing"),
    Input("tar of unknown split", tar([*NAMES, "more.tar"]), images, "says its split"),
    Input(
        "tar behind a link",
        {**tar(["x/train/0.tar", "x/val/0.tar"]), "y": link("x")},
        images,
        (sorted(NUMBERS * 2), sorted(NUMBERS * 2)),
    ),
    Input("tar without samples", tar(NAMES) | {"train-0.tar": ()}, images, "has no samples"),
    Input(
        "tar keys that differ by case",
        {**dict.fromkeys(NAMES, (("a.png", PNG), ("a.cls", b"0"), ("A.png", PNG), ("A.cls", b"1")))},
        images,
        (NUMBERS, NUMBERS),
    ),
    Input(
        "tar two members of one name",
        dict.fromkeys(NAMES, (("a.png", PNG), ("a.png", PNG))),
        images,
        "two members are named a.png",
    ),
]
for odd in ("._0.png", ".DS_Store", "README", "x/._0.png", "LICENSE"):
    members = {name: (*content, (odd, b"x")) for name, content in tar(NAMES).items()}
    TARS.append(Input(f"tar with the member {odd}", members, images, (NUMBERS, NUMBERS)))


def cut(size: int, more: bytes = b"") -> Callable:
    def write(path: Path) -> None:
        write_tar(path, tar(NAMES)["train-0.tar"])
        path.write_bytes(path.read_bytes()[:size] + more)

    return write


for size in (0, 100, 512, 700, 1024, 1536, 2048, 2560):
    TARS.append(
        Input(
            f"tar cut at {size}",
            tar(NAMES) | {"train-0.tar": cut(size)},
            images,
            "is not a whole, uncompressed tar file",
        )
    )
TARS += [
    Input(
        "tar of two archives",
        tar(NAMES) | {"train-0.tar": cut(10240, b"x" * 512)},
        images,
        "is not a whole, uncompressed tar file",
    ),
    Input(
        "tar that is gzip",
        tar(NAMES) | {"train-0.tar": gzip.compress(b"x" * 9999)},
        images,
        "is not a whole, uncompressed tar file",
    ),
    Input(
        "tar that is text",
        tar(NAMES) | {"train-0.tar": b"no tar file" * 99},
        images,
        "is not a whole, uncompressed tar file",
    ),
]

# Rows with images


def rows(names=("cat", "dog"), labels=(0, 1), pictures=None, others=()) -> Callable:
    def write(path: Path) -> None:
        import datasets

        datasets.disable_progress_bars()
        pictures_ = pictures or [{"bytes": PNG, "path": None}] * len(labels)
        features = {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(names=list(names)) if names else datasets.Value("int64"),
        }
        features |= {name: datasets.Image() for name in others}
        columns = {"image": pictures_, "label": list(labels)} | {name: pictures_ for name in others}
        datasets.Dataset.from_dict(columns, features=datasets.Features(features)).to_parquet(path)

    return write


def pair(train: Callable, test: Callable, **others) -> dict:
    return {"train.parquet": train, "test.parquet": test} | others


NULL = [{"bytes": PNG, "path": None}, None]
LARGE = 10**12
OTHER = rows(("dog", "cat"))
TWICE = pair(rows(others=["mask"]), rows(others=["mask"]))
DATA = {"data/train-00000-of-00001.parquet": rows(), "data/validation-00000-of-00001.parquet": rows()}
SLOW = [
    Input("rows", pair(rows(), rows()), images, (TWO, TWO)),
    Input("rows data/", DATA, images, (TWO, TWO)),
    Input("rows and README.md", pair(rows(), rows()) | {"README.md": "x"}, images, (TWO, TWO), named="README.md"),
    Input("rows and notes", pair(rows(), rows()) | {"notes.csv": "x"}, images, "notes.csv, which is not one"),
    Input("rows and csv", pair(rows(), rows()) | {"test.csv": "x"}, images, "test.csv, which is not one"),
    Input("rows of numbers", pair(rows(None), rows(None)), images, (NUMBERS, NUMBERS)),
    Input("rows with names in another order", pair(rows(), OTHER), images, "has other classes than"),
    Input("rows of two orders", pair(rows(), rows()) | {"train-2.parquet": OTHER}, images, "has other classes than"),
    Input("rows of two images", TWICE, images, "choose one by --image_column"),
    Input("rows of two images, chosen", TWICE, lambda folder: images(folder, image_column="mask"), (TWO, TWO)),
    Input("rows with a null image", pair(rows(pictures=NULL), rows()), images, "has a row without image, 1"),
    Input("rows with a null label", pair(rows(None, (0, None)), rows(None)), images, "has a row without label, 1"),
    Input(
        "rows with the label -1",
        pair(rows(None, (0, -1)), rows(None)),
        images,
        "rows without a label, the first of them row 1",
    ),
    Input("rows with a huge label", pair(rows(None, (0, LARGE)), rows(None)), images, "has the label 1000000000000"),
    Input("rows without test", {"train.parquet": rows()}, images, "it needs train and one of"),
    Input("rows without images", pair(table({"x": [1]}), table({"x": [1]})), images, "it needs an Image column"),
    Input("rows cut off", pair(lambda path: path.write_bytes(WHOLE.getvalue()[:-9]), rows()), images, "cannot be read"),
]

QUICK = [*TEXT, *TOKENS, *IMAGES, *TARS]
announced = []


def write_files(folder: Path, files: dict) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, tuple):
            write_tar(path, content)
        elif callable(content):
            content(path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)


def judge(case: Input) -> str:
    """ "used", "named", "refused", or what is wrong."""
    announced.clear()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()) as errors:
        write_files(Path(folder), case.files)
        try:
            found = case.read(Path(folder))
        except (SystemExit, ValueError) as error:  # UnreadableItem, and read_image's
            found = errors.getvalue() if isinstance(error, SystemExit) else str(error)
            if isinstance(case.expected, str) and case.expected in found and len(found.strip().splitlines()) == 1:
                return "refused"
        except Exception as error:
            return f"TRACEBACK of {error!r}"
    if isinstance(case.expected, str) or found != case.expected:
        return f"SILENT or wrong: {found!r:.300}; expected {case.expected!r:.300}"
    if case.named and case.named not in "".join(announced):
        return f"SILENT: {case.named} is not named in {announced}"
    return "named" if case.named else "used"


def main() -> None:
    words = sys.argv[1:]
    cases = [case for case in (*QUICK, *SLOW) if all(word in case.name for word in words)]
    outcomes = [(case.name, judge(case)) for case in cases]
    for name, outcome in outcomes:
        print(f"{outcome:8} {name}")
    wrong = sum(outcome not in ("used", "named", "refused") for _, outcome in outcomes)
    print(f"{len(outcomes)} inputs, {wrong} silent or wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
