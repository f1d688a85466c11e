"""Data as people have them, made on the spot: each input is used whole, or what is left out is named, or it is refused.

    python tests/programs/inputs.py [WORDS]

Prints one line per input whose name has the words: used, named or refused; "SILENT" is a fault, and the exit code 1.
"""

import gzip
import io
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import pyarrow.parquet
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "harness"))

from tars import write_tar

from utils.data.image_files import read_image, to_rgb
from utils.data.images import load_splits
from utils.data.text import IGNORE_INDEX, find_sources, learn_tokenizer, load_tokens, read_documents


class Input(NamedTuple):
    name: str
    files: dict  # content by name: bytes, str, a tuple of the members of a tar file, or a function of the path
    expected: object  # what `read` returns; a str: a part of the error
    read: Callable  # of the folder, with a folder for its cache; returns (for training, for testing)
    named: str = ""  # a part of the line that says what is left out


# Text: the sorted documents of each side


def texts(folder: str, cache: str) -> tuple[list, list]:
    sources, column, left_out = find_sources(folder, None, cache)
    documents = [(split == "test", "".join(parts)) for split, _, parts in read_documents(sources, column)]
    print(left_out)
    return tuple(sorted(text for is_test, text in documents if is_test == side) for side in (False, True))


def lines(*entries) -> bytes:
    return "".join(json.dumps(entry) + "\n" for entry in entries).encode()


def of_text(text: str) -> bytes:
    return lines({"text": text})


def table(**columns) -> Callable:
    return lambda path: pyarrow.parquet.write_table(pyarrow.table(columns), path)


A_B = (["a"], ["b"])
TOGETHER = (["a", "b"], [])  # a hash decides
KINDS = {"txt": str, "JSONL": of_text, "jsonl.gz": lambda text: gzip.compress(of_text(text))}
KINDS["jsonl.zst"] = lambda text: pyarrow.compress(of_text(text), "zstd", asbytes=True)
KINDS |= {"parquet": lambda text: table(text=[text]), "csv": lambda text: f"text,id\n{text},1\n"}
PAIRS = [("train.{}", "test.{}"), ("Train/a.{}", "Test/a.{}"), ("data/train-00000.{}", "data/validation-00000.{}")]
PAIRS += [("wiki.train.0.{}", "wiki.eval.0.{}"), ("set/train2017/a.{}", "set/val2017/a.{}")]
PLAIN = {"a.txt": "a", "b.txt": "b"}
TEXT = {f"{kind} {one} {two}": ({one.format(kind): make("a"), two.format(kind): make("b")}, A_B)
        for kind, make in KINDS.items() for one, two in PAIRS}  # fmt: skip
TEXT |= {f"beside .{end}": (PLAIN | {f"c.{end}": "x,y"}, f"c.{end}") for end in ("csv", "jsonl", "parquet")}
TEXT |= {f"of .{end}": ({f"c.{end}": "x,y"}, "no text") for end in ("tsv", "json", "arrow", "zip", "txt.gz", "pdf")}
TEXT |= {
    "without splits": (PLAIN, TOGETHER),
    "hidden": (PLAIN | {".git/config": "x", ".c.txt": "c"}, TOGETHER),
    "latin-1": (PLAIN | {"c.txt": "ä".encode("latin-1")}, (["a", "b", "\ufffd"], [])),
    "UTF-16": (PLAIN | {"c.txt": "c".encode("utf-16")}, "contains NUL bytes"),
    "names with [brackets]": ({"a [x] *.txt": "a", "b ?.txt": "b"}, TOGETHER),
    "rows, names with [brackets]": ({"train [x].parquet": table(text=["a", "b"])}, TOGETHER),
    "with a link to itself": (PLAIN | {"y": lambda path: path.symlink_to(".")}, "Too many levels of symbolic links"),
    "one of which names a split": (PLAIN | {"val/c.txt": "c"}, "says no split"),
    "in an empty folder": ({}, "neither a folder with data nor a Hub id"),
    "lines, two strings": ({"a.jsonl": lines({"x": "a", "y": "b"})}, "choose the one with text by --text_column"),
    "lines, one without": ({"a.jsonl": lines({"text": "a"}, {"body": "b"})}, "a.jsonl:2 is not a JSON object"),
    "lines with half a character": ({"a.jsonl": lines({"text": "half \ud800"})}, (["half ?"], [])),
    "lines of a list": ({"a.jsonl": lines({"text": ["a"], "url": "u"})}, "has list"),
    "lines that are null": ({"a.jsonl": lines({"text": "a"}, None)}, "a.jsonl:2 is not a JSON object"),
    "lines cut off": ({"a.jsonl": b'{"text": "a"}\n{"text": '}, "a.jsonl:2 is not a JSON object"),
    "lines of gzip, cut off": ({"a.jsonl.gz": gzip.compress(of_text("a" * 99))[:-9]}, "a.jsonl.gz"),
    "rows, null and empty": ({"a.parquet": table(text=["a", None, ""], id=[1, 2, 3])}, (["a"], [])),
    "rows cut off": ({"a.parquet": b"PAR1 no rows"}, "cannot be read as parquet"),
    "csv of words that pandas leaves out": ({"a.csv": "text\nNA\nnull\n"}, (["NA", "null"], [])),
}  # fmt: skip
TEXT = [Input(f"text {name}", *row, texts) for name, row in TEXT.items()]
for beside in ("README.md", "LICENSE", "dataset_infos.json", "_SUCCESS", "Thumbs.db"):
    files = {"train.jsonl": of_text("a"), "test.jsonl": of_text("b"), beside: "about"}
    TEXT.append(Input(f"text and {beside}", files, A_B, texts, beside))
THREE = {"train.txt": "a", "test.txt": "b", "val.txt": "c"}
TEXT.append(Input("text of three splits", THREE, A_B, texts, "the split validation"))

# Tokens

MANY = [5, 200, 7, 8, 9, 10]
SMALL = learn_tokenizer(["some text"], 257).to_str()


def tokens(folder: str, cache: str, dtype: str | None = None) -> list:
    train, _, _ = load_tokens(folder, None, 300, 8, cache, token_dtype=dtype)
    return [int(token) for _, targets in train for token in targets if token != IGNORE_INDEX]


def bins(dtype: str, train=MANY) -> dict:
    binary = np.array(train, dtype).tobytes()
    return {"train.bin": binary, "val.bin": binary, "tokenizer.json": SMALL}


TOKENS = [
    Input("tokens uint16", bins("uint16"), MANY[1:], tokens),
    Input("tokens int32 --token_dtype", bins("int32"), MANY[1:], partial(tokens, dtype="int32")),
    Input("tokens int32 as uint16", bins("int32"), "see --token_dtype", tokens),
    Input("tokens of odd size", bins("uint8", [1, 2, 3]), "train.bin cannot be read", tokens),
    Input("tokens without val.bin", {"train.bin": bytes(4), "tokenizer.json": SMALL}, "bin cannot be read", tokens),
    Input("tokens and others", bins("uint16") | {"meta.pkl": "x"}, MANY[1:], tokens, "left out: meta.pkl"),
    Input("tokens and many", bins("uint16") | dict.fromkeys("abcde", "x"), MANY[1:], tokens, "a, b, c and 2 more"),
    Input("tokens --token_dtype of text", PLAIN, "is for a folder with train.bin", partial(tokens, dtype="int32")),
]

# Images: class and mean of the pixels / 4 of each


def images(folder: str, cache: str, **options) -> tuple[list, list]:
    found = []
    for split in load_splits(folder, cache_dir=cache, **options):
        cells = [split.rows[number][split.image_column] for number in range(len(split.labels))]
        means = [round(read_image(cell, lambda image: np.asarray(to_rgb(image)).mean()) / 4) for cell in cells]
        found.append(sorted(zip(map(split.classes.__getitem__, split.labels), means, strict=True)))
    return tuple(found)


PIXELS = np.arange(64, dtype=np.uint8).reshape(8, 8) * 2 + 100


def image(kind: str, mode: str | None = None, pixels=PIXELS) -> bytes:
    file, picture = io.BytesIO(), Image.fromarray(pixels)
    (picture.convert(mode) if mode else picture).save(file, kind)
    return file.getvalue()


PNG, MEAN = image("PNG"), round(PIXELS.mean() / 4)
GOOD = {"train/cat/1.png": PNG, "train/dog/1.png": PNG, "test/cat/1.png": PNG, "test/dog/1.png": PNG}
TWO = [("cat", MEAN), ("dog", MEAN)]
FORMATS = {"png": "PNG", "JPG": "JPEG", "jpeg": "JPEG", "bmp": "BMP", "gif": "GIF", "tif": "TIFF", "webp": "WEBP"}
FORMATS = {end: kind for end, kind in (FORMATS | {"avif": "AVIF", "ppm": "PPM"}).items() if kind in Image.SAVE}
PICTURES = {f".{end}": ({f"{name[:-3]}{end}": image(kind, "RGB") for name in GOOD}, (TWO, TWO))
            for end, kind in FORMATS.items()}  # fmt: skip
for one, two in (("Train", "Test"), ("training", "validation"), ("x/train", "x/valid"), ("train2017", "dev2017")):
    files = {name.replace("train", one, 1).replace("test", two, 1): PNG for name in GOOD}
    PICTURES[f"{one} {two}"] = files, (TWO, TWO)
WIDE = {"16 bits": image("PNG", pixels=PIXELS.astype(np.uint16) * 257), "floats": image("TIFF", pixels=PIXELS * 1.0)}
for name, content in (WIDE | {"cut off": image("JPEG")[:-200]}).items():
    PICTURES[name] = GOOD | {"train/cat/1.png": content}, "cat/1.png cannot be decoded"
for name in ("metadata.csv", "1.png", "cat/x/1.png"):
    PICTURES[f"and {name}"] = GOOD | {f"train/{name}": PNG}, "is not in a folder of its class"
for name in ("heic", "txt", "npy"):
    PICTURES[f"and .{name}"] = GOOD | {f"train/cat/1.{name}": b"x"}, "is not an image that Pillow opens"
PICTURES |= {
    "and labels.csv": (GOOD | {"labels.csv": "x"}, "says no split"),
    "behind a link": (GOOD | {"train/owl": lambda path: path.symlink_to("cat")}, ([*TWO, ("owl", MEAN)], TWO)),
    "of a class in test alone": (GOOD | {"test/owl/1.png": PNG}, "in test, but not in train"),
    "of a class named test": (GOOD | {"train/test/1.png": PNG}, ([*TWO, ("test", MEAN)], TWO)),
    "of train only": ({"train/cat/1.png": PNG}, "needs train and one of"),
}
IMAGES = [Input(f"images {name}", *row, images) for name, row in PICTURES.items()]
for beside in ("README.md", "train/Thumbs.db"):
    IMAGES.append(Input(f"images and {beside}", GOOD | {beside: "about"}, (TWO, TWO), images, beside))
IMAGES.append(Input("images of three splits", GOOD | {"val/cat/1.png": PNG}, (TWO, TWO), images, "split validation"))

# Tar files


def tar(label=lambda n: {"cls": str(n)}, more=(), names=("train-0.tar", "val-0.tar")) -> dict:
    members = [(f"{n}.{end}", text.encode()) for n in (0, 1) for end, text in label(n).items()]
    return dict.fromkeys(names, (*((f"{n}.png", PNG) for n in (0, 1)), *members, *more))


NUMBERS = ([("0", MEAN), ("1", MEAN)],) * 2
ARCHIVES = {
    "train, test": (tar(names=("x/train-000.TAR", "x/Test-000.TAR")), NUMBERS),
    "json": (tar(lambda n: {"json": json.dumps({"label": n})}), NUMBERS),
    "captions": (tar(lambda n: {"txt": "a cat on a mat"}), "its label is 'a cat on a mat'"),
    "classes.txt": (tar(lambda n: {"cls": ["dog", "cat"][n]}) | {"classes.txt": "cat\ndog\n"}, (TWO, TWO)),
    "image and a mask": (tar(lambda n: {"cls": str(n), "seg.png": "x"}), NUMBERS),
    "odd members": (tar(more=(("._0.png", b"x"), (".DS_Store", b"x"), ("README", b"x"))), NUMBERS),
    "without samples": (tar() | {"train-0.tar": ()}, "in test, but not in train"),
    "and compressed ones": (tar() | {"train-1.tar.gz": b"x"}, "is compressed"),
    "and others": (tar() | {"train-index.idx": "0"}, "files of several kinds"),
    "that is gzip": (tar() | {"train-0.tar": gzip.compress(b"x" * 9999)}, "is not a whole, uncompressed tar file"),
}  # fmt: skip
TARS = [Input(f"tar {name}", *row, images) for name, row in ARCHIVES.items()]
TARS += [
    Input("tar --label_column", tar(lambda n: {"json": json.dumps({"label": 7, "breed": n})}), NUMBERS,
          partial(images, label_column="breed")),
    Input("tar --image_column", tar(lambda n: {"cls": str(n), "jpg": "x"}), NUMBERS,
          partial(images, image_column="png")),
]  # fmt: skip

# Rows with images


def rows(names=("cat", "dog"), labels=(0, 1), pictures=({"bytes": PNG, "path": None},) * 2, more=()) -> Callable:
    def write(path: Path) -> None:
        label = datasets.ClassLabel(names=list(names)) if names else datasets.Value("int64")
        features = {"image": datasets.Image(), "label": label} | {name: datasets.Image() for name in more}
        columns = {"image": pictures, "label": labels} | dict.fromkeys(more, pictures)
        datasets.Dataset.from_dict(columns, features=datasets.Features(features)).to_parquet(path)

    return write


def pair(train=None, test=None) -> dict:
    return {"data/train-0.parquet": train or rows(), "data/validation-0.parquet": test or rows()}


TWICE = pair(rows(more=["mask"]), rows(more=["mask"]))
SLOW = {
    "": (pair(), (TWO, TWO)),
    "of numbers": (pair(rows(None), rows(None)), NUMBERS),
    "with names in another order": (pair(test=rows(("dog", "cat"))), "number their classes differently"),
    "of two images": (TWICE, "choose by --image_column"),
    "with a null image": (pair(rows(pictures=({"bytes": PNG, "path": None}, None))), "1 row without image"),
    "with the label -1": (pair(rows(None, (0, -1)), rows(None)), "labels that are not from 0 to"),
    "without test": ({"train.parquet": rows()}, "needs train and one of"),
}
SLOW = [Input(f"rows {name}", *row, images) for name, row in SLOW.items()]
SLOW += [
    Input("rows and README.md", pair() | {"README.md": "x"}, (TWO, TWO), images, "README.md"),
    Input("rows of two images, chosen", TWICE, (TWO, TWO), partial(images, image_column="mask")),
]

INPUTS = [*TEXT, *TOKENS, *IMAGES, *TARS, *SLOW]


def judge(case: Input) -> str:
    """ "used", "named", "refused", or what is wrong."""
    errors, said = io.StringIO(), io.StringIO()
    folders = tempfile.TemporaryDirectory(), tempfile.TemporaryDirectory()
    with folders[0] as folder, folders[1] as cache, redirect_stderr(errors), redirect_stdout(said):
        for name, content in case.files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, tuple):
                write_tar(path, content)
            elif callable(content):
                content(path)
            else:
                path.write_bytes(content.encode() if isinstance(content, str) else content)
        try:
            found = case.read(folder, cache)
        except (SystemExit, ValueError) as error:  # also UnreadableItem
            found = errors.getvalue() if isinstance(error, SystemExit) else str(error)
            if isinstance(case.expected, str) and case.expected in found:
                return "refused"
    if isinstance(case.expected, str) or found != case.expected:
        return f"SILENT or wrong: {found!r:.300}; expected {case.expected!r:.300}"
    if case.named not in said.getvalue():
        return f"SILENT: {case.named} is not named in {said.getvalue()}"
    return "named" if case.named else "used"


def main() -> None:
    outcomes = {case.name: judge(case) for case in INPUTS if all(word in case.name for word in sys.argv[1:])}
    for name, outcome in outcomes.items():
        print(f"{outcome:8} {name}")
    wrong = sum(outcome not in ("used", "named", "refused") for outcome in outcomes.values())
    print(f"{len(outcomes)} inputs, {wrong} silent or wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
