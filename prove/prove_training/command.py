"""The command line of prove_training."""

import argparse
import importlib.util
import os
import signal
import sys
from pathlib import Path

from . import formats

APART = "PROVE_IMPORTS_APART"
WHAT = "Prove that a script trains the same model on any number of processes, or name the first thing that differs."
CODES = "Exit codes: 0 proven, or nothing wrong found; 1 something is wrong; 2 the script fails; 3 prove cannot tell."


def process_counts(text: str) -> tuple[int, ...]:
    """An argparse type: comma-separated numbers of processes, each at least 2."""
    parts = text.split(",")
    counts = tuple(sorted({int(part) for part in parts if part.strip().isdigit()}))
    if not all(part.strip().isdigit() for part in parts) or counts[0] < 2:
        raise argparse.ArgumentTypeError(f"{text}: numbers of processes to compare with one, such as 2 or 2,3")
    return counts


def module_file(name: str) -> Path | None:
    """The file of a module of the working directory, of src/ in it, or of an installed package; it is not imported."""
    for folder in (Path.cwd(), Path.cwd() / "src", *map(Path, sys.path)):
        place = folder.joinpath(*name.split("."))
        for file in (place.with_suffix(".py"), place / "__main__.py"):
            if file.is_file():
                return file
    return None


def parse_args(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="prove_training", description=WHAT, epilog=CODES, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--processes",
        type=process_counts,
        metavar="N,N",
        help="to compare with one (default: 2,3; on a device mesh of two dimensions, as many as it has, or 4)",
    )
    add("--resume_flags", metavar="FLAGS", help='flags with which the script resumes, "" if it does so by itself')
    add("--timeout_s", type=float, default=60, metavar="X", help="limit of each run in seconds (default: 60)")
    add("--strict", action="store_true", help="end with 3, and not with 0, where not all could be compared")
    add("--format", choices=formats.FORMATS, default="text", help="of the report: github has annotations and a summary")
    add("--json", action="store_const", const="json", dest="format", help="the same as --format json")
    add("--keep", type=Path, metavar="FOLDER", help="keep what the runs write, and their records")
    add("-m", dest="is_module", action="store_true", help="the script is a module: -m package.train")
    add("script")
    add("flags", nargs=argparse.REMAINDER, help="of the script; {processes} stands for their number, {rank} for a rank")
    args = parser.parse_args(words)
    args.module = args.script if args.is_module else None
    args.script = module_file(args.script) if args.is_module else Path(args.script)
    if args.script and args.script.suffix == ".ipynb":
        parser.error(f"{args.script} is a notebook: jupyter nbconvert --to script makes a script of it")
    if not args.script or not args.script.is_file():
        parser.error(f"there is no {f'module {args.module}' if args.is_module else f'script {args.script}'}")
    if args.keep and args.keep.exists() and not (args.keep.is_dir() and not any(args.keep.iterdir())):
        parser.error(f"--keep {args.keep} is not an empty folder: name a new one")
    return args


def with_other_python() -> int:
    """Start again with the interpreter of the project, if prove is installed apart from it, and from PyTorch."""
    folders = dict.fromkeys(map(Path, (os.environ.get("VIRTUAL_ENV", ".venv"), ".venv", "venv")))
    for python in (folder / "bin" / "python" for folder in folders):
        if python.is_file() and not python.samefile(sys.executable):
            os.execv(python, [str(python), str(Path(__file__).parent), *sys.argv[1:]])
    print("PyTorch is not installed here: activate the environment of the script", file=sys.stderr)
    return 2


def main() -> int:
    args = parse_args()
    if not importlib.util.find_spec("torch"):
        return with_other_python()
    from . import imports, proof, runs  # here and not above: torch takes a second, and --help needs none

    os.environ.update(runs.SETTINGS)
    folder = Path.cwd() if args.module else args.script.parent
    if os.environ.pop(APART, ""):
        imports.load_common(args.script, folder)
    elif not imports.load(args.script, folder):
        os.environ[APART] = "yes"  # start again, so that each process imports for itself
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    try:
        return proof.prove(args)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
