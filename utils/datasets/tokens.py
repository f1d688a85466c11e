"""Tokens of text: bytes, pairs of them that are learned from the text, or the tokenizer.json of another model.

A tokenizer has `vocabulary`, the number of its tokens; `encode(document)`, from bytes to an array of tokens;
`decode(tokens)`, from a list of them to a text; and `save(file)`. Token 0 is END, which stands between two
documents; as a byte, it is NUL, which is in no text.
"""

import json
import re
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np

from ..atomic_files import write_json
from ..console import stop

END = 0
BYTES = 256
# A word with the space before it, an end of line with the indent after it, numbers, signs: no pair goes across.
WORDS = re.compile(rb" ?\w+|\n[ \t]*|[^\w\s]+|\s+")
LEARNED_FROM = 2**21  # bytes; with more, the most frequent pairs are the same ones, and to count them takes longer


class BytePairs:
    """Byte-pair encoding. A token is a byte, or two tokens that are often side by side.

    Source: R. Sennrich et al., https://arxiv.org/abs/1508.07909.

    Args:
        merges: the pairs; the first one is token 256. Without any, each byte is a token.
    """

    def __init__(self, merges: list[tuple[int, int]]):
        self.merges = {tuple(pair): BYTES + number for number, pair in enumerate(merges)}
        self.words = {}  # tokens of the words seen so far
        self.bytes = [bytes([byte]) for byte in range(BYTES)]
        for left, right in self.merges:
            self.bytes.append(self.bytes[left] + self.bytes[right])
        self.vocabulary = len(self.bytes)

    @classmethod
    def learn(cls, documents: list[bytes], vocabulary: int) -> "BytePairs":
        """The pairs that are most frequent in the documents, one after the other, up to `vocabulary` tokens."""
        text = b"\n".join(documents[:: 1 + sum(map(len, documents)) // LEARNED_FROM])
        counts = Counter(WORDS.findall(text))
        words, counts = [list(word) for word in counts], list(counts.values())
        pairs, words_with = Counter(), defaultdict(set)

        def count_pairs(number: int, sign: int):
            for pair in pairwise(words[number]):
                pairs[pair] += sign * counts[number]
                words_with[pair].add(number)

        for number in range(len(words)):
            count_pairs(number, 1)
        merges = []
        while BYTES + len(merges) < vocabulary and pairs:
            best = max(pairs, key=lambda pair: (pairs[pair], pair))
            for number in words_with.pop(best):
                count_pairs(number, -1)
                words[number] = merge(words[number], best, BYTES + len(merges))
                count_pairs(number, 1)
            del pairs[best]
            merges.append(best)
        return cls(merges)

    def encode(self, document: bytes) -> np.ndarray:
        if not self.merges:
            return np.frombuffer(document, np.uint8)
        tokens = []
        for word in WORDS.findall(document):
            if word not in self.words:
                self.words[word] = self.encode_word(list(word))
            tokens += self.words[word]
        return np.array(tokens, np.int32)

    def encode_word(self, tokens: list[int]) -> list[int]:
        """Merge pairs in the order in which they were learned."""
        while known := [pair for pair in pairwise(tokens) if pair in self.merges]:
            first = min(known, key=self.merges.get)
            tokens = merge(tokens, first, self.merges[first])
        return tokens

    def decode(self, tokens: list[int]) -> str:
        return b"".join(self.bytes[token] for token in tokens if token != END).decode(errors="replace")

    def save(self, file: Path) -> None:
        write_json(file, {"byte_pairs": list(self.merges)})


def merge(tokens: list[int], pair: tuple[int, int], new: int) -> list[int]:
    """The tokens, with `new` wherever the pair was."""
    merged = []
    for token in tokens:
        if merged and (merged[-1], token) == pair:
            merged[-1] = new
        else:
            merged.append(token)
    return merged


class OtherTokenizer:
    """A tokenizer.json as the package `tokenizers` writes it. Its tokens are numbered from 1 on."""

    def __init__(self, text: str):
        from tokenizers import Tokenizer

        self.text, self.tokenizer = text, Tokenizer.from_str(text)
        self.vocabulary = self.tokenizer.get_vocab_size() + 1

    def encode(self, document: bytes) -> np.ndarray:
        text = document.decode(errors="replace")
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32) + 1

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode([token - 1 for token in tokens if token != END])

    def save(self, file: Path) -> None:
        write_json(file, json.loads(self.text))


def load_tokenizer(file: Path) -> BytePairs | OtherTokenizer:
    """The tokenizer in a file: one that `save` wrote, or a tokenizer.json of the package `tokenizers`.

    Raises:
        SystemExit: if the file cannot be read, or the package is needed and missing.
    """
    try:
        text = Path(file).read_text()
        content = json.loads(text)
        return BytePairs(content["byte_pairs"]) if "byte_pairs" in content else OtherTokenizer(text)
    except ImportError:
        stop(f"--tokenizer {file} needs the package tokenizers: pip install tokenizers")
    except Exception as error:  # the package raises plain Exceptions
        stop(f"--tokenizer {file} is not a readable tokenizer: {error}")
