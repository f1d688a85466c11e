"""Text for language models: documents, tokenizers, and packed sequences."""

import errno
import gzip
import importlib
import itertools
import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import unicodedata
from pathlib import Path
from unittest.mock import Mock

import datasets
import numpy as np
import pyarrow
import pytest
import torch
from conftest import ROOT
from documents import load_text
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from readers import text
from readers.text import EOS, IGNORE_INDEX, STDLIB, learn_tokenizer, load_tokenizer, load_tokens

TEXTS = ["low lower lowest\n", "new newer newest wide wider\n    wide", "l\xf6w 12 12_3 ==! \u2603"]
BYTES = learn_tokenizer(TEXTS, 257)


def stops(capsys, function, *arguments) -> str:
    with pytest.raises(SystemExit) as stopped:
        function(*arguments)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def write_files(folder, contents):
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return str(folder)


def write_parquet(folder, name="text", **splits):
    folder.mkdir()
    for split, rows in splits.items():
        table = datasets.Dataset.from_dict({"id": ["x"] * len(rows), name: rows})
        table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return str(folder)


def pack(tmp_path, texts: list[str], tokenizer: Tokenizer, context: int):
    """The packed text of these documents, which are also the test."""
    for split in ("train", "test"):
        write_files(tmp_path / "packed" / split, {f"{n:03}": each.encode() for n, each in enumerate(texts)})
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    cache = tmp_path / "cache"
    data, _, _ = load_tokens(str(tmp_path / "packed"), str(tmp_path / "tokenizer.json"), 0, context, str(cache))
    return data


def tensors_of(data) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(map(torch.stack, zip(*(data[index] for index in range(len(data))), strict=True)))


@pytest.mark.parametrize("context", [1, 4, 5, 7, 100])
def test_each_token_is_a_target_once_from_the_one_before_it(context, tmp_path):
    data = pack(tmp_path, ["abcd", "e", "fghij"], BYTES, context)
    inputs, targets = tensors_of(pickle.loads(pickle.dumps(data)))
    assert inputs.shape == targets.shape == (math.ceil(13 / context), context)
    real = targets.flatten() != IGNORE_INDEX

    def as_text(tokens):
        return BYTES.decode(tokens.tolist(), skip_special_tokens=False).replace(EOS, "|")

    assert as_text(targets.flatten()[real]) == "abcd|e|fghij|"
    assert as_text(inputs.flatten()[real]) == "|abcd|e|fghij"
    assert (inputs.flatten()[~real] == BYTES.token_to_id(EOS)).all()


def test_no_document_of_many_is_lost(tmp_path):
    texts = [f"document {number} " for number in range(130)]
    _, targets = tensors_of(pack(tmp_path, texts, BYTES, 9))
    assert BYTES.decode(targets[targets != IGNORE_INDEX].tolist()) == "".join(texts)


def test_a_document_in_pieces_has_an_eos_at_its_ends_only(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "PIECE", 300)
    document, eos = "low lower lowest " * 100, BYTES.token_to_id(EOS)
    data = pack(tmp_path, [document], BYTES, 16)
    assert np.fromfile(data.file.name, np.uint16).tolist() == [eos, *BYTES.encode(document).ids, eos]


def test_bits_per_byte_count_every_token_and_divide_by_the_bytes_of_the_text(tmp_path):
    data = pack(tmp_path, ["lower l\xf6w", "newest"], learn_tokenizer(TEXTS, 270), 4)
    _, targets = tensors_of(data)
    counted = (targets != IGNORE_INDEX).sum().item()
    assert counted < 16
    assert data.bits_per_byte(torch.tensor(1.0))["bits_per_byte"].item() == pytest.approx(counted / 16 / math.log(2))


@pytest.mark.parametrize("vocabulary", [257, 260, 300])
def test_a_learned_tokenizer_gives_any_text_back(vocabulary):
    tokenizer = learn_tokenizer(TEXTS, vocabulary)
    assert 257 <= tokenizer.get_vocab_size() <= vocabulary
    for document in [*TEXTS, "other words\n\n\t\r\n  ", "".join(map(chr, range(300))), f"a{EOS}b"]:
        tokens = tokenizer.encode(document, add_special_tokens=False).ids
        eos = tokenizer.token_to_id(EOS)
        assert eos not in tokens
        assert tokenizer.decode([eos, *tokens, eos]) == document


def test_a_tokenizer_is_learned_from_a_part_of_a_large_corpus(tmp_path, monkeypatch):
    folder = write_files(tmp_path / "rows", {f"{number}.txt": b"text %06d" % number for number in range(400)})
    learned = []
    monkeypatch.setattr(text, "LEARN_FROM", 400)
    monkeypatch.setattr(text, "learn_tokenizer", lambda texts, _: learned.extend(texts) or BYTES)
    load_tokens(folder, None, 300, 4, str(tmp_path))
    assert 300 < sum(map(len, learned)) <= 400


def test_every_process_learns_the_same_tokenizer():
    program = (
        "from readers.text import *; corpus = find_corpus('accelerate_configs'); "
        "texts = [part for *_, parts in read_documents(corpus) for part in parts]; "
        "print(learn_tokenizer(texts, 500).to_str())"
    )
    environment = {"RAYON_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True)
    corpus = text.find_corpus(str(ROOT / "accelerate_configs"))
    texts = ["".join(parts) for *_, parts in text.read_documents(corpus)]
    assert done.stdout == learn_tokenizer(texts, 500).to_str() + "\n"


@pytest.mark.others("transformers")
def test_a_saved_tokenizer_is_read_by_transformers(tmp_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer = learn_tokenizer(TEXTS, 264)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    expected = tokenizer.encode(TEXTS[1]).ids
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token=EOS)
    assert theirs.encode(TEXTS[1]) == expected
    assert theirs.decode(expected) == TEXTS[1]
    assert theirs.eos_token_id == tokenizer.token_to_id(EOS)


def test_a_tokenizer_of_the_hub_neither_cuts_nor_pads_and_gets_an_eos(tmp_path, capsys):
    words = {f"word{number}": number for number in range(9)}
    theirs = Tokenizer(models.WordLevel(words, unk_token="word0"))
    theirs.pre_tokenizer = pre_tokenizers.Whitespace()
    theirs.enable_truncation(2)
    theirs.enable_padding(length=20)
    theirs.save(str(tmp_path / "theirs.json"))
    tokenizer = load_tokenizer(tmp_path / "theirs.json")
    assert tokenizer.get_vocab_size() == 10
    assert tokenizer.encode("word3 word1 word4 other").ids == [3, 1, 4, 0]
    inputs, targets = tensors_of(pack(tmp_path, ["word3 word1 word4", "word5"], tokenizer, 6))
    assert inputs.tolist() == [[9, 3, 1, 4, 9, 5]]
    assert targets.tolist() == [[3, 1, 4, 9, 5, 9]]

    for words in ({"a": 0, "b": 7}, {}):
        Tokenizer(models.WordLevel(words, unk_token="a")).save(str(tmp_path / "unusable.json"))
        assert "no tokens, or gaps in their ids" in stops(capsys, load_tokenizer, tmp_path / "unusable.json")


def test_added_tokens_that_the_normalizer_makes_equal_are_refused(capsys, tmp_path):
    """The package would take one of them at random, another one in each process."""
    tokenizer = learn_tokenizer(TEXTS, 260)
    tokenizer.add_tokens(["Foo", AddedToken("foo", normalized=False)])
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    load_tokenizer(tmp_path / "tokenizer.json")
    tokenizer.add_tokens(["FOO"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert "the added tokens 'Foo' and 'FOO', which" in stops(capsys, load_tokenizer, tmp_path / "tokenizer.json")


def test_a_special_token_of_a_loaded_tokenizer_is_ordinary_text_in_a_document(tmp_path):
    theirs = learn_tokenizer(TEXTS, 260)
    theirs.add_special_tokens(["<s>"])
    theirs.save(str(tmp_path / "theirs.json"))
    tokenizer = load_tokenizer(tmp_path / "theirs.json")
    tokens = tokenizer.encode(f"a<s>b{EOS}", add_special_tokens=False).ids
    assert not {tokenizer.token_to_id("<s>"), tokenizer.token_to_id(EOS)} & set(tokens)
    assert tokenizer.decode(tokens) == f"a<s>b{EOS}"


def test_files_are_split_by_the_hash_of_their_names(tmp_path):
    files = {f"{number}.txt": b"text %d" % number for number in range(70)}
    train, test = load_text(write_files(tmp_path, {**files, ".git/config.parquet": b"\0", "empty.txt": b""}))
    assert sorted(train + test) == sorted(content.decode() for content in files.values())
    assert len(test) == 3
    again = load_text(write_files(tmp_path, {"more.txt": b"more"}))
    assert len(set(again[1]) & set(test)) >= 2


def test_folders_named_after_the_splits_are_the_splits_also_behind_a_link(tmp_path):
    write_files(tmp_path / "a", {f"{number}.txt": b"text %d" % number for number in range(40)})
    write_files(tmp_path / "b", {"test/held.txt": b"held out", "val/other.txt": b"other", "readme.txt": b"about"})
    (tmp_path / "b" / "train").symlink_to(tmp_path / "a")
    train, test = load_text(str(tmp_path / "b"))
    assert sorted(train) == sorted(f"text {number}" for number in range(40))
    assert test == ["held out"]


@pytest.mark.parametrize("kind", ["files", "rows"])
def test_equal_documents_are_all_kept_and_on_one_side(tmp_path, home, kind):
    rows = [f"text {number % 40}" for number in range(120)]
    files = {f"{number}.txt": row.encode() for number, row in enumerate(rows)}
    train, test = load_text(
        write_files(tmp_path, files) if kind == "files" else write_parquet(tmp_path / "rows", train=rows)
    )
    assert sorted(train + test) == sorted(rows)
    assert len(test) == 6
    assert not set(train) & set(test)


def test_the_standard_library_is_text_that_every_machine_has():
    train, test = load_text(STDLIB)
    assert len(train) > 300
    assert sum(map(len, train)) > 5e6
    assert 0.005 < sum(map(len, test)) / sum(map(len, train)) < 0.2


def test_rows_have_their_own_test_split_or_one_by_hash_and_those_without_text_are_left_out(tmp_path, home):
    rows = [f"text {number}" for number in range(40)]
    folder = write_parquet(tmp_path / "all", train=[*rows[:30], None, ""], test=rows[30:], validation=["other"])
    write_files(tmp_path / "all", {"README.md": b"a dataset"})
    assert load_text(folder) == (rows[:30], rows[30:])
    train, test = load_text(write_parquet(tmp_path / "one", train=rows))
    assert len(test) == 2
    assert sorted(train + test) == sorted(rows)


def test_data_that_cannot_be_used_is_one_sentence(tmp_path, home, capsys, monkeypatch):
    def load(dataset):
        return load_tokens(str(dataset), None, 257, 4, str(tmp_path / "cache"))

    assert "needs a non-empty" in stops(capsys, load, write_files(tmp_path / "empty", {".hidden": b"a"}))
    assert "needs a non-empty" in stops(capsys, load, write_files(tmp_path / "one", {"a": b"a", "b": b""}))
    folder = write_files(tmp_path / "images", {"a.txt": b"a", "image.png": b"\x89PNG\0\0"})
    assert "image.png is not a text file" in stops(capsys, load, folder)
    assert "neither a folder nor a Hub id" in stops(capsys, load, "no/such/folder")
    cut = write_parquet(tmp_path / "cut", train=["a", "b"], test=["c"])
    (file,) = Path(cut).glob("test-*")
    file.write_bytes(file.read_bytes()[:-20])
    said = stops(capsys, load, cut)
    assert f"--dataset: {file} cannot be read: " in said
    assert "Parquet magic bytes not found" in said
    mixed = write_parquet(tmp_path / "mixed", train=["a", "b"])
    write_files(tmp_path / "mixed", {"c.txt": b"c"})
    assert "has files of several kinds, c.txt, train-00000-of-00001.parquet" in stops(capsys, load, mixed)
    several = write_parquet(tmp_path / "several", name="content", train=["a", "b"])
    assert "has the columns id, content" in stops(capsys, load, several)
    for column, found in (("number", 1), ("content", "a")):
        (tmp_path / column).mkdir()
        rows = datasets.Dataset.from_dict({"id": [1, 2], column: [found, found]})
        rows.to_parquet(tmp_path / column / "train.parquet")
        rows.to_parquet(tmp_path / column / "test.parquet")
    assert "has the columns id, number" in stops(capsys, load, str(tmp_path / "number"))
    assert load_text(str(tmp_path / "content")) == (["a", "a"], ["a", "a"])
    unlabelled = write_parquet(tmp_path / "unlabelled", train=["a", "b"], test=[None, ""])
    assert "needs a non-empty document" in stops(capsys, load, unlabelled)


def lines_of(*entries) -> bytes:
    return "\n".join(json.dumps(entry) for entry in entries).encode()


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_json_lines_are_documents_also_if_they_are_compressed(tmp_path, ending):
    rows = [{"id": str(number), "text": f"text {number} l\xf6w"} for number in range(40)]
    content = lines_of(*rows, {"text": ""}, {"text": "half \ud800"}) + b"\n\n"
    if ending != ".jsonl":
        content = pyarrow.compress(content, {".jsonl.gz": "gzip", ".jsonl.zst": "zstd"}[ending], asbytes=True)
    train, test = load_text(write_files(tmp_path, {f"rows{ending}": content}))
    assert sorted(train + test) == sorted([row["text"] for row in rows] + ["half ?"])
    assert len(test) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lines_of({"text": "a"}, {"body": "b", "title": "c"}), "rows.jsonl:2 has no 'text', but body, title"),
        (b'{"text": "a"}\n{"text": ', "rows.jsonl:2 is not a line of JSON"),
        (b"[1]", "rows.jsonl:1 is not a line of JSON"),
        (b"\x1f\x8bnonsense", "rows.jsonl:1 is not a line of JSON"),
    ],
)
def test_a_line_that_is_not_a_document_is_named(tmp_path, capsys, content, words):
    folder = write_files(tmp_path, {"rows.jsonl": content, "other.jsonl": lines_of({"text": "other"})})
    assert words in stops(capsys, load_text, folder)


def test_a_compressed_file_that_is_cut_off_is_named(tmp_path, capsys):
    content = gzip.compress(lines_of(*({"text": f"text {number}"} for number in range(9))))
    folder = write_files(tmp_path, {"rows.jsonl.gz": content[:-9]})
    assert "rows.jsonl.gz:" in stops(capsys, load_text, folder)


TOKENIZE = """
import sys
from readers import text
text.SAVED_EVERY, text.AT_ONCE, text.PIECE = 2000, (8, 2000), 300
write_manifest = text.write_manifest
def slow(path, content, names):
    write_manifest(path, content, names)
    if path.name == "progress.json" and content["pieces"]:
        print(content["pieces"], flush=True)
        if len(sys.argv) > 3:
            __import__("time").sleep(float(sys.argv[3]))
text.write_manifest = slow
train, test, _ = text.load_tokens(sys.argv[1], None, 300, 16, sys.argv[2])
print("done:", len(train), len(test), flush=True)
"""


def start_tokenizing(folder, cache, *words) -> subprocess.Popen:
    command = [sys.executable, "-c", TOKENIZE, folder, str(cache), *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def bytes_of(cache) -> list[bytes]:
    (folder,) = (cache / "tokens").iterdir()
    return [(folder / name).read_bytes() for name in ("train.bin", "test.bin", "tokenizer.json", "manifest.json")]


@pytest.mark.parametrize(("length", "sizes"), [(2, [3, 3, 2]), (5, [2, 2, 2, 2]), (20, [1] * 8)])
def test_only_so_many_characters_are_tokenized_together(monkeypatch, length, sizes):
    monkeypatch.setattr(text, "AT_ONCE", (3, 10))
    assert [len(batch) for batch in text.batches_of([("train", "a" * length, True, True)] * 8)] == sizes


MANY = {f"{number:03}.txt": f"text {number} of a few words ".encode() * 9 for number in range(100)}
ONE = {"train.txt": b"".join(MANY.values()), "test.txt": b"other words"}


@pytest.mark.parametrize(
    "files", [pytest.param(MANY, id="many documents", marks=pytest.mark.slow), pytest.param(ONE, id="one document")]
)
def test_tokenizing_goes_on_after_a_kill_and_two_processes_do_it_once(tmp_path, files):
    folder = write_files(tmp_path / "rows", files)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    first, second = start_tokenizing(folder, whole), start_tokenizing(folder, whole)
    printed = sorted((process.communicate(timeout=120)[0].splitlines() for process in (first, second)), key=len)
    assert [len(lines) > 5 for lines in printed] == [False, True]
    assert printed[0] == printed[1][-2:]

    process = start_tokenizing(folder, killed, "60")
    done = int(process.stdout.readline())
    (cache,) = (killed / "tokens").iterdir()
    with open(cache / "train.bin", "ab") as file:
        file.write(b"half a chunk")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert 0 < done < 100
    lines = start_tokenizing(folder, killed).communicate(timeout=120)[0].splitlines()
    assert int(lines[0]) > done
    assert bytes_of(killed) == bytes_of(whole)


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def filled(byte):
    return lambda file: file.write_bytes(byte * file.stat().st_size)


DAMAGE = {
    "cut": cut,
    "empty": lambda file: file.write_bytes(b""),
    "zeros": filled(b"\0"),
    "0xff": filled(b"\xff"),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0\0"),
    "{}": lambda file: file.write_text("{}"),
    "null": lambda file: file.write_text("null"),
    "gone": os.unlink,
}


@pytest.mark.parametrize("name", ["train.bin", "test.bin", "manifest.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_tokens_are_made_anew(tmp_path, capsys, name, damage):
    folder = write_files(tmp_path / "rows", {f"{number}.txt": b"text %d" % number for number in range(40)})
    load_tokens(folder, None, 300, 4, str(tmp_path))
    whole = bytes_of(tmp_path)
    capsys.readouterr()
    DAMAGE[damage]((tmp_path / "tokens").joinpath(os.listdir(tmp_path / "tokens")[0], name))
    load_tokens(folder, None, 300, 4, str(tmp_path))
    assert bytes_of(tmp_path) == whole
    assert ("will be built anew" in capsys.readouterr().out) == (damage != "gone")


@pytest.mark.parametrize("name", ["train.bin", "test_mask.npy", "progress.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_tokens_of_a_run_that_was_killed_are_made_anew(tmp_path, capsys, monkeypatch, name, damage):
    folder = write_files(tmp_path / "rows", {f"{number}.txt": b"text %d" % number for number in range(40)})
    load_tokens(folder, None, 300, 4, str(tmp_path / "whole"))

    def killed(file, content, names):
        write_manifest(file, content, names)
        if content["pieces"] == 16:
            raise KeyboardInterrupt

    write_manifest = text.write_manifest
    with monkeypatch.context() as patch:
        patch.setattr(text, "SAVED_EVERY", 1)
        patch.setattr(text, "AT_ONCE", (8, 1000))
        patch.setattr(text, "write_manifest", killed)
        with pytest.raises(KeyboardInterrupt):
            load_tokens(folder, None, 300, 4, str(tmp_path / "killed"))
    (cache,) = (tmp_path / "killed" / "tokens").iterdir()
    assert (cache / "progress.json").exists()
    DAMAGE[damage](cache / name)
    load_tokens(folder, None, 300, 4, str(tmp_path / "killed"))
    assert bytes_of(tmp_path / "killed") == bytes_of(tmp_path / "whole")


def test_tokens_are_on_the_disk_before_the_progress_that_counts_them(tmp_path, monkeypatch):
    folder = write_files(tmp_path / "rows", {f"{number}.txt": b"text %d" % number for number in range(40)})
    synced, size = [], []
    fsync, write_manifest = os.fsync, text.write_manifest

    def watched(descriptor):
        fsync(descriptor)
        synced.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size))

    def checked(file, content, names):
        for name in text.FILES.values():
            about = (file.parent / name).stat()
            assert (about.st_ino, about.st_size) in synced
            size.append(about.st_size)
        write_manifest(file, content, names)

    monkeypatch.setattr(text.os, "fsync", watched)
    monkeypatch.setattr(text, "write_manifest", checked)
    load_tokens(folder, None, 300, 4, str(tmp_path / "cache"))
    assert len(size) >= 2


def test_tokens_are_made_again_only_if_something_has_changed(tmp_path, monkeypatch):
    folder, cache = write_files(tmp_path / "rows", {f"{n}.txt": b"text %d" % n for n in range(40)}), tmp_path / "cache"

    def folders(vocabulary=257) -> int:
        load_tokens(folder, None, vocabulary, 4, str(cache))
        return len(list((cache / "tokens").iterdir()))

    assert folders() == 1
    monkeypatch.setattr(text, "write_tokens", lambda *_: pytest.fail("they are there"))
    assert folders() == 1
    monkeypatch.undo()
    assert folders(vocabulary=300) == 2
    monkeypatch.chdir(tmp_path)
    for spelling in ("rows", "rows/", "./rows", "../" + tmp_path.name + "/rows"):
        load_tokens(spelling, None, 257, 4, str(cache))
    assert folders() == 2
    (tmp_path / "rows" / ".hidden").write_text("not read")
    assert folders() == 2
    os.utime(f"{folder}/3.txt", (time.time(), time.time() + 9))
    assert folders() == 3
    for number, vocabulary in enumerate((260, 270)):
        learn_tokenizer(TEXTS, vocabulary).save(str(tmp_path / "tokenizer.json"))
        *_, tokenizer = load_tokens(folder, str(tmp_path / "tokenizer.json"), 257, 4, str(cache))
        assert tokenizer.get_vocab_size() == vocabulary
        assert len(list((cache / "tokens").iterdir())) == 4 + number


def test_many_tokens_have_four_bytes(tmp_path):
    words = {f"w{number}": number for number in range(70_000)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    inputs, _ = tensors_of(pack(tmp_path, ["w69999 w3"], tokenizer, 3))
    assert inputs.tolist() == [[70_000, 69_999, 3]]


def test_a_cache_that_cannot_be_written_and_tokens_that_become_shorter_are_one_sentence(tmp_path, capsys, monkeypatch):
    folder = write_files(tmp_path / "rows", {f"{number}.txt": b"text %d" % number for number in range(40)})
    (tmp_path / "file").write_text("")
    assert "cannot be kept in" in stops(capsys, load_tokens, folder, None, 257, 4, str(tmp_path / "file"))

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(text.os, "fsync", full)
    assert "No space left on device" in stops(capsys, load_tokens, folder, None, 257, 4, str(tmp_path / "cache"))
    monkeypatch.undo()
    data, _, _ = load_tokens(folder, None, 257, 4, str(tmp_path / "cache"))
    with open(data.file.name, "ab") as file:
        file.truncate(9)
    assert "has become shorter" in stops(capsys, data.__getitem__, len(data) - 1)


def prepared(folder, train, test, dtype=np.uint16):
    """A folder with tokens as nanoGPT prepares them: an EOS after each document."""
    folder.mkdir(exist_ok=True)
    np.array(train, dtype).tofile(folder / "train.bin")
    np.array(test, dtype).tofile(folder / "val.bin")
    return str(folder)


def test_tokens_that_are_there_are_used_as_they_are(tmp_path):
    texts = ["the cat sat", "on the mat äö", "and more"]
    tokenizer = learn_tokenizer(texts * 3, 270)
    ids = [tokenizer.encode(each).ids for each in texts]
    eos = tokenizer.token_to_id(EOS)
    train, test = [*ids[0], eos, *ids[1], eos], [*ids[2], eos]
    folder = prepared(tmp_path / "bins", train, test)
    tokenizer.save(f"{folder}/tokenizer.json")
    for _ in range(2):  # counted, and found in the cache
        data, test_data, found = load_tokens(folder, None, 0, 4, str(tmp_path / "cache"))
        assert [int(t) for _, targets in data for t in targets if t != IGNORE_INDEX] == train[1:]
        assert [int(inputs[0]) for inputs, _ in data] == train[:-1][::4]
        assert data.tokens_per_byte == (len(train) - 1) / sum(len(each.encode()) for each in texts[:2])
        assert test_data.tokens_per_byte == (len(test) - 1) / len(texts[2])
        assert found.to_str() == tokenizer.to_str()
    assert sorted(path.name for path in (tmp_path / "bins").iterdir()) == ["tokenizer.json", "train.bin", "val.bin"]
    assert not list((tmp_path / "cache").glob("**/*.bin"))


def test_tokens_of_a_tokenizer_of_65536_without_an_eos_have_two_bytes(tmp_path):
    words = {f"w{number}": number for number in range(2**16)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.decoder = decoders.ByteLevel()
    folder = prepared(tmp_path / "bins", [1, 65535, 3, 4, 5], [7, 8])
    tokenizer.save(f"{folder}/tokenizer.json")
    data, _, found = load_tokens(folder, None, 0, 4, str(tmp_path / "cache"))
    assert data[0][1].tolist() == [65535, 3, 4, 5]
    assert found.token_to_id(EOS) == 2**16


def test_tokens_that_do_not_fit_are_one_sentence(tmp_path, capsys, monkeypatch):
    tokenizer, cache = learn_tokenizer(["some text"], 257), str(tmp_path / "cache")

    def refused(train, test=(5, 0), dtype=np.uint16):
        folder = prepared(tmp_path / "bins", train, test, dtype)
        return stops(capsys, load_tokens, folder, None, 0, 4, cache)

    assert "bins/tokenizer.json is not a readable tokenizer" in refused([1, 2])
    tokenizer.save(str(tmp_path / "bins" / "tokenizer.json"))
    monkeypatch.setattr(text, "COUNTED_AT_ONCE", 2)
    assert "train.bin has the token 257 at place 4, but the tokenizer has only 257" in refused([1, 2, 3, 256, 257])
    assert "val.bin has the token 65535 at place 0" in refused([1, 2], [65535, 1])
    assert "train.bin has 3 bytes, which are not two or more tokens of 2 bytes" in refused([1, 2, 3], dtype=np.uint8)
    assert "val.bin has 2 bytes" in refused([1, 2], [1])
    tokenizer.decoder = None
    tokenizer.save(str(tmp_path / "bins" / "tokenizer.json"))
    assert "its tokenizer is not byte-level" in refused([1, 2])
    (tmp_path / "bins" / "val.bin").unlink()
    (tmp_path / "bins" / "tokenizer.json").unlink()
    learn_tokenizer(["some text"], 257).save(str(tmp_path / "bins" / "tokenizer.json"))
    assert "val.bin cannot be read" in stops(capsys, load_tokens, str(tmp_path / "bins"), None, 0, 4, cache)


def test_text_that_changes_while_it_is_tokenized_is_one_sentence(tmp_path, capsys, monkeypatch):
    folder = write_files(tmp_path / "rows", {f"{number}.txt": b"text %d" % number for number in range(40)})
    for count in (39, 41):
        mask = np.arange(count) == 3, np.ones(count, int)
        monkeypatch.setattr(text, "assign_splits", lambda _, mask=mask: mask)
        cache = tmp_path / f"cache_{count}"
        assert "has changed while" in stops(capsys, load_tokens, folder, None, 257, 4, str(cache))
        assert not list(cache.glob("**/manifest.json"))
    monkeypatch.undo()

    def learn(*arguments):
        (tmp_path / "rows" / "3.txt").write_bytes(b"test 3")
        return learn_tokenizer(*arguments)

    monkeypatch.setattr(text, "learn_tokenizer", learn)
    assert "has changed while" in stops(capsys, load_tokens, folder, None, 257, 4, str(tmp_path / "cache"))
    assert not list((tmp_path / "cache").glob("**/manifest.json"))


def test_a_source_that_vanishes_while_it_is_tokenized_is_named(tmp_path, capsys, monkeypatch):
    folder = write_files(tmp_path / "rows", {f"{number}.txt": b"text %d" % number for number in range(40)})

    def learn(*arguments):
        (tmp_path / "rows" / "7.txt").unlink()
        return learn_tokenizer(*arguments)

    monkeypatch.setattr(text, "learn_tokenizer", learn)
    assert "rows/7.txt cannot be read: No such file" in stops(
        capsys, load_tokens, folder, None, 257, 4, str(tmp_path / "cache")
    )


def test_a_cache_on_a_file_system_without_locks_is_refused_before_anything_is_built(tmp_path, capsys, monkeypatch):
    folder = write_files(tmp_path / "rows", {f"{number}.txt": b"text %d" % number for number in range(40)})

    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    said = stops(capsys, load_tokens, folder, None, 257, 4, str(tmp_path / "cache"))
    assert "No locks available" in said
    assert "--cache_dir" in said
    assert not list((tmp_path / "cache").glob("**/train.bin"))


def test_a_tokenizer_that_loses_text_has_no_bits_per_byte(tmp_path, capsys):
    tokenizer = learn_tokenizer(TEXTS, 270)
    tokenizer.normalizer = normalizers.Lowercase()
    data = pack(tmp_path / "lower", ["Lower", "newest"], tokenizer, 4)
    assert data.bits_per_byte(torch.tensor(1.0)) == {}
    assert "loses a part of the text" in capsys.readouterr().out


WORDS = [
    "the",
    "Cat",
    "don't",
    "I'M",
    "u\u0308ber",
    "123",
    "4567890",
    "3.14",
    "!=",
    "//--",
    "\u6f22\u5b57\u3002",
    "\uff0c",
]
WORDS += ["\U0001f600", "a" * 40, "<s>", EOS, "_a_b", '"', "...", "\ufeff", "\u200b", "\ufb01"]
SPACES = [" ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n    ", "", " " * 9, "\xa0"]
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
CL100K += r"|\s+(?!\S)|\s+"


def prose(count: int, seed: int) -> str:
    choose = random.Random(seed).choice
    return "".join(choose(WORDS) + choose(SPACES) for _ in range(count))


def bpe(pre_tokenizer, normalizer=None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator([prose(300, seed) for seed in range(20)], trainer)
    return tokenizer


def with_runs_of_spaces() -> Tokenizer:
    tokenizer = learn_tokenizer([prose(2000, 0)], 600)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ("  ", "    ", "\n\n", " the")])
    return tokenizer


def byte_level(**options):
    return pre_tokenizers.ByteLevel(add_prefix_space=False, **options)


TOKENIZERS = {
    "gpt2": lambda: learn_tokenizer([prose(2000, 0)], 600),
    "cl100k": lambda: bpe(
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(CL100K), "isolated"), byte_level(use_regex=False)])
    ),
    "prefix space": lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "nfkc lower": lambda: bpe(
        pre_tokenizers.Whitespace(), normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "strip": lambda: bpe(byte_level(), normalizers.Strip()),
    "metaspace": lambda: bpe(pre_tokenizers.Metaspace(), normalizers.Replace(Regex(" {2,}"), " ")),
    "bert": lambda: bpe(pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()),
    "lines": lambda: bpe(pre_tokenizers.Split("\n", "merged_with_previous")),
    "runs of spaces": with_runs_of_spaces,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_long_document_has_the_tokens_of_the_whole_text(name, monkeypatch):
    monkeypatch.setattr(text, "PIECE", 500)
    tokenizer = TOKENIZERS[name]()
    for seed in range(4):
        document = prose(3000, seed)
        parts = [document[start : start + 500] for start in range(0, len(document), 500)]
        pieces = list(text.pieces_of([text.Document("", "name", parts)], tokenizer))
        assert len(pieces) > 10
        _, contents, are_first, are_last = zip(*pieces, strict=True)
        assert "".join(contents) == document
        assert list(are_first) == [True, *[False] * (len(pieces) - 1)]
        assert list(are_last) == [*[False] * (len(pieces) - 1), True]
        ids = [tokenizer.encode(content, add_special_tokens=False).ids for content in contents]
        assert list(itertools.chain(*ids)) == tokenizer.encode(document, add_special_tokens=False).ids


SENTENCE = "the quick brown fox jumps over a lazy dog."
COMPOSED = "a." + "\u1ebf." * 30


def unknown_words() -> Tokenizer:
    """One in which a word that is cut may be [UNK], and the whole word is not."""
    vocabulary = ("[UNK]", "a", "##a", "▁a", "##bc", "▁the")
    tokenizer = Tokenizer(models.WordPiece(dict(zip(vocabulary, itertools.count())), unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.mark.parametrize(
    ("make", "added", "document"),
    [
        (unknown_words, AddedToken("the", rstrip=True), "a the " + "a" * 14 + "bc "),
        (unknown_words, AddedToken("the"), "aaaa<s>aa "),
        (TOKENIZERS["gpt2"], AddedToken(SENTENCE), SENTENCE),
        (TOKENIZERS["gpt2"], AddedToken(COMPOSED), unicodedata.normalize("NFD", COMPOSED)),
    ],
    ids=["hidden by [UNK]", "a special token is text", "longer than the words", "composed"],
)
def test_a_long_document_is_not_cut_where_an_added_token_reaches(make, added, document, monkeypatch):
    monkeypatch.setattr(text, "PIECE", 500)
    tokenizer, document = make(), 200 * document
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([added])
    pieces = text.pieces_of([text.Document("", "name", [document[:600], document[600:]])], tokenizer)
    contents = [content for _, content, _, _ in pieces]
    ids = [tokenizer.encode(content, add_special_tokens=False).ids for content in contents]
    assert list(itertools.chain(*ids)) == tokenizer.encode(document, add_special_tokens=False).ids
    assert len(contents) == 2


def test_a_long_document_without_a_certain_place_to_cut_is_whole_or_one_sentence(monkeypatch, capsys):
    """As for a tokenizer without words, such as Llama 2's, or a text without spaces."""
    monkeypatch.setattr(text, "PIECE", 500)
    monkeypatch.setattr(text, "LARGEST_PIECE", 9000)
    llama = bpe(pre_tokenizers.Whitespace())
    llama.normalizer = normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")])
    llama.pre_tokenizer = None
    for tokenizer, word in ((llama, "a b "), (BYTES, "abcd")):
        for repeated, whole in ((2000, True), (3000, False)):
            pieces = text.pieces_of([text.Document("", "name", [word * 100] * (repeated // 100))], tokenizer)
            if whole:
                assert [len(content) for _, content, _, _ in pieces] == [4 * repeated]
            else:
                assert "name has 0 million characters without a place" in stops(capsys, list, pieces)


def test_a_text_that_is_read_in_parts_has_the_characters_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "PIECE", 7)
    content = (
        "".join(map(chr, range(1, 3000))).encode() + b"\xe4\xb8 \xff\xf0\x9f\x98 \r\n\r" + "\U0001f600".encode()[:3]
    )
    (tmp_path / "odd.txt").write_bytes(content)
    assert "".join(text.read_parts(tmp_path / "odd.txt")) == content.decode(errors="replace")


def test_a_dataset_of_the_hub_that_cannot_be_read_is_named_by_its_split(monkeypatch, capsys):
    rows = datasets.Dataset.from_dict({"text": ["a"]}, split="train")
    monkeypatch.setattr(rows, "select_columns", Mock(side_effect=pyarrow.ArrowInvalid("damaged")))
    assert "--dataset: the split train cannot be read: damaged" in stops(capsys, list, text.read_rows(rows, "text"))


def test_a_missing_tokenizers_is_one_sentence_where_it_is_used(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.delitem(sys.modules, "readers.text")
    module = importlib.import_module("readers.text")
    for function, argument in ((module.learn_tokenizer, []), (module.load_tokenizer, tmp_path)):
        arguments = (argument, 300) if function is module.learn_tokenizer else (argument,)
        assert "needs the package tokenizers: pip install -r scripts/requirements.txt" in stops(
            capsys, function, *arguments
        )


@pytest.mark.parametrize(("size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_a_token_has_two_bytes_while_all_ids_fit(size, dtype):
    assert text.dtype_of(size) == dtype
    assert np.iinfo(dtype).max >= size - 1
