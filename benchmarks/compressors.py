"""Bits per byte of the transformer and of two compressors.

    python benchmarks/compressors.py

scripts/transformer.py trains with its default flags. gzip and xz compress the whole test text, and learn from it alone.
"""

import gzip
import lzma
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from utils.data.text import load_tokens


def parse_args():
    parser = common.make_parser(__doc__)
    parser.add_argument("--steps", type=common.positive_int, default=1000, help="optimizer steps (%(default)s)")
    parser.add_argument("--dataset", default="stdlib", help="as in transformer.py (%(default)s)")
    return parser.parse_args()


def measure(args) -> dict:
    _, test_data, tokenizer = load_tokens(args.dataset, None, 1024, 1, None)  # as transformer.py does
    text = tokenizer.decode(test_data.tokens.tolist()).encode()
    summary, _ = common.run_script("transformer", "--dataset", args.dataset, "--max_steps", args.steps)
    compressed = {"gzip -9": gzip.compress(text, 9), "xz -9": lzma.compress(text, preset=9)}
    bits = {name: 8 * len(content) / len(text) for name, content in compressed.items()}
    return bits | {f"transformer.py, {args.steps} steps": summary["test_bits_per_byte"]}


def report(measured) -> list[str]:
    columns = {"": "{}"} | dict.fromkeys(measured, "{:.3f}")
    return [common.table(columns, [["bits per byte of the test", *measured.values()]])]


if __name__ == "__main__":
    common.main(parse_args(), measure, report)
