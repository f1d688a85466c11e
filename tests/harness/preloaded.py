"""Launches that do not import torch again: the launcher and its ranks are forks of a process that has imported it.

A launch on two processes imports torch three times, ten seconds of CPU, and most tests train for less than one. The
forked processes have the session, environment, streams and arguments of new ones. What they do not have: a command
line in /proc (psutil is told instead), a fresh interpreter's memory, and its end, which frees what is left.
"""

import atexit
import faulthandler
import importlib
import multiprocessing
import os
import runpy
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import psutil

IMPORTS = [
    "accelerate.commands.launch",
    "datasets",
    "evaluate",
    "matplotlib.backends.backend_agg",
    "psutil",
    "safetensors.torch",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torchvision.transforms.v2",
]
# Variables that no import reads. With any other one changed, a fresh interpreter is needed. A run in the process of the
# tests leaves the last three.
READ_LATER = ("ACCELERATE_", "CUDA_VISIBLE_DEVICES", "FSDP_", "LOCAL_", "MASTER_", "PYTEST_", "RANK", "WORLD_SIZE")
READ_LATER += ("PARALLELISM_CONFIG_", "CUBLAS_WORKSPACE_CONFIG", "KINETO_LOG_LEVEL", "TORCHINDUCTOR_CACHE_DIR")

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(IMPORTS)
Interpreter = subprocess.Popen
variables: dict[str, str] = {}  # of the process that has imported everything
command_lines: dict[int, list[str]] = {}  # by process id, of this process and those above it


def run(words: list[str], cwd: Path, environment: dict, timeout: float) -> subprocess.CompletedProcess | None:
    """Run `python WORDS` to its end; None if that takes a fresh interpreter.

    Raises:
        subprocess.TimeoutExpired: after `timeout` seconds. What it said, and the stacks of its processes, are printed.
    """
    if not can_fork(environment):
        return None
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / "out", Path(folder) / "err"]
        process = Fork(words, context.Process(target=program, args=(words, environment, cwd, streams)))
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            processes = [*psutil.Process(process.pid).children(recursive=True), process]
            for one in processes:
                one.send_signal(signal.SIGUSR2)
                time.sleep(0.2)  # one writes at a time
            for one in processes:
                one.kill()
            print(*(stream.read_text(errors="replace")[-10_000:] for stream in streams), sep="\n")
            raise
        said = (stream.read_text(errors="replace") for stream in streams)
        return subprocess.CompletedProcess(words, process.returncode, *said)


def can_fork(environment: dict) -> bool:
    """Whether a fork of what has imported everything has this environment, too. The first call starts the imports."""
    if not variables:
        variables.update(environment)
        with mock.patch.dict(os.environ, environment, clear=True):
            multiprocessing.forkserver.ensure_running()
    changed = {name for name, _ in environment.items() ^ variables.items()}
    return all(name.startswith(READ_LATER) for name in changed)


def program(words: list[str], environment: dict, cwd: Path | None = None, streams: list[Path] = ()) -> None:
    """What a fork runs: `python WORDS`, in a session of its own."""
    os.setsid()
    opened = {stream: os.open(stream, os.O_WRONLY | os.O_CREAT | os.O_APPEND) for stream in dict.fromkeys(streams)}
    for number, stream in enumerate(streams, 1):
        os.dup2(opened[stream], number)
    faulthandler.register(signal.SIGUSR2, file=2)
    if cwd is not None:
        os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if threads := os.environ.get("OMP_NUM_THREADS"):  # read when torch is loaded
        importlib.import_module("torch").set_num_threads(int(threads))
    command_lines[os.getpid()] = [sys.executable, *words]
    own = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    installed = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    try:
        if words[0] == "-m":
            sys.argv, sys.path[:] = words[1:], [os.getcwd(), *own, *installed]
            sys.modules.pop(words[1], None)
            start_forks()
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            return
        words = words[words[0] == "-u" :]
        sys.argv, sys.path[:] = words, [os.path.dirname(os.path.realpath(words[0])), *own, *installed]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__file__ = os.path.abspath(words[0])
        exec(compile(Path(words[0]).read_bytes(), main.__file__, "exec"), main.__dict__)
    except SystemExit:
        raise
    except BaseException:
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
    finally:  # as at the end of an interpreter; a fork by multiprocessing leaves out the second
        threading._shutdown()
        atexit._run_exitfuncs()


class Fork:
    """A process of multiprocessing with what launchers and tests use of subprocess.Popen."""

    def __init__(self, args, process):
        self.args, self.process = args, process
        process.start()
        self.pid = process.pid

    def poll(self) -> int | None:
        return self.process.exitcode

    returncode = property(poll)

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Started(Fork):
    """`python WORDS` in a fork that runs beside the test, which reads `stdout` and `stderr` as those of a Popen."""

    def __init__(self, words: list[str], cwd: Path, environment: dict, stderr=subprocess.PIPE):
        assert can_fork(environment), "these variables need a fresh interpreter"
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder) / "out", Path(folder) / "err"
            pipes = [out, out if stderr == subprocess.STDOUT else err]
            for pipe in {*pipes}:
                os.mkfifo(pipe)
            super().__init__(words, context.Process(target=program, args=(words, environment, cwd, pipes)))
            # In the order of the fork, which has opened all of them when the folder is removed.
            opened = {pipe: pipe.open(errors="replace") for pipe in dict.fromkeys(pipes)}
            self.stdout, self.stderr = opened[out], opened.get(err)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """As that of a Popen, but what has not ended in time is killed."""
        end = threading.Timer(timeout, os.killpg, [self.pid, signal.SIGKILL])
        end.start()
        with ThreadPoolExecutor() as pool:
            said = tuple(pool.map(lambda stream: stream.read(), (self.stdout, self.stderr)))
        self.wait()
        end.cancel()
        return said


class Rank(Fork):
    """A process that a launcher forks."""

    def __init__(self, args, env=None, **_):
        sys.stdout.flush()
        sys.stderr.flush()
        command = [str(word) for word in args[1:]]
        forked = multiprocessing.get_context("fork").Process(target=rank, args=(command, dict(env or os.environ)))
        super().__init__(args, forked)


def rank(words: list[str], environment: dict) -> None:
    subprocess.Popen = Interpreter
    for name in os.listdir("/dev/fd"):  # the launcher's store ends with the launcher
        try:
            if int(name) > 2 and stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                os.close(int(name))
        except OSError:  # that of listdir
            continue
    program(words, environment)


def start_forks() -> None:
    """Have this launcher start Python programs as forks, and psutil tell their command lines."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    def popen(args, **options):
        is_python = isinstance(args, (list, tuple)) and args[0] == sys.executable
        return (Rank if is_python else Interpreter)(args, **options)

    cmdline = psutil.Process.cmdline
    psutil.Process.cmdline = lambda process: command_lines.get(process.pid) or cmdline(process)
    subprocess.Popen = subprocess_handler.Popen = popen
