"""What a run leaves in its folder, and what it shows while it runs; the main process alone does."""

import atexit
import datetime
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from tqdm import tqdm

from .atomic_files import fsync_folder, read_entry, write_json
from .console import show, stop
from .features.curves import plot_curves
from .memory import own_peak_memory_gib

PACKAGES = ("torch", "torchvision", "accelerate", "datasets", "evaluate", "numpy")
TEST_LINE_EVERY_S = 20  # in a log file; a terminal has a bar


def remove_if_unused(folder: Path) -> None:
    """Remove the folder of a run that ended before it began, by a wrong --dataset for instance."""
    if folder.is_dir() and os.listdir(folder) == [".lock"]:
        shutil.rmtree(folder)


def clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def show_metric(name: str, value: float) -> str:
    """A metric for the screen, by the last word of its name: loss 0.1234, accuracy 98.19%."""
    kind = name.rpartition("_")[2]
    formats = {"loss": "{:.4f}", "accuracy": "{:.2%}", "lr": "{:.2e}"}
    if name == "samples_per_s":
        return f"{value:,.0f} samples/s"
    if name == "data_wait_pct":
        return f"{value:.0f}% waiting for data"
    return f"{name} " + formats.get(kind, "{:.4g}").format(value)


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def versions() -> dict[str, str]:
    """The version of Python and of each package that is installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_commit() -> str | None:
    """The commit of the code, with "+" after it if files were changed since; None outside git."""
    here = Path(__file__).parent

    def git(*words):
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        commit = git("rev-parse", "HEAD")
        changes = commit and git("status", "--porcelain", "--untracked-files=no")
    except OSError:  # git is not installed
        return None
    return commit and commit + ("+" if changes else "")


class Tracker:
    """run.json, metrics.jsonl, summary.json, curves.png, and the lines on the screen."""

    def __init__(self, accelerator: Accelerator, folder: Path, resume: bool | None):
        """Claim `folder` for this run: make it, try to write to it, lock it. Collective.

        The lock is held until the process ends; the kernel releases it after a `kill -9` too.
        resume: whether the folder may hold a run; None: as False, in a script that cannot resume.
        Raises: SystemExit on every rank, in one sentence, if the folder holds a run and `resume` is
        not set, if another process writes to it, or if it cannot be written to.
        """
        self.accelerator = accelerator
        self.folder = Path(folder)
        self.resume = resume
        self.metrics_file = self.bar = self.in_body_since = None
        self.train_time_s = self.wait_time_s = self.shown_train_s = self.shown_wait_s = 0.0
        self.samples = self.shown_samples = self.batches = self.steps = 0
        self.first_step_s = self.steps_s = self.drawn_at = self.test_shown_at = 0.0
        self.test_s, self.testing = None, False
        problem = self._claim() if accelerator.is_main_process else None
        problem = broadcast_object_list([problem])[0]
        if problem:
            stop(problem)

    def _claim(self) -> str | None:
        try:
            if not self.folder.exists():
                atexit.register(remove_if_unused, self.folder)
                self.folder.mkdir(parents=True, exist_ok=True)
                fsync_folder(self.folder.parent)
            self.lock = FileLock(self.folder / ".lock")
            # A run that was told to stop may still be saving.
            self.lock.acquire(timeout=10 if self.resume else 0)
            probe = self.folder / ".probe"
            probe.write_text("")
            probe.unlink()
        except Timeout:
            return f"another run is writing to {self.folder}: wait for it, or take another --output_dir"
        except OSError as error:
            return f"--output_dir {self.folder} cannot be written to: {error.strerror}"
        # Also without run.json, which a power cut may have taken: the checkpoints would be mixed.
        names = ("run.json", "checkpoints/step_*")
        holds_a_run = any(any(self.folder.glob(name)) for name in names)
        if not self.resume and holds_a_run:
            way_out = "" if self.resume is None else "add --resume to continue it, or "
            return f"{self.folder} already holds a run: {way_out}take another --output_dir"
        return None

    def completed_step(self) -> int | None:
        """The last step of a run that was completed in this folder; None without one.
        Collective."""
        step = None
        if self.accelerator.is_main_process:
            step = read_entry(self.folder / "summary.json", "step", int)
        return broadcast_object_list([step])[0]

    def start(
        self,
        step: int,
        total_steps: int,
        steps_per_epoch: int,
        metrics_bytes: int = 0,
        record: dict | None = None,
        launch: dict | None = None,
        test_steps: float = 0.0,
    ) -> None:
        """Begin at `step` with the first `metrics_bytes` bytes of metrics.jsonl.

        Later lines are dropped and written again. record, launch: for run.json, what holds for the
        run and for this launch of it. test_steps: a guess of the time of a test, in steps.
        """
        self.started_at, self.logged_at = time.time(), time.perf_counter()
        self.first_step, self.total_steps, self.steps_per_epoch = step, total_steps, steps_per_epoch
        epochs_done = max(step - 1, 0) // steps_per_epoch
        self.tests_left = math.ceil(total_steps / steps_per_epoch) - epochs_done
        self.test_steps = test_steps
        if not self.accelerator.is_main_process:
            return
        path = self.folder / "run.json"
        launches = []
        if step:
            launches = read_entry(path, "launches", list)
            if launches is None:
                show(f"warning: {path} is missing or damaged, and is written anew", "yellow")
                launches = []
        launch = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "from_step": step, **(launch or {})}
        content = {
            **(record or {}),
            "command": sys.argv,
            "total_steps": total_steps,
            "versions": versions(),
            "git_commit": git_commit(),
            "launches": [*launches, launch],
        }
        self.metrics_file = open(self.folder / "metrics.jsonl", "ab")  # noqa: SIM115  until the end
        self._drop_later_lines(metrics_bytes)
        write_json(path, content)  # and flushes the name of metrics.jsonl too
        if sys.stderr.isatty():
            self.bar = tqdm(
                total=total_steps,
                initial=step,
                bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps{postfix}",
                leave=False,
                dynamic_ncols=True,
            )

    def _drop_later_lines(self, metrics_bytes: int) -> None:
        path = self.folder / "metrics.jsonl"
        if path.stat().st_size < metrics_bytes:  # `truncate` would lengthen it
            show(
                f"warning: {path} is shorter than when the checkpoint was saved: lines before step "
                f"{self.first_step + 1} are missing",
                "yellow",
            )
            metrics_bytes = path.read_bytes().rfind(b"\n") + 1
        self.metrics_file.truncate(metrics_bytes)
        self.metrics_file.seek(0, os.SEEK_END)

    def timed(self, batches: Iterable, batches_per_step: int) -> Iterator:
        """The same batches; adds up the time in this loop, and the time spent waiting for data."""
        asked = time.perf_counter()
        for batch in batches:
            self.in_body_since = got = time.perf_counter()
            self.wait_time_s += got - asked
            self.train_time_s += got - asked
            try:
                yield batch
            finally:  # also when the loop is left by break
                asked = time.perf_counter()
                self.train_time_s += asked - got
                self.in_body_since = None
                self.batches += 1
                if self.batches % batches_per_step == 0:
                    self.steps, self.steps_s = self.steps + 1, self.train_time_s
                    self.first_step_s = self.first_step_s or self.steps_s
                    if self.bar is not None and asked > self.drawn_at + 0.1:
                        self.draw_bar(self.first_step + self.steps)

    def speed(self, step: int) -> tuple[float, float]:
        """Seconds of a step, and seconds left of the whole run with its tests, at `step`."""
        step_s = self.steps_s
        if self.steps > 1:  # the first one is slow: it allocates memory, chooses kernels
            step_s = (self.steps_s - self.first_step_s) / (self.steps - 1)
        test_s = self.test_steps * step_s if self.test_s is None else self.test_s
        return step_s, (self.total_steps - step) * step_s + self.tests_left * test_s

    def draw_bar(self, step: int, doing: str = "testing") -> None:
        if self.bar is None:
            return
        step_s, left_s = self.speed(step)
        self.bar.n, self.drawn_at = step, time.perf_counter()
        if step_s:
            rate = f"{1 / step_s:.1f} steps/s" if step_s < 1 else f"{step_s:.1f} s/step"
            doing = doing if self.testing else rate
            self.bar.set_postfix_str(f"{doing}, {clock(left_s)} left", refresh=False)
        self.bar.refresh()

    def show_test(self, step: int, done: int, total: int) -> None:
        """How far a test is: in the bar, or in a log file as a line now and then."""
        if not self.accelerator.is_main_process:
            return
        now = time.perf_counter()
        if self.bar is not None:
            if now > self.drawn_at + 0.1:
                self.draw_bar(step, f"testing {done}/{total}")
        elif now > max(self.test_shown_at, self.logged_at) + TEST_LINE_EVERY_S:
            self.test_shown_at = now
            show(f"test  step {step}/{self.total_steps}  {done} of {total} samples")

    def log(self, split: str, step: int, epoch: int, metrics: dict) -> None:
        """Write one line to metrics.jsonl, the screen and the trackers.

        Everything in a line but samples_per_s and data_wait_pct is a function of the run's
        arguments; these two are timings.
        """
        metrics = {name: value for name, value in metrics.items() if is_number(value)}
        if split == "train":
            now = time.perf_counter()
            train_now = self.train_time_s
            if self.in_body_since is not None:
                train_now += now - self.in_body_since
            train_s, wait_s = (train_now - self.shown_train_s, self.wait_time_s - self.shown_wait_s)
            samples = self.samples - self.shown_samples
            metrics["samples_per_s"] = round(samples / max(train_s, 1e-9), 1)
            metrics["data_wait_pct"] = round(100 * wait_s / max(train_s, 1e-9), 1)
            self.shown_train_s, self.shown_wait_s = train_now, self.wait_time_s
            self.shown_samples = self.samples
        self.accelerator.log({f"{split}/{name}": v for name, v in metrics.items()}, step=step)
        if self.metrics_file is None:
            return
        line = {"split": split, "step": step, "epoch": epoch, **metrics}
        try:
            self.metrics_file.write(json.dumps(line).encode() + b"\n")
            self.metrics_file.flush()
        except OSError as error:
            stop(
                f"{self.folder}/metrics.jsonl cannot be written ({error.strerror}); continue with --resume when it can"
            )
        if metrics.get("data_wait_pct", 10) < 10:  # not worth a look
            del metrics["data_wait_pct"]
        width = 6 + 2 * len(str(self.total_steps))  # the columns stay where they are
        words = [f"{split:<5} epoch {epoch:g}", f"step {step}/{self.total_steps}".ljust(width)]
        words += [show_metric(name, v) for name, v in metrics.items() if name != "samples"]
        if split == "test":
            self.test_s = time.perf_counter() - self.logged_at
            self.tests_left -= 1
        self.logged_at = time.perf_counter()
        ends = step % self.steps_per_epoch == 0 or step == self.total_steps
        self.testing = split == "train" and ends
        if self.bar is None and split == "train" and self.steps:
            words.append(f"eta {clock(self.speed(step)[1])}")
        show("  ".join(words))
        if self.bar is not None and split == "test" and self.tests_left == 0:
            self.close_bar()
        self.draw_bar(step)

    def close_bar(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def metrics_bytes(self) -> int:
        """The length of metrics.jsonl: a checkpoint's place in the file."""
        return 0 if self.metrics_file is None else self.metrics_file.tell()

    def sync(self) -> None:
        """Flush metrics.jsonl to the disk. In any thread."""
        os.fsync(self.metrics_file.fileno())

    def finish(self, step: int, test: dict, title: str, **more) -> None:
        """Write summary.json, with the last `test` metrics and `more`; then draw curves.png."""
        peak_gib = own_peak_memory_gib(self.accelerator.device)
        self.accelerator.end_training()
        if not self.accelerator.is_main_process:
            return
        self.close_bar()
        summary = {
            "step": step,
            **{f"test_{name}": value for name, value in test.items()},
            **more,
            "wall_time_s": round(time.time() - self.started_at, 3),
            "train_time_s": round(self.train_time_s, 3),
            "train_steps_timed": step - self.first_step,
            "samples_per_s": round(self.samples / max(self.train_time_s, 1e-9), 1),
            "peak_memory_gib": round(peak_gib, 3),
        }
        write_json(self.folder / "summary.json", summary)
        plot_curves(self.folder / "metrics.jsonl", self.folder / "curves.png", title)
        shown = [f"test {show_metric(n, v)}" for n, v in test.items() if is_number(v) and n != "samples"]
        result = ", ".join(shown[:3]) or f"{step} steps"
        show(
            f"done: {result} in {summary['train_time_s']:.1f} s of training; model, curves and "
            f"summary in {self.folder}",
            "green",
        )
