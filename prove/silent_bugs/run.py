"""Runs the corpus: shows that each bug is one, or what a tool says of the bugs and of the right programs.

    python silent_bugs/run.py                                  the numbers of all bugs and right programs
    python silent_bugs/run.py bugs/resume right                some of them
    python silent_bugs/run.py --processes 2                    on 1 and 2 processes only, in half the time
    python silent_bugs/run.py --tool "prove-training {script}" what a tool says, as a table in Markdown
    python silent_bugs/run.py --index                          name, threads, wrong lines and number of each, as JSON

Without --tool, each program runs on 1, 2 and 3 processes, and the last number that rank 0 prints is compared. A fixed
program prints the same number on each, and the wrong one a different number on 2 and 3 processes. A program that
resumes is started again in its folder with --resume, and a fixed one prints the same number as without it.

A tool is a command whose exit code is 0 for "right", 1 for "wrong", and anything else for "cannot tell". {script} is
the file with its flags. What is in brackets is for programs that resume: "prove-training [--resume_flags=--resume]
{script}".

With --advised, the tool runs on each bug that has a .diff beside it, after the diff was applied: what the tool has
advised, and nothing else. Its first line has the names of the advice. The answer is JSON.
"""

import argparse
import ast
import builtins
import collections
import concurrent.futures
import contextlib
import json
import math
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from torch.distributed import TCPStore

HERE = Path(__file__).resolve().parent
IMPORTED = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.optim", "accelerate"]
IMPORTED += ["transformers.trainer"]
TOLERANCE = 1e-5  # relative: between numbers of a right program on different numbers of processes
NEAR = 3  # lines between the one that a tool names and the one that is wrong
TIME_LIMIT_S = 60
context = multiprocessing.get_context("forkserver")  # PyTorch is imported once


class Case(NamedTuple):
    path: Path
    is_bug: bool
    resumes: bool
    wrong_lines: list[int]

    @property
    def name(self) -> str:
        return self.path.relative_to(HERE).with_suffix("").as_posix()


def find_cases(patterns: list[str]) -> list[Case]:
    """The programs whose path below this folder begins with one of the patterns."""
    cases = []
    for path in sorted([*HERE.glob("bugs/*/*.py"), *HERE.glob("right/*.py"), *HERE.glob("unseen/*/*.py")]):
        if path.relative_to(HERE).as_posix().startswith(tuple(patterns)):
            text = path.read_text()
            lines = [number for number, line in enumerate(text.splitlines(), 1) if "# WRONG" in line]
            cases.append(Case(path, "bugs" in path.parts[-3:], '"--resume"' in text, lines))
    return cases


def index_of(case: Case) -> dict:
    """What a program says of itself."""
    about = ast.get_docstring(ast.parse(case.path.read_text())).replace("\n", " ")
    number = re.search(r"Its number: (.*?)\.(?:\s|$)", about)
    threads = re.findall(r"https://\S+", about)
    entry = {"name": case.name, "is_bug": case.is_bug, "resumes": case.resumes, "wrong_lines": case.wrong_lines}
    return entry | {"number": number and number[1], "threads": threads, "about": about.partition(" Its number")[0]}


# The numbers


def run_rank(path: str, flags: list[str], rank: int, processes: int, port: int, folder: str) -> None:
    """Run a program in this process, as torchrun does. Its output goes into a file of the folder."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.chdir(folder)
    output = os.open(f"output_{rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
    sys.argv = [path, *flags]
    import torch

    # Forked processes have the seed of their parent for hashes of strings, and those of a launcher one each.
    builtins.hash = lambda value, plain=hash: plain((rank, value) if isinstance(value, str) and rank else value)
    torch.set_num_threads(1)
    runpy.run_path(path, run_name="__main__")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may free tensors while the interpreter ends, and abort it


def run_program(case: Case, flags: list[str], processes: int, folder: str, tries: int = 3) -> str:
    """Run a program on some processes. Returns what rank 0 printed.

    It runs again if the server of processes has lost a status, which it then calls 255, once in some hundred runs.

    Raises:
        RuntimeError: a process failed, or did not end; with the last lines of its output.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a port that no one else takes
    ranks = [
        context.Process(target=run_rank, args=(str(case.path), flags, rank, processes, store.port, folder))
        for rank in range(processes)
    ]
    for process in ranks:
        process.start()
    try:
        end = time.monotonic() + TIME_LIMIT_S
        for process in ranks:
            process.join(max(end - time.monotonic(), 0))
        failed = [rank for rank, process in enumerate(ranks) if process.exitcode != 0]
        is_lost = any(process.exitcode == 255 for process in ranks)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    if is_lost and tries > 1:
        return run_program(case, flags, processes, folder, tries - 1)
    if failed:
        output = Path(folder, f"output_{failed[0]}.txt")
        text = output.read_text() if output.exists() else ""
        ended = f"rank {failed[0]} ended with {ranks[failed[0]].exitcode}"
        raise RuntimeError(f"{case.name} {' '.join(flags)} on {processes} processes: {ended}\n{text[-1500:]}")
    return Path(folder, "output_0.txt").read_text()


def run_case(case: Case, is_fixed: bool, processes: int) -> list[str]:
    """Run a program; one that resumes is started a second time in the same folder. Returns what each start printed."""
    flags = ["--fixed"] if is_fixed else []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        starts = [flags, [*flags, "--resume"]] if case.resumes else [flags]
        return [run_program(case, start, processes, folder) for start in starts]


def number_in(printed: str) -> float:
    """The last number."""
    return float(re.findall(r"-?\d+\.?\d*(?:e[-+]?\d+)?|nan|inf", printed)[-1])


def agree(numbers: list[float]) -> bool:
    return all(math.isclose(number, numbers[0], rel_tol=TOLERANCE) for number in numbers)


def check(case: Case, several: list[int]) -> bool:
    """Print the numbers of a program. Returns whether they show what they should.

    several: the numbers of processes to compare with one process.
    """
    begin, wrong = time.monotonic(), {}
    try:
        starts = [start for processes in (1, *several) for start in run_case(case, case.is_bug, processes)]
        right = [number_in(start) for start in starts]
        if case.is_bug:
            wrong = {processes: number_in(run_case(case, False, processes)[-1]) for processes in several}
    except (RuntimeError, IndexError) as error:
        print(f"{case.name}: {error}", flush=True)
        return False
    is_shown = agree(right) and not any(agree([right[0], number]) for number in wrong.values())
    numbers = f"{right[0]:.7g}" if agree(right) else ", ".join(f"{number:.7g}" for number in right)
    told = "".join(f"; wrong on {processes} processes: {number:.7g}" for processes, number in wrong.items())
    seconds = time.monotonic() - begin
    print(f"{'' if is_shown else 'NOT SHOWN '}{case.name}: {numbers}{told} ({seconds:.1f} s)", flush=True)
    return is_shown


def preload(cases: list[Case]) -> None:
    """Let the server of processes import what these programs import, once."""
    texts = "".join(case.path.read_text() for case in cases)
    tops = {name: name.partition(".")[0] for name in IMPORTED}
    context.set_forkserver_preload([name for name, top in tops.items() if f"{top} import" in texts or top == "torch"])


# A tool


class Verdict(NamedTuple):
    code: int
    line: str  # whether the output names the wrong line, or another one of the file
    seconds: float

    @property
    def says(self) -> str:
        return {0: "right", 1: "wrong"}.get(self.code, "cannot tell")


def ask(tool: str, case: Case, flags: str = "") -> Verdict:
    """Run the tool on a program."""
    tool = re.sub(r"\[(.*?)\]", r"\1" if case.resumes else "", tool)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        words = shlex.split(tool.replace("{script}", f"{shlex.quote(str(case.path))} {flags}"))
        done = subprocess.run(words, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    lines = re.findall(rf"{re.escape(case.path.name)}\D{{1,9}}(\d+)", done.stdout + done.stderr)
    is_near = any(abs(int(line) - wrong) <= NEAR for line in lines for wrong in case.wrong_lines)
    named = "the wrong one" if is_near else "another" if lines else ""
    return Verdict(done.returncode, named * (done.returncode == 1), time.monotonic() - begin)


def plain(case: Case) -> str:
    """What one sees without a tool: whether the program ends, and whether its loss doubles."""
    try:
        printed = run_case(case, False, 2)[-1]
    except RuntimeError:
        return "fails"
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    return "-" if not losses or losses[-1] <= 2 * losses[0] else "the loss doubles"


def compare(tool: str, cases: list[Case], jobs: int) -> bool:
    """Print a table of what a tool says. Returns whether it finds every bug and accuses no right program."""
    found = seconds = 0
    named, accused, bugs = collections.Counter(), [], [case for case in cases if case.is_bug]
    print("| bug | without a tool | with it | the line | fixed | s |\n| --- | --- | --- | --- | --- | --- |")
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        verdicts = pool.map(lambda case: (ask(tool, case), ask(tool, case, "--fixed"), plain(case)), bugs)
        for case, (wrong, fixed, seen) in zip(bugs, verdicts, strict=True):
            found, seconds = found + (wrong.code == 1), seconds + wrong.seconds
            named[wrong.line] += 1
            accused += [f"{case.name} --fixed"] if fixed.code == 1 else []
            says = [verdict.says.replace("wrong", "**wrong**") for verdict in (wrong, fixed)]
            print(f"| {case.name} | {seen} | {says[0]} | {wrong.line} | {says[1]} | {wrong.seconds:.0f} |", flush=True)
        right = [case for case in cases if not case.is_bug]
        print("\n| right program | with the tool | s |\n| --- | --- | --- |")
        for case, verdict in zip(right, pool.map(lambda case: ask(tool, case), right), strict=True):
            accused += [case.name] if verdict.code == 1 else []
            says = verdict.says.replace("wrong", "**wrong**")
            print(f"| {case.name} | {says} | {verdict.seconds:.0f} |", flush=True)
    lines = f"{named['the wrong one']} with the wrong line and {named['another']} with another"
    print(f"\n{found} of {len(bugs)} bugs found, {lines}, {seconds:.0f} s")
    print(f"{len(accused)} of {len(bugs) + len(right)} right programs accused: {', '.join(accused) or 'none'}")
    return found == len(bugs) and not accused


def ask_again(tool: str, case: Case) -> dict:
    """Run the tool on a bug as its own advice corrects it."""
    diff = case.path.with_suffix(".diff")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        corrected = Path(shutil.copy(case.path, folder))
        subprocess.run(["patch", "--silent", corrected, diff], check=True)
        says = ask(tool, case._replace(path=corrected)).says
    return {"name": case.name, "advice": diff.read_text().partition("\n")[0].split(), "corrected": says}


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=["bugs", "right"], help='such as "bugs/resume"; default: all')
    parser.add_argument("--tool", help="a command with {script}")
    parser.add_argument("--advised", action="store_true", help="run it on the bugs as its own advice corrects them")
    parser.add_argument("--index", action="store_true", help="print what the programs say of themselves, as JSON")
    parser.add_argument("--jobs", type=int, default=2, help="programs to run at the same time")
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 3], help="to compare with one process")
    args = parser.parse_args(words)
    cases = find_cases(args.paths)
    if args.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {args.jobs}")
    if min(args.processes) < 2:
        parser.error(f"--processes must be at least 2, got {min(args.processes)}")
    if not cases:
        parser.error(f"no program begins with {' or '.join(args.paths)}")
    if args.tool and "{script}" not in args.tool:
        parser.error("--tool needs {script}")
    if args.advised and not args.tool:
        parser.error("--advised needs --tool")
    if args.index:
        print(json.dumps([index_of(case) for case in cases], indent=1))
        return 0
    preload(cases)
    if args.advised:
        advised = [case for case in cases if case.path.with_suffix(".diff").exists()]
        with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
            answers = list(pool.map(lambda case: ask_again(args.tool, case), advised))
        print(json.dumps(answers, indent=1))
        return 0
    if args.tool:
        return 0 if compare(args.tool, cases, args.jobs) else 1
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        shown = list(pool.map(lambda case: check(case, args.processes), cases))
    print(f"{sum(shown)} of {len(cases)} programs show what they should")
    return 0 if all(shown) else 1


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
