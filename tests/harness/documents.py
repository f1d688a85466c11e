"""The documents of a dataset, all in memory."""

import tempfile

from utils.data.text import EOS, load_tokens


def load_text(dataset: str) -> tuple[list[str], ...]:
    """The texts for training and for testing, as their tokens say."""
    with tempfile.TemporaryDirectory() as cache:
        *splits, tokenizer = load_tokens(dataset, None, 257, 1, cache)
        texts = [tokenizer.decode(data.tokens[1:].tolist(), skip_special_tokens=False) for data in splits]
    return tuple(text.split(EOS)[:-1] for text in texts)
