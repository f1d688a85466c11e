"""Bits per byte of the transformer, of two compressors, and of an order-3 model.

    python benchmarks/compressors.py

scripts/transformer.py trains with its default flags. gzip and xz compress the whole test text, and learn from it alone.
The order-3 model counts, in the training text, what follows each three bytes.
"""

import gzip
import lzma
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from utils.datasets.text import load_text


def parse_args():
    parser = common.make_parser(__doc__)
    parser.add_argument("--steps", type=common.positive_int, default=1000, help="optimizer steps (%(default)s)")
    parser.add_argument("--dataset", default="stdlib", help="as in transformer.py (%(default)s)")
    return parser.parse_args()


def order3(train: list[bytes], test: list[bytes]) -> float:
    """Bits per byte of the test, where a NUL ends each document, as EOS does in the transformer.

    Counts of three, two, one and no bytes are mixed as Witten and Bell do, https://doi.org/10.1109/18.87000.
    """
    streams = (b"\0\0\0" + b"\0".join(documents) + b"\0" for documents in (train, test))
    seen, asked = (np.frombuffer(stream, np.uint8).astype(np.int64) for stream in streams)
    probability = np.full(len(asked) - 3, 1 / 256)
    for order in range(4):
        keys, counts = np.unique(grams(seen, order), return_counts=True)
        contexts, first, distinct = np.unique(keys >> 8, return_index=True, return_counts=True)
        totals = np.add.reduceat(counts, first)
        wanted = grams(asked, order)
        count = look_up(wanted, keys, counts)
        total, kinds = (look_up(wanted >> 8, contexts, values) for values in (totals, distinct))
        mixed = (count + kinds * probability) / np.maximum(total + kinds, 1)
        probability = np.where(total > 0, mixed, probability)
    return float(-np.log2(probability).sum() / sum(map(len, test)))


def grams(stream: np.ndarray, order: int) -> np.ndarray:
    """Each byte from the fourth on as a number, with the `order` bytes before it in the higher digits."""
    return sum(stream[3 - back : len(stream) - back] << 8 * back for back in range(order + 1))


def look_up(wanted: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The values of keys, which are sorted; 0 for one that is not among them."""
    places = np.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)


def measure(args) -> dict:
    train, test = ([text.encode() for text in texts] for texts in load_text(args.dataset))
    text = b"".join(test)
    summary, _ = common.run_script("transformer", "--dataset", args.dataset, "--max_steps", args.steps)
    return {
        "gzip -9": 8 * len(gzip.compress(text, 9)) / len(text),
        "xz -9": 8 * len(lzma.compress(text, preset=9)) / len(text),
        "order 3": order3(train, test),
        f"transformer.py, {args.steps} steps": summary["test_bits_per_byte"],
    }


def report(measured) -> list[str]:
    columns = {"": "{}"} | dict.fromkeys(measured, "{:.3f}")
    return [common.table(columns, [["bits per byte of the test", *measured.values()]])]


if __name__ == "__main__":
    common.main(parse_args(), measure, report)
