"""Launches scripts as a user does.

Each launch has its own port, folder and time-out, and leaves no process behind.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import preloaded
import pytest
import run_many
import torch
from filelock import FileLock
from hosts import environment, free_port
from runs import Runs

# Before torch is loaded, and for all that is launched from here: OpenMP's threads sleep while they
# wait. By default they spin, and with more threads than cores (two tests at a time) a step of
# ResNet-50 takes four times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A DataLoader that dies with its accelerator, in one cycle of references, has lost the thread that tells its workers to
# end: it waits this long for each of them, by default 5 s.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.2

ROOT = Path(__file__).resolve().parents[1]
# The files that `accelerate launch --config_file` takes.
CONFIGS = [path for path in sorted((ROOT / "accelerate_configs").glob("*.yaml")) if path.stem != "skypilot"]
MNIST = ROOT / "data" / "mnist"
# The tests for GPUs come first, and of these what tells the most about a machine.
GPU_FILES = {"test_no_synchronisation": 0, "test_topologies": 1, "test_on_gpus": 2}
BEGAN = time.monotonic()


def is_older_than(version: str) -> bool:
    """Whether the installed torch is older than this version."""
    return torch.__version__ < (2, int(version.removeprefix("2.")) - 1, 99)  # 2.13.0a0 comes before 2.13


def needs_torch(version: str):
    """Skips a test of what older versions of torch lack."""
    return pytest.mark.skipif(is_older_than(version), reason=f"needs torch {version}")


def pytest_addoption(parser):
    parser.addoption(
        "--stand_ins",
        action="store_true",
        help="try out the tests marked gpu of test_on_gpus.py without a GPU, with configs of the CPU",
    )
    parser.addoption(
        "--minutes",
        type=float,
        help="begin no test after so many minutes; the tests run one at a time, in their order",
    )


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist starts its workers
def pytest_cmdline_main(config):
    if config.option.minutes:
        config.option.numprocesses = 0


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: GPU_FILES.get(item.path.stem, len(GPU_FILES)))
    for item in items:
        is_tried = config.option.stand_ins and item.path.stem == "test_on_gpus"
        if item.get_closest_marker("gpu") and not torch.cuda.is_available() and not is_tried:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        for marker in item.iter_markers("others"):
            (library,) = marker.args
            if not importlib.util.find_spec(library):
                item.add_marker(pytest.mark.skip(reason=f"needs {library}: tests/others.txt"))


def pytest_runtest_setup(item):
    minutes = item.config.option.minutes
    if minutes and time.monotonic() > BEGAN + 60 * minutes:
        pytest.skip(f"not begun: --minutes {minutes:g} are over")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Tests on GPUs run one at a time, also those of several workers: they would share the memory,
    and slow each other down."""
    if not item.get_closest_marker("gpu"):
        return (yield)
    with FileLock(Path(tempfile.gettempdir()) / f"gpu_tests_of_{os.getuid()}.lock"):
        return (yield)


@pytest.fixture(autouse=True, scope="session")
def _signals_as_from_a_terminal():
    """nohup has SIGHUP ignored, and a shell the SIGINT of what it runs in the background, and a process
    inherits that. Any handler is not inherited, and keeps these tests alive as well."""
    for number in (signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


@pytest.fixture(autouse=True)
def _fresh_accelerate():
    """Remove the state of an Accelerator, which Accelerate keeps until the process ends."""
    yield
    run_many.reset_accelerate()


@pytest.fixture(autouse=True)
def _old_handlers():
    """Restore the handlers of signals and of uncaught errors.

    Each process group installs an excepthook that prints the rank and then calls the one before.
    """
    names = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
    before, excepthook = [signal.getsignal(name) for name in names], sys.excepthook
    yield
    for name, handler in zip(names, before, strict=True):
        signal.signal(name, handler)
    sys.excepthook = excepthook


@pytest.fixture
def stops(capsys):
    """What a function says that ends the process with exit code 2."""

    def stops(function, *arguments) -> str:
        with pytest.raises(SystemExit) as stopped:
            function(*arguments)
        assert stopped.value.code == 2
        return capsys.readouterr().err

    return stops


@pytest.fixture
def float64():
    """The default type, as with --float64: weights drawn in it are not those of a float32 model."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Launcher:
    """`launcher(config, *flags)` runs `accelerate launch` and waits for its end, as in preloaded.py.

    `launcher.start(...)` returns the process; it and its ranks are fresh interpreters, or, by `launcher.fork(...)`,
    forks as in preloaded.py. `launcher.python(*words)` and `start_python` run any other program.
    """

    def __init__(self, folder: Path, home: Path):
        self.folder, self.home, self.processes = folder, home, []

    def words(self, config, *flags, script="mnist_mlp", launch_flags=()) -> list[str]:
        config = config if os.sep in str(config) else ROOT / "accelerate_configs" / f"{config}.yaml"
        words = ["-m", "accelerate.commands.launch", "--config_file", config]
        words += ["--main_process_port", free_port(), *launch_flags]
        script = Path(f"{script}.py") if Path(script).is_absolute() else run_many.path_of(script)
        return [str(word) for word in (*words, script, *flags)]

    def start(self, *words, cwd=None, stderr=subprocess.PIPE, **options) -> subprocess.Popen:
        return self.start_python(*self.words(*words, **options), cwd=cwd, stderr=stderr)

    def fork(self, *words, stderr=subprocess.PIPE, **options) -> preloaded.Started:
        words = self.words(*words, **options)
        self.processes.append(preloaded.Started(words, self.folder, environment(self.home), stderr))
        return self.processes[-1]

    def start_python(self, *words, cwd=None, stderr=subprocess.PIPE) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, *map(str, words)],
            cwd=cwd or self.folder,
            env=environment(self.home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def __call__(self, *words, timeout=150, check=True, cwd=None, **options) -> subprocess.CompletedProcess:
        words = self.words(*words, **options)
        done = preloaded.run(words, cwd or self.folder, environment(self.home), timeout)
        return self.checked(done, check) if done else self.python(*words, timeout=timeout, check=check, cwd=cwd)

    def python(self, *words, timeout=150, check=True, **options) -> subprocess.CompletedProcess:
        return self.wait(self.start_python(*words, **options), timeout, check)

    def wait(self, process, timeout=150, check=True) -> subprocess.CompletedProcess:
        out, err = process.communicate(timeout=timeout)
        return self.checked(subprocess.CompletedProcess(process.args, process.returncode, out, err), check)

    def checked(self, done, check=True) -> subprocess.CompletedProcess:
        assert done.returncode == 0 or not check, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done

    def end(self):
        for process in self.processes:
            try:
                # The launcher leads a session, and its workers are in it.
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            process.wait(10)


@pytest.fixture(scope="session")
def home(tmp_path_factory) -> Path:
    """HF_HOME of what the tests launch; this process has its cache of data there as well."""
    import datasets

    home = tmp_path_factory.mktemp("home")
    datasets.config.HF_DATASETS_CACHE = home / "datasets"
    return home


@pytest.fixture
def launcher(tmp_path, home):
    launcher = Launcher(tmp_path, home)
    yield launcher
    launcher.end()


@pytest.fixture(scope="module")
def shared_launcher(tmp_path_factory, home):
    """For runs that several tests of a module look at."""
    launcher = Launcher(tmp_path_factory.mktemp("shared"), home)
    yield launcher
    launcher.end()


@pytest.fixture(scope="module")
def runs(shared_launcher):
    """Asks for runs, as in runs.py, which launches all of them together."""
    return Runs(shared_launcher)


@pytest.fixture(scope="session")
def two_hosts(tmp_path_factory, home):
    """For all tests: what forks on a host takes seconds to start."""
    from hosts import Hosts

    try:
        hosts = Hosts(tmp_path_factory.mktemp("hosts"), home)
    except OSError as reason:
        pytest.skip(str(reason))
    yield hosts
    hosts.remove()


@pytest.fixture
def hosts(two_hosts, tmp_path):
    """Two machines, as in hosts.py; skips with the reason where they cannot be made."""
    two_hosts.folder = tmp_path
    yield two_hosts
    two_hosts.clear()


@pytest.fixture
def threads(monkeypatch):
    """Point-to-point messages between threads of this process, as in threads.py."""
    from threads import Threads

    return Threads(monkeypatch)


def first_images(folder: Path, train: int, test: int) -> Path:
    """Write the first images of MNIST into a folder, as parquet."""
    import pyarrow.parquet

    for split, count in (("train", train), ("test", test)):
        name = f"{split}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pyarrow.parquet.read_table(MNIST / name).slice(0, count), folder / name)
    return folder


@pytest.fixture(scope="session")
def small_mnist(tmp_path_factory) -> Path:
    """1003 training and 203 test images of MNIST. No batch size here divides them."""
    return first_images(tmp_path_factory.mktemp("small_mnist"), 1003, 203)


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> Path:
    """A folder of short texts, of 30 to 160 words."""
    folder = tmp_path_factory.mktemp("texts")
    words = "def return for in the a of list if not None self x y = + ( )".split()  # noqa: SIM905
    for number in range(24):
        chosen = [words[(number * i + i * i // 3) % len(words)] for i in range(30 + number * 37 % 130)]
        (folder / f"{number}.txt").write_text(" ".join(chosen) + "\n")
    return folder


@pytest.fixture(scope="session")
def tiny_mnist(tmp_path_factory) -> Path:
    """50 training and 23 test images, for ResNet-50."""
    return first_images(tmp_path_factory.mktemp("tiny_mnist"), 50, 23)


@contextmanager
def stopped_at(call: int | None):
    """As if a signal came before the n-th time that a run asks for one."""
    from utils.failures.signals import StopSignal

    calls = []
    agreed = StopSignal.agreed

    def agreed_or_at_call(stop_signal, must_stop):
        calls.append(None)
        return len(calls) == call or agreed(stop_signal, must_stop)

    with mock.patch.object(StopSignal, "agreed", agreed_or_at_call):
        yield


@pytest.fixture
def train(small_mnist, tmp_path, monkeypatch, home):
    """Runs the main of programs/mlp.py in this process and returns its exit code.

    A process of its own would take seconds to import everything.
    """
    from tests.programs import mlp

    monkeypatch.setattr(mlp, "TEST_BATCH_SIZE", 50)  # five calls of `agreed` in an evaluation

    def train(folder, *flags, stop_at_call=None):
        words = ["--dataset", small_mnist, "--output_dir", tmp_path / folder]
        words += ["--num_epochs", 2, "--hidden", 16]
        words += ["--batch_size", 300, "--log_every", 3, "--dropout", 0.1, *flags]
        with stopped_at(stop_at_call):
            return run_many.run("mlp", words)

    return train
