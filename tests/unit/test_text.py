"""Text for language models: documents, tokens, lines, and what other models need per byte."""

import gzip
import itertools
import math
from collections import Counter
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
import torch

from utils.datasets import text
from utils.datasets.text import FILLED_UP, STDLIB, PackedText, bits_per_byte_of_others, load_text, order3
from utils.datasets.tokens import END, BytePairs, load_tokenizer

BYTES = BytePairs([])
WORDS = [b"low lower lowest\n", b"new newer newest wide wider\n    wide", b"l\xc3\xb6w \xff 12 12_3 ==!"]


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


@pytest.mark.parametrize("context", [1, 4, 5, 7, 100])
def test_each_token_is_predicted_once_from_the_one_before_it(context):
    data = PackedText([b"abcd", b"e", b"fghij"], BYTES, context)
    tokens, targets = data.tensors
    assert tokens.shape == targets.shape == (math.ceil(13 / context), context)
    real = targets.flatten() != FILLED_UP
    assert bytes(targets.flatten()[real].tolist()) == b"abcd\0e\0fghij\0"
    assert bytes(tokens.flatten()[real].tolist()) == b"\0abcd\0e\0fghij"
    assert (tokens.flatten()[~real] == END).all()
    assert data.tokens_per_byte == 13 / 10


def test_bits_per_byte_count_every_token_and_divide_by_the_bytes():
    data = PackedText([b"lower low", b"newest"], BytePairs.learn(WORDS, 262), 4)
    _, targets = data.tensors
    counted = (targets != FILLED_UP).sum().item()
    assert data.bits_per_byte(torch.tensor(1.0)).item() == pytest.approx(counted / 15 / math.log(2))


@pytest.mark.parametrize("vocabulary", [256, 257, 260, 300])
def test_byte_pairs_give_the_text_back(vocabulary):
    tokenizer = BytePairs.learn(WORDS, vocabulary)
    assert 256 <= tokenizer.vocabulary <= vocabulary
    for document in [*WORDS, b"other words\n\n\t\r\n  ", bytes(range(1, 256))]:
        tokens = tokenizer.encode(document).tolist()
        assert max(tokens) < tokenizer.vocabulary
        assert tokenizer.decode([END, *tokens, END]) == document.decode(errors="replace")


def test_byte_pairs_are_the_most_frequent_ones_and_applied_in_their_order():
    """By hand: in each turn count all pairs within words, and merge the most frequent one everywhere."""
    words = [list(word) for document in WORDS for word in text_words(document)]
    merges = []
    for new in range(256, 270):
        counts = Counter(pair for word in words for pair in itertools.pairwise(word))
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        words = [merged(word, best, new) for word in words]
    tokenizer = BytePairs.learn(WORDS, 270)
    assert list(tokenizer.merges) == merges
    encoded = [token for document in WORDS for token in tokenizer.encode(document).tolist()]
    assert encoded == [token for word in words for token in word]


def text_words(document):
    from utils.datasets.tokens import WORDS as pattern

    return pattern.findall(document)


def merged(word, pair, new):
    result, place = [], 0
    while place < len(word):
        is_pair = tuple(word[place : place + 2]) == pair
        result.append(new if is_pair else word[place])
        place += 1 + is_pair
    return result


def test_a_saved_tokenizer_is_the_same_one(tmp_path):
    tokenizer = BytePairs.learn(WORDS, 264)
    tokenizer.save(tmp_path / "tokenizer.json")
    again = load_tokenizer(tmp_path / "tokenizer.json")
    assert again.merges == tokenizer.merges
    assert np.array_equal(again.encode(WORDS[1]), tokenizer.encode(WORDS[1]))


def test_the_tokenizer_of_another_model_is_read(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    theirs = tokenizers.Tokenizer(tokenizers.models.BPE())
    theirs.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=270, initial_alphabet=alphabet)
    theirs.train_from_iterator(["low lower lowest"], trainer)
    theirs.save(str(tmp_path / "theirs.json"))
    ours = load_tokenizer(tmp_path / "theirs.json")
    tokens = ours.encode(b"lower newest").tolist()
    assert [token - 1 for token in tokens] == theirs.encode("lower newest").ids
    assert ours.decode([*tokens, END]) == "lower newest"
    assert max(tokens) < ours.vocabulary == theirs.get_vocab_size() + 1


def test_files_are_split_by_the_hash_of_their_names(tmp_path):
    files = {f"{number}.txt": b"text %d" % number for number in range(70)}
    train, test = load_text(write_files(tmp_path, {**files, ".git/config": b"\0", "empty.txt": b""}))
    assert sorted(train + test) == sorted(files.values())
    assert len(test) == 3
    again = load_text(write_files(tmp_path, {"more.txt": b"more"}))
    assert len(set(again[1]) & set(test)) >= 2


def test_the_standard_library_is_text_that_every_machine_has():
    train, test = load_text(STDLIB)
    assert len(train) > 300
    assert sum(map(len, train)) > 5e6
    assert 0.005 < sum(map(len, test)) / sum(map(len, train)) < 0.2
    assert not any(b"\0" in document for document in train + test)


def test_rows_of_parquet_have_their_own_test_split_or_one_by_hash(tmp_path, home):
    rows = [f"text {number}" for number in range(40)]
    both, one = tmp_path / "both", tmp_path / "one"
    for folder, splits in ((both, {"train": rows[:30], "test": rows[30:]}), (one, {"train": rows})):
        folder.mkdir()
        for split, own in splits.items():
            table = datasets.Dataset.from_dict({"name": ["x"] * len(own), "text": own})
            table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    train, test = load_text(str(both))
    assert [train, test] == [[row.encode() for row in part] for part in (rows[:30], rows[30:])]
    train, test = load_text(str(one))
    assert len(test) == 2
    assert sorted(train + test) == sorted(row.encode() for row in rows)


def test_what_is_no_text_is_named_before_it_is_read(tmp_path, capsys, monkeypatch):
    memory = {"available": 10**12}
    monkeypatch.setattr(text.psutil, "virtual_memory", lambda: SimpleNamespace(**memory))
    assert "has 0 text files" in stops(capsys, load_text, write_files(tmp_path / "empty", {".hidden": b"a"}))
    assert "has 1 text files" in stops(capsys, load_text, write_files(tmp_path / "one", {"a": b"a", "b": b""}))
    folder = write_files(tmp_path / "images", {"a.txt": b"a", "image.png": b"\x89PNG\0\0"})
    assert "image.png is not a text file" in stops(capsys, load_text, folder)
    with open(f"{folder}/huge", "wb") as file:
        file.truncate(2 * 10**9)
    assert "huge is not a text file" in stops(capsys, load_text, write_files(tmp_path / "images", {"image.png": b"a"}))
    memory["available"] = 4 * 10**9
    assert "has 2.0 GB of text" in stops(capsys, load_text, folder)
    assert "is not a folder, nor a Hub id" in stops(capsys, load_text, "no/such/folder")
    table = datasets.Dataset.from_dict({"number": [1, 2]})
    (tmp_path / "numbers").mkdir()
    table.to_parquet(tmp_path / "numbers" / "train.parquet")
    assert "none of strings" in stops(capsys, load_text, str(tmp_path / "numbers"))


def test_the_compressors_are_those_of_the_standard_library():
    test = [b"to be or not to be\n" * 20, b"that is the question\n" * 9]
    others = bits_per_byte_of_others([b"to be"], test)
    assert others["gzip"] == 8 * len(gzip.compress(b"".join(test), 9)) / (19 * 20 + 21 * 9)
    assert others["xz"] != others["gzip"]


def test_the_order3_model_is_the_one_of_witten_and_bell():
    """By hand, one byte after the other; and its probabilities of all bytes after a context add up to 1."""
    train, test = [b"abracadabra", b"abraham"], [b"abrad", b"xabr"]
    seen = b"\0\0\0abracadabra\0abraham\0"

    def probability(context, byte):
        found = 1 / 256
        for order in range(4):
            before = context[3 - order :]
            places = range(3, len(seen))
            after = Counter(seen[place] for place in places if seen[place - order : place] == before)
            if after:
                found = (after[byte] + len(after) * found) / (after.total() + len(after))
        return found

    assert sum(probability(b"abr", byte) for byte in range(256)) == pytest.approx(1)
    stream = b"\0\0\0abrad\0xabr\0"
    bits = [-math.log2(probability(stream[place - 3 : place], stream[place])) for place in range(3, len(stream))]
    assert order3(train, test) == pytest.approx(sum(bits) / 9, rel=1e-12)
