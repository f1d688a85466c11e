"""Text for language models: documents, tokenizers, and packed sequences."""

import math
import os
import pickle
import random
import subprocess
import sys
import time

import datasets
import numpy as np
import pytest
import torch
from conftest import ROOT
from documents import load_text
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from utils.data import text
from utils.data.text import EOS, IGNORE_INDEX, STDLIB, learn_tokenizer, load_tokenizer, load_tokens

TEXTS = ["low lower lowest\n", "new newer newest wide wider\n    wide", "l\xf6w 12 12_3 ==! \u2603"]
BYTES = learn_tokenizer(TEXTS, 257)


def write_files(folder, contents):
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return str(folder)


def write_parquet(folder, **splits):
    folder.mkdir()
    for split, rows in splits.items():
        table = datasets.Dataset.from_dict({"id": ["x"] * len(rows), "text": rows})
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
    monkeypatch.setattr(text, "PIECE", 100)
    monkeypatch.setattr(text, "PART", 130)
    document, eos = "low lower lowest " * 100, BYTES.token_to_id(EOS)
    data = pack(tmp_path, [document], BYTES, 16)
    assert data.tokens.tolist() == [eos, *BYTES.encode(document).ids, eos]


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


def test_every_process_learns_the_same_tokenizer():
    program = (
        "from utils.data.text import *; sources, *_ = find_sources('accelerate_configs', None, None); "
        "texts = [part for *_, parts in read_documents(sources, None) for part in parts]; "
        "print(learn_tokenizer(texts, 500).to_str())"
    )
    environment = {"RAYON_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, capture_output=True, text=True)
    sources, *_ = text.find_sources(str(ROOT / "accelerate_configs"), None, None)
    texts = ["".join(parts) for *_, parts in text.read_documents(sources, None)]
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


def test_a_tokenizer_of_the_hub_neither_cuts_nor_pads_and_gets_an_eos(tmp_path, stops):
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
        assert "no tokens, or gaps in their ids" in stops(load_tokenizer, tmp_path / "unusable.json")


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
    write_files(tmp_path, {name: content + b"!" for name, content in files.items()})
    assert {document.rstrip("!") for document in load_text(str(tmp_path))[1]} == set(test)
    again = load_text(write_files(tmp_path, {"more.txt": b"more"}))
    assert len({document.rstrip("!") for document in again[1]} & set(test)) >= 2


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


def test_data_without_a_document_for_training_or_testing_are_refused(tmp_path, home, stops):
    """What else is refused is in tests/programs/inputs.py."""
    folder = write_parquet(tmp_path / "empty", train=["a", "b"], test=[None, ""])
    assert "needs a non-empty document" in stops(load_tokens, folder, None, 257, 4, str(tmp_path / "cache"))
    assert not list(tmp_path.glob("cache/tokens/*/manifest.json"))


# The cache


def test_tokens_are_made_again_only_if_something_has_changed(tmp_path, monkeypatch):
    folder, cache = write_files(tmp_path / "rows", {f"{n}.txt": b"text %d" % n for n in range(40)}), tmp_path / "cache"

    def folders(vocabulary=257) -> int:
        load_tokens(folder, None, vocabulary, 4, str(cache))
        return len(list(cache.glob("tokens/*/manifest.json")))

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
        assert len(list(cache.glob("tokens/*/manifest.json"))) == 4 + number


def test_many_tokens_have_four_bytes(tmp_path):
    words = {f"w{number}": number for number in range(70_000)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    inputs, _ = tensors_of(pack(tmp_path, ["w69999 w3"], tokenizer, 3))
    assert inputs.tolist() == [[70_000, 69_999, 3]]


def prepared(folder, train, test):
    """A folder with tokens as nanoGPT prepares them: an EOS after each document."""
    folder.mkdir(exist_ok=True)
    np.array(train, np.uint16).tofile(folder / "train.bin")
    np.array(test, np.uint16).tofile(folder / "val.bin")
    return str(folder)


def test_tokens_that_are_there_are_used_as_they_are(tmp_path, capsys):
    texts = ["the cat sat", "on the mat \xe4\xf6", "and more"]
    tokenizer = learn_tokenizer(texts * 3, 270)
    ids = [tokenizer.encode(each).ids for each in texts]
    eos = tokenizer.token_to_id(EOS)
    train, test = [*ids[0], eos, *ids[1], eos], [*ids[2], eos]
    folder = prepared(tmp_path / "bins", train, test)
    tokenizer.save(f"{folder}/tokenizer.json")
    data, test_data, found = load_tokens(folder, None, 0, 4, str(tmp_path / "cache"))
    assert [int(t) for _, targets in data for t in targets if t != IGNORE_INDEX] == train[1:]
    assert [int(inputs[0]) for inputs, _ in data] == train[:-1][::4]
    assert data.bits_per_byte(torch.tensor(1.0)) == {}  # the length of the text is unknown
    assert test_data.num_targets == len(test) - 1
    assert found.to_str() == tokenizer.to_str()
    assert f"{len(train)} tokens of uint16 and {len(test)} tokens of uint16" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()


def test_tokens_of_a_tokenizer_of_65536_without_an_eos_have_two_bytes(tmp_path):
    words = {f"w{number}": number for number in range(2**16)}
    folder = prepared(tmp_path / "bins", [1, 65535, 3, 4, 5], [7, 8])
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(f"{folder}/tokenizer.json")
    data, _, found = load_tokens(folder, None, 0, 4, str(tmp_path / "cache"))
    assert data[0][1].tolist() == [65535, 3, 4, 5]
    assert found.token_to_id(EOS) == 2**16


def test_a_tokenizer_that_loses_text_has_no_bits_per_byte(tmp_path, capsys):
    """Nor has the split of which it loses nothing."""
    tokenizer = learn_tokenizer(TEXTS, 270)
    tokenizer.normalizer = normalizers.Lowercase()
    data = pack(tmp_path / "lower", ["Lower", "newest"], tokenizer, 4)
    assert data.bits_per_byte(torch.tensor(1.0)) == {}
    assert "loses a part of the text" in capsys.readouterr().out
    file = tmp_path / "lower.json"
    tokenizer.save(str(file))
    folder = write_files(tmp_path / "one", {"train.txt": b"Lower", "test.txt": b"newest"})
    for split in load_tokens(folder, str(file), 0, 4, str(tmp_path / "cache"))[:2]:
        assert split.bits_per_byte(torch.tensor(1.0)) == {}


# Long documents

WORDS = ["the", "Cat", "don't", "I'M", "u\u0308ber", "123", "4567890", "3.14", "!=", "//--", "\u6f22\u5b57\u3002"]
WORDS += ["\U0001f600", "a" * 40, "<s>", EOS, "_a_b", '"', "...", "\ufeff", "\u200b", "\ufb01"]
SPACES = [" ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n", "\n    ", "", " " * 9, "\xa0"]
CL100K = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
CL100K += r"|\s+(?!\S)|\s+"


def prose(count: int, seed: int) -> str:
    choose = random.Random(seed).choice
    return "".join(choose(WORDS) + choose(SPACES) for _ in range(count))


@pytest.mark.parametrize("name", ["gpt2", "cl100k"])
def test_a_long_document_has_the_tokens_of_the_whole_text(name, monkeypatch):
    """Also where words end in digits, underscores and line ends."""
    monkeypatch.setattr(text, "PIECE", 250)
    tokenizer = learn_tokenizer([prose(2000, 0)], 600)
    if name == "cl100k":
        split = pre_tokenizers.Split(Regex(CL100K), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    for seed in range(8):
        document = prose(3000, seed)
        parts = (document[start : start + 300] for start in range(0, len(document), 300))
        pieces, are_last = zip(*text.cut_pieces(parts), strict=True)
        assert len(pieces) > 20
        assert max(map(len, pieces)) <= 500
        assert "".join(pieces) == document
        assert are_last == (*[False] * (len(pieces) - 1), True)
        ids = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False).ids]
        assert ids == tokenizer.encode(document, add_special_tokens=False).ids


def test_a_text_that_is_read_in_parts_has_the_characters_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "PART", 7)
    content = (
        "".join(map(chr, range(1, 3000))).encode() + b"\xe4\xb8 \xff\xf0\x9f\x98 \r\n\r" + "\U0001f600".encode()[:3]
    )
    (tmp_path / "odd.txt").write_bytes(content)
    assert "".join(text.read_parts(tmp_path / "odd.txt")) == content.decode(errors="replace")
