"""Text for language models: documents, tokenizers, and packed sequences."""

import importlib
import math
import subprocess
import sys
from types import SimpleNamespace

import datasets
import pytest
import torch
from conftest import ROOT
from tokenizers import Tokenizer, models

from utils.datasets import text
from utils.datasets.text import EOS, IGNORE_INDEX, STDLIB, PackedText, learn_tokenizer, load_text, load_tokenizer

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


@pytest.mark.parametrize("context", [1, 4, 5, 7, 100])
def test_each_token_is_a_target_once_from_the_one_before_it(context):
    data = PackedText(["abcd", "e", "fghij"], BYTES, context)
    inputs, targets = data.tensors
    assert inputs.shape == targets.shape == (math.ceil(13 / context), context)
    real = targets.flatten() != IGNORE_INDEX

    def as_text(tokens):
        return BYTES.decode(tokens.tolist(), skip_special_tokens=False).replace(EOS, "|")

    assert as_text(targets.flatten()[real]) == "abcd|e|fghij|"
    assert as_text(inputs.flatten()[real]) == "|abcd|e|fghij"
    assert (inputs.flatten()[~real] == BYTES.token_to_id(EOS)).all()


def test_no_document_of_many_is_lost():
    texts = [f"document {number} " for number in range(130)]
    _, targets = PackedText(texts, BYTES, 9).tensors
    assert BYTES.decode(targets[targets != IGNORE_INDEX].tolist()) == "".join(texts)


def test_bits_per_byte_count_every_token_and_divide_by_the_bytes_of_the_text():
    data = PackedText(["lower l\xf6w", "newest"], learn_tokenizer(TEXTS, 270), 4)
    _, targets = data.tensors
    counted = (targets != IGNORE_INDEX).sum().item()
    assert counted < 16
    assert data.bits_per_byte(torch.tensor(1.0)).item() == pytest.approx(counted / 16 / math.log(2))


@pytest.mark.parametrize("vocabulary", [257, 260, 300])
def test_a_learned_tokenizer_gives_any_text_back(vocabulary):
    tokenizer = learn_tokenizer(TEXTS, vocabulary)
    assert 257 <= tokenizer.get_vocab_size() <= vocabulary
    for document in [*TEXTS, "other words\n\n\t\r\n  ", "".join(map(chr, range(300))), f"a{EOS}b"]:
        tokens = tokenizer.encode(document, add_special_tokens=False).ids
        eos = tokenizer.token_to_id(EOS)
        assert eos not in tokens
        assert tokenizer.decode([eos, *tokens, eos]) == document


def test_every_process_learns_the_same_tokenizer():
    program = (
        "from utils.datasets.text import *; print(learn_tokenizer(load_text('accelerate_configs')[0], 500).to_str())"
    )
    environment = {"RAYON_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True)
    train, _ = load_text(str(ROOT / "accelerate_configs"))
    assert done.stdout == learn_tokenizer(train, 500).to_str() + "\n"


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
    theirs.pre_tokenizer = text.pre_tokenizers.Whitespace()
    theirs.enable_truncation(2)
    theirs.enable_padding(length=20)
    theirs.save(str(tmp_path / "theirs.json"))
    tokenizer = load_tokenizer(tmp_path / "theirs.json")
    assert tokenizer.get_vocab_size() == 10
    assert tokenizer.encode("word3 word1 word4 other").ids == [3, 1, 4, 0]
    data = PackedText(["word3 word1 word4", "word5"], tokenizer, 6)
    assert data.tensors[0].tolist() == [[9, 3, 1, 4, 9, 5]]
    assert data.tensors[1].tolist() == [[3, 1, 4, 9, 5, 9]]

    for words in ({"a": 0, "b": 7}, {}):
        Tokenizer(models.WordLevel(words, unk_token="a")).save(str(tmp_path / "unusable.json"))
        assert "no tokens, or gaps in their ids" in stops(capsys, load_tokenizer, tmp_path / "unusable.json")


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
    write_files(tmp_path / "all", {"README.md": b"a data set"})
    assert load_text(folder) == (rows[:30], rows[30:])
    train, test = load_text(write_parquet(tmp_path / "one", train=rows))
    assert len(test) == 2
    assert sorted(train + test) == sorted(rows)


def test_data_that_cannot_be_used_is_one_sentence(tmp_path, home, capsys, monkeypatch):
    memory = {"available": 10**12}
    monkeypatch.setattr(text.psutil, "virtual_memory", lambda: SimpleNamespace(**memory))
    assert "needs a non-empty" in stops(capsys, load_text, write_files(tmp_path / "empty", {".hidden": b"a"}))
    assert "needs a non-empty" in stops(capsys, load_text, write_files(tmp_path / "one", {"a": b"a", "b": b""}))
    folder = write_files(tmp_path / "images", {"a.txt": b"a", "image.png": b"\x89PNG\0\0"})
    assert "image.png is not a text file" in stops(capsys, load_text, folder)
    with open(f"{folder}/image.png", "wb") as file:
        file.truncate(2 * 10**9)
    memory["available"] = 4 * 10**9
    assert "has 2.0 GB of text" in stops(capsys, load_text, folder)
    memory["available"] = 10**12
    assert "neither a folder nor a Hub id" in stops(capsys, load_text, "no/such/folder")
    mixed = write_parquet(tmp_path / "mixed", train=["a", "b"])
    write_files(tmp_path / "mixed", {"c.txt": b"c"})
    assert "parquet files and other files" in stops(capsys, load_text, mixed)
    several = write_parquet(tmp_path / "several", name="content", train=["a", "b"])
    assert "has the columns id, content" in stops(capsys, load_text, several)
    for column, found in (("number", 1), ("content", "a")):
        (tmp_path / column).mkdir()
        rows = datasets.Dataset.from_dict({"id": [1, 2], column: [found, found]})
        rows.to_parquet(tmp_path / column / "train.parquet")
        rows.to_parquet(tmp_path / column / "test.parquet")
    assert "has the columns id, number" in stops(capsys, load_text, str(tmp_path / "number"))
    assert load_text(str(tmp_path / "content")) == (["a", "a"], ["a", "a"])
    unlabelled = write_parquet(tmp_path / "unlabelled", train=["a", "b"], test=[None, ""])
    assert "needs a non-empty document" in stops(capsys, load_text, unlabelled)


def test_a_missing_tokenizers_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.delitem(sys.modules, "utils.datasets.text")
    with pytest.raises(SystemExit):
        importlib.import_module("utils.datasets.text")
    assert "needs the package tokenizers: pip install -r scripts/requirements.txt" in capsys.readouterr().err
