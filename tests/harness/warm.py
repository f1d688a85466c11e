"""Start Python programs from a process that has imported torch and the rest already.

A launch on two processes imports torch three times, which takes 9 s of CPU; most tests train for
less than one. Here a process that has the imports is forked instead: by the test for the launcher,
and by the launcher for each rank. All else is as in a new process: its parent, its session, its
environment, its streams, its command line, and its end. But at a regular end nothing is freed: to
free all that was imported takes another second.

A program whose environment may change what an import does is started as ever. So is one that a test
asks for (`cold`): to see an import that is missing, an order of a set that another process has
otherwise, memory, or that what is left at the end can be freed.
"""

import atexit
import ctypes
import gc
import importlib
import inspect
import io
import json
import multiprocessing.process
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

IMPORTS = (
    "accelerate.commands.launch",
    "accelerate.state",
    "datasets",
    "evaluate",
    "matplotlib.backends.backend_agg",
    "psutil",
    "safetensors.torch",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.elastic.agent.server.local_elastic_agent",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.utils.data",
    "torch._dynamo",
    "torchvision.transforms.v2",
)
# What launchers and tests set for each process, and nothing reads before it is needed.
RUNTIME = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "RANK")
RUNTIME += ("WORLD_SIZE", "OMP_NUM_THREADS", "FORK_LAUNCH_PARAMS", "COLUMNS", "PYTEST_", "TRAIN_")
RUNTIME += ("CUDA_VISIBLE_DEVICES", "NCCL_", "TORCH_NCCL_", "KMP_")
RUNTIME += ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "PYTHONUNBUFFERED")
# What torch and this project leave in the environment of the tests, when these call them.
RUNTIME += ("TORCHINDUCTOR_CACHE_DIR", "KINETO_LOG_LEVEL")
RANK = {"ACCELERATE_DYNAMO_MODE", "TORCHELASTIC_RUN_ID"}  # one of them is set by each launcher
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
SPACE = 8192  # bytes for a longer command line, and for more environment
COMMAND_LINE, ENVIRONMENT = (48, 49), (50, 51)  # fields of /proc/self/stat: begin and end
STREAMS = (("p2cread", 0), ("c2pwrite", 1), ("errwrite", 2))
LENGTH = 8  # bytes of the length of a message

start_cold = subprocess.Popen._execute_child
PARAMETERS = inspect.signature(start_cold)


def fixed(environment: dict) -> dict:
    """The part of an environment that imports may read."""
    return {name: value for name, value in environment.items() if not name.startswith(RUNTIME)}


class Nursery:
    """This process's end of the socket to a process that forks children for it.

    environment: that of the other process; words: the beginning of a command line, of a program
    that runs the rest of it.
    """

    def __init__(self, connection: socket.socket, environment: dict, words=()):
        self.connection, self.environment, self.words = connection, fixed(environment), words
        self.lock = threading.Lock()

    @classmethod
    def start(cls, environment: dict, words=()) -> "Nursery":
        own, other = socket.socketpair()
        nursery = cls(own, environment, words)
        nursery.process = subprocess.Popen(
            [*words, sys.executable, __file__, str(other.fileno()), " " * SPACE],
            env={**environment, "WARM_SPACE": " " * SPACE},
            stdin=subprocess.DEVNULL,
            pass_fds=[other.fileno()],
            start_new_session=True,
        )
        other.close()
        return nursery

    def request(self, given: dict) -> dict | None:
        """What the child is to do; None if a new interpreter has to be started.

        given: the arguments of `Popen._execute_child`.
        """
        words = [os.fsdecode(word) for word in given["args"]]
        environment = dict(os.environ if given["env"] is None else given["env"])
        plain = ("preexec_fn", "pass_fds", "shell", "gid", "gids", "uid")
        if any(given.get(name) for name in plain) or words[:1] != [sys.executable]:
            return None
        unbuffered = words[1:2] == ["-u"]
        program = words[1 + unbuffered :]
        if not program or (program[0].startswith("-") and program[0] not in ("-m", "-c")):
            return None
        if fixed(environment) != self.environment:
            return None
        return {
            "words": words,
            "program": program,
            "unbuffered": unbuffered,
            "environment": environment,
            "cwd": os.fspath(given["cwd"] or os.getcwd()),
            "session": bool(given["start_new_session"]),
        }

    def fork(self, request: dict, streams: list[int]) -> int:
        """The process id of a new child of this process."""
        message = json.dumps(request).encode()
        with self.lock:
            # The new process's own parent ends, and it comes to the next ancestor that takes such.
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
            header = len(message).to_bytes(LENGTH, "big")
            socket.send_fds(self.connection, [header], streams)
            self.connection.sendall(message)
            pid = int.from_bytes(receive(self.connection, LENGTH), "big")
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)
        if not pid:
            raise OSError("the process that forks has ended")
        return pid


of_this_process: Nursery | None = None


def execute_child(self, words, *arguments) -> None:
    """`Popen._execute_child`, with a fork of the nursery where that is the same."""
    given = PARAMETERS.bind(self, words, *arguments).arguments
    nursery = getattr(self, "nursery", of_this_process)
    if nursery is None:
        start_cold(self, words, *arguments)
        return
    request = nursery.request(given)
    if request is None:
        start_cold(self, [*nursery.words, *words], *arguments)
        return
    streams = [given[name] if given[name] != -1 else default for name, default in STREAMS]
    self.pid = nursery.fork(request, streams)
    self._child_created = True
    pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    self._close_pipe_fds(*(given[name] for name in pipes))


class Popen(subprocess.Popen):
    """A process that `nursery` forks; without one, a new interpreter."""

    def __init__(self, *args, nursery: Nursery | None, **options):
        self.nursery = nursery
        super().__init__(*args, **options)

    _execute_child = execute_child


def receive(connection: socket.socket, length: int) -> bytes:
    """As many bytes; fewer at the end of the connection."""
    received = b""
    while len(received) < length:
        part = connection.recv(length - len(received))
        if not part:
            break
        received += part
    return received


def serve(connection: socket.socket) -> dict:
    """Fork a process for each request, until the other end is closed. Returns in the forks only."""
    # Those of the group are for the forks; this one ends with its connection.
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    while True:
        header, streams, *_ = socket.recv_fds(connection, LENGTH, 3)
        if not header:
            os._exit(0)
        header += receive(connection, LENGTH - len(header))
        message = receive(connection, int.from_bytes(header, "big"))
        middle = os.fork()
        if middle == 0:
            middle = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == middle:
                time.sleep(0.0005)
            for descriptor, stream in enumerate(streams):
                os.dup2(stream, descriptor)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            connection.sendall(os.getpid().to_bytes(LENGTH, "big"))
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            connection.detach()
            return json.loads(message)
        os.waitpid(middle, 0)
        for stream in streams:
            os.close(stream)


def become(request: dict) -> None:
    """Make this fork what a new interpreter is before it runs the program."""
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()
    os.environ.clear()
    os.environ.update(request["environment"])
    environment = [f"{name}={value}" for name, value in os.environ.items()]
    show_in_proc(request["words"], *COMMAND_LINE)
    show_in_proc(environment, *ENVIRONMENT)
    unbuffered = request["unbuffered"] or bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = like(sys.__stdin__)
    sys.stdout = sys.__stdout__ = like(sys.__stdout__, unbuffered)
    sys.stderr = sys.__stderr__ = like(sys.__stderr__, unbuffered)
    sys.modules["numpy"].random.seed()
    threads = os.environ.get("OMP_NUM_THREADS")  # read when torch is loaded
    if threads:
        sys.modules["torch"].set_num_threads(int(threads))


def like(old: io.TextIOWrapper, unbuffered: bool = False) -> io.TextIOWrapper:
    """A new stream of sys, as the old one was opened."""
    descriptor = old.fileno()
    binary = io.FileIO(descriptor, old.mode, closefd=False)
    if old.mode == "r":
        binary = io.BufferedReader(binary)
    elif not unbuffered:
        binary = io.BufferedWriter(binary)
    stream = io.TextIOWrapper(
        binary,
        old.encoding,
        old.errors,
        line_buffering=not unbuffered and (descriptor == 2 or os.isatty(descriptor)),
        write_through=unbuffered,
    )
    stream.mode = old.mode
    return stream


def show_in_proc(words: list[str], begin: int, end: int) -> None:
    """Overwrite the words that other processes see. What is left of the space are empty words."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[begin - 3]), int(fields[end - 3])
    line = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def fork_nursery(environment: dict) -> dict | None:
    """Give this process a nursery. Returns the request in the children of the nursery, and None
    here."""
    global of_this_process
    own, other = socket.socketpair()
    if os.fork() == 0:
        own.close()
        show_in_proc(["nursery"], *COMMAND_LINE)
        return serve(other)
    other.close()
    of_this_process = Nursery(own, environment)
    subprocess.Popen._execute_child = execute_child
    return None


def run(program: list[str]) -> None:
    """Run `-m module ...`, `-c text ...` or `script ...` as the main module."""
    if program[0] == "-m":
        sys.argv, sys.path[:0] = program[1:], [os.getcwd()]
        sys.modules.pop(program[1], None)
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    if program[0] == "-c":
        sys.argv, sys.path[:0] = ["-c", *program[2:]], [""]
        exec(program[1], main.__dict__)
        return
    sys.argv, sys.path[:0] = program, [os.path.dirname(os.path.realpath(program[0]))]
    main.__file__ = os.path.abspath(program[0])
    exec(compile(Path(program[0]).read_bytes(), main.__file__, "exec"), main.__dict__)


def end(code) -> None:
    """End as an interpreter does, without freeing anything; return where that is not the same.

    code: of SystemExit, or None at the end of the program.
    """
    if code is not None and type(code) is not int:
        return
    threading._shutdown()  # waits for all threads that are not daemons
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):  # nobody reads, or it is closed: the interpreter says so
        return
    ctypes.CDLL(None).fflush(None)
    os._exit((code or 0) & 0xFF)


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    sys.path.pop(0)  # this folder
    for name in IMPORTS:
        if name == "torch._dynamo":
            assert "triton" not in sys.modules
            gc.freeze()
        importlib.import_module(name)
    request = serve(connection)
    become(request)
    while not RANK & request["environment"].keys():  # a rank starts no other program
        child = fork_nursery(request["environment"])
        if child is None:
            break
        request = child
        become(request)
    try:
        run(request["program"])
    except SystemExit as stopped:
        end(stopped.code)
        raise
    end(None)


if __name__ == "__main__":
    main()
