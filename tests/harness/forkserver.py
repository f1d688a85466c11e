"""Start Python programs as forks of a process that has imported torch and the rest already.

A launch on two processes imports torch three times, which takes 9 s of CPU; most tests train for
less than one. Here the test has the launcher forked, and the launcher each rank. What the program
sees is what a new interpreter sees: its parent, session, environment, streams, command line and end.
multiprocessing's forkserver gives none of the first six: its children are children of the server, so
that the kill of a launcher would not end its ranks, and `accelerate launch` would not use it for them.

A program whose environment may change what an import does is started as ever. So is one that a test
wants in a fresh_interpreter: to see an import that is missing, an order of a set that another
process has otherwise, memory, or that what is left at the end can be freed.
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
# Variables that launchers, tests, torch and this project set for a process, and that no import reads.
RUNTIME = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "RANK", "WORLD_SIZE")
RUNTIME += ("OMP_NUM_THREADS", "KMP_", "FORK_LAUNCH_PARAMS", "COLUMNS", "PYTEST_", "PYTHONUNBUFFERED")
RUNTIME += ("CUDA_VISIBLE_DEVICES", "NCCL_", "TORCH_NCCL_", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
RUNTIME += ("TORCHINDUCTOR_CACHE_DIR", "KINETO_LOG_LEVEL")
RANK = {"ACCELERATE_DYNAMO_MODE", "TORCHELASTIC_RUN_ID"}  # one of them is set by each launcher
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
SPACE = 8192  # bytes for a longer command line, and for more environment
COMMAND_LINE, ENVIRONMENT = (48, 49), (50, 51)  # fields of /proc/self/stat: begin and end
LENGTH = 8  # bytes of the length of a message

execute_in_fresh_interpreter = subprocess.Popen._execute_child
PARAMETERS = inspect.signature(execute_in_fresh_interpreter)


def read_by_imports(environment: dict) -> dict:
    """The part of an environment that may change what an import does."""
    return {name: value for name, value in environment.items() if not name.startswith(RUNTIME)}


class Forkserver:
    """This process's end of the socket to a process that forks children for it.

    Args:
        environment: the variables of the other process.
        prefix: the beginning of a command line, of a program that runs the rest of it.
    """

    of_this_process: "Forkserver | None" = None  # in a launcher

    def __init__(self, connection: socket.socket, environment: dict, prefix=()):
        self.connection, self.environment, self.prefix = connection, read_by_imports(environment), prefix
        self.lock = threading.Lock()

    @classmethod
    def start(cls, environment: dict, prefix=()) -> "Forkserver":
        own, other = socket.socketpair()
        server = cls(own, environment, prefix)
        server.process = subprocess.Popen(
            [*prefix, sys.executable, __file__, str(other.fileno()), " " * SPACE],
            env={**environment, "FORKSERVER_SPACE": " " * SPACE},
            stdin=subprocess.DEVNULL,
            pass_fds=[other.fileno()],
            start_new_session=True,
        )
        other.close()
        return server

    def request(self, given: dict) -> dict | None:
        """What the child is to do; None if a fresh interpreter has to do it.

        Args:
            given: the arguments of `Popen._execute_child`.
        """
        argv = [os.fsdecode(word) for word in given["args"]]
        environment = dict(os.environ if given["env"] is None else given["env"])
        unbuffered = argv[1:2] == ["-u"]
        program = argv[1 + unbuffered :]
        if (
            any(given.get(name) for name in ("preexec_fn", "pass_fds", "shell", "gid", "gids", "uid"))
            or argv[:1] != [sys.executable]
            or not program
            or (program[0].startswith("-") and program[0] not in ("-m", "-c"))
            or read_by_imports(environment) != self.environment
        ):
            return None
        return {
            "argv": argv,
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
            socket.send_fds(self.connection, [len(message).to_bytes(LENGTH, "big")], streams)
            self.connection.sendall(message)
            pid = int.from_bytes(receive(self.connection, LENGTH), "big")
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 0)
        if not pid:
            raise OSError("the forkserver has ended")
        return pid


def execute_child(self, argv, *arguments) -> None:
    """`Popen._execute_child`, by the forkserver where that is the same."""
    given = PARAMETERS.bind(self, argv, *arguments).arguments
    server = getattr(self, "forkserver", Forkserver.of_this_process)
    request = server and server.request(given)
    if request is None:
        argv = [*server.prefix, *argv] if server and server.prefix else argv
        execute_in_fresh_interpreter(self, argv, *arguments)
        return
    streams = [given[name] if given[name] != -1 else n for n, name in enumerate(("p2cread", "c2pwrite", "errwrite"))]
    self.pid = server.fork(request, streams)
    self._child_created = True
    self._close_pipe_fds(*(given[f"{pipe}{end}"] for pipe in ("p2c", "c2p", "err") for end in ("read", "write")))


class Popen(subprocess.Popen):
    """A fork by a forkserver; without one, a fresh interpreter."""

    def __init__(self, *args, forkserver: Forkserver | None, **options):
        self.forkserver = forkserver
        super().__init__(*args, **options)

    _execute_child = execute_child


def receive(connection: socket.socket, length: int) -> bytes:
    """As many bytes; fewer at the end of the connection."""
    received = b""
    while len(received) < length and (part := connection.recv(length - len(received))):
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


def take_identity(request: dict) -> None:
    """Make this fork what a new interpreter is before it runs the program."""
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    multiprocessing.process.ORIGINAL_DIR = os.getcwd()
    os.environ.clear()
    os.environ.update(request["environment"])
    show_in_proc(request["argv"], *COMMAND_LINE)
    show_in_proc([f"{name}={value}" for name, value in os.environ.items()], *ENVIRONMENT)
    if request["unbuffered"] or os.environ.get("PYTHONUNBUFFERED"):
        for name in ("stdout", "stderr"):
            old = getattr(sys, name)
            new = io.TextIOWrapper(
                io.FileIO(old.fileno(), "w", closefd=False), old.encoding, old.errors, write_through=True
            )
            setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)
    sys.modules["numpy"].random.seed()
    if threads := os.environ.get("OMP_NUM_THREADS"):  # read when torch is loaded
        sys.modules["torch"].set_num_threads(int(threads))


def show_in_proc(words: list[str], begin: int, end: int) -> None:
    """Overwrite the words that other processes see. What is left of the space are empty words."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[begin - 3]), int(fields[end - 3])
    line = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - begin - 1]
    ctypes.memmove(begin, line.ljust(end - begin, b"\0"), end - begin)


def fork_server(environment: dict) -> dict | None:
    """Give this process a forkserver. Returns the request in the children of the server, and None here."""
    own, other = socket.socketpair()
    if os.fork() == 0:
        own.close()
        show_in_proc(["forkserver"], *COMMAND_LINE)
        return serve(other)
    other.close()
    Forkserver.of_this_process = Forkserver(own, environment)
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
    """End as an interpreter does, but free nothing, which takes a second; return where that is not the same.

    Args:
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
        # It loads triton, which at the end would report what is frozen of it as leaked; evaluate loads transformers
        # where that is installed, and so triton.
        if name == "torch._dynamo" and "triton" not in sys.modules:
            gc.freeze()
        importlib.import_module(name)
    request = serve(connection)
    take_identity(request)
    while not RANK & request["environment"].keys():  # a rank starts no other program
        request_of_child = fork_server(request["environment"])
        if request_of_child is None:
            break
        request = request_of_child
        take_identity(request)
    try:
        run(request["program"])
    except SystemExit as stopped:
        end(stopped.code)
        raise
    end(None)


if __name__ == "__main__":
    main()
