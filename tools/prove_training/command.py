"""The command line of prove_training."""

import argparse
import os
from pathlib import Path

from .text import stop

ENDINGS = (".png", ".svg", ".pdf")  # of a picture
WHAT = "Prove that a script trains the same model on any number of processes, or name the first thing that differs."
CODES = "Exit codes: 0 proven, 1 something is wrong, 2 the script fails, 3 this cannot tell."


def process_counts(text: str) -> tuple[int, ...]:
    """An argparse type: numbers of processes, larger than one, with commas between them."""
    counts = tuple(sorted({int(part) for part in text.split(",")}))
    if counts[0] < 2:
        raise ValueError(text)
    return counts


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="prove_training", description=WHAT, epilog=CODES, allow_abbrev=False)
    add = parser.add_argument
    add("--processes", type=process_counts, default=(2, 3), metavar="N,N", help="to compare with one (default: 2,3)")
    add("--resume_flags", metavar="FLAGS", help='flags with which the script resumes, "" if it does so by itself')
    add("--timeout_s", type=float, default=60, metavar="X", help="limit of each run in seconds (default: 60)")
    add("--json", action="store_true", help="print the report as JSON")
    add("--picture", type=Path, metavar="FILE", help="draw who read which sample (.png, .svg, .pdf)")
    add("--keep", type=Path, metavar="FOLDER", help="keep what the runs write, and their records")
    own_flags = {flag for action in parser._actions for flag in action.option_strings}
    add("script", type=Path)
    add("flags", nargs=argparse.REMAINDER, help="flags of the script")
    args = parser.parse_args(words)
    check(args, own_flags)
    return args


def check(args: argparse.Namespace, own_flags: set[str]) -> None:
    """Raises: SystemExit, if the command cannot be carried out."""
    if not args.script.is_file():
        stop(f"there is no script {args.script}")
    text = args.script.read_text(errors="replace")
    for flag in args.flags:
        name = flag.partition("=")[0]
        if name in own_flags and name not in text:
            stop(f"{name} is a flag of prove_training and not of {args.script}: write it before the script")
    if args.keep and args.keep.exists() and not (args.keep.is_dir() and not any(args.keep.iterdir())):
        stop(f"--keep {args.keep} is not an empty folder: name a new one")
    if args.picture:
        if args.picture.suffix not in ENDINGS or args.picture.is_dir():
            stop(f"--picture {args.picture} is not a file that ends in {', '.join(ENDINGS)}")
        if not os.access(args.picture.absolute().parent, os.W_OK):
            stop(f"--picture {args.picture}: its folder does not exist or cannot be written to")


def main() -> int:
    args = parse_args()
    from .proof import prove  # here and not above: torch takes a second, and --help needs none

    return prove(args)
