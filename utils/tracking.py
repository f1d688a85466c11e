"""What a run leaves in its folder, and what it shows while it runs. Only the main process writes and prints."""

import argparse
import atexit
import contextlib
import datetime
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout
from tqdm import tqdm

from utils import show, stop

FORMATS = {
    "loss": "loss {:.4f}",
    "accuracy": "accuracy {:.2%}",
    "top5_accuracy": "top-5 {:.2%}",
    "ema_accuracy": "EMA's accuracy {:.2%}",
    "ema_top5_accuracy": "top-5 {:.2%}",
    "lr": "lr {:.2e}",
    "images_per_s": "{:,.0f} images/s",
    "data_wait_pct": "{:.0f}% waiting for data",
}


def write(path: Path, save: Callable[[Path], object]) -> None:
    """Save under another name first: a reader sees the old file or the new one, never half of one.

    Raises: SystemExit, in one sentence, if the disk is full, or away.
    """
    part = path.with_name(f".part_{path.name}")
    try:
        save(part)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        stop(f"{path} cannot be written: {error.strerror or error}")


def write_json(path: Path, content: dict) -> None:
    text = json.dumps(content, indent=2)
    text = re.sub(r"\[[\d\s,]+\]", lambda row: " ".join(row[0].split()), text)  # a row of numbers on one line
    write(path, lambda part: part.write_text(text + "\n"))


def remove_if_unused(folder: Path) -> None:
    """A run that ended before it began, by a wrong --dataset for instance, leaves no folder behind."""
    if folder.is_dir() and os.listdir(folder) == [".lock"]:
        shutil.rmtree(folder)


def peak_memory_gib(device: torch.device) -> float:
    """What this process took at most: on a GPU its tensors, else all of it."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    if sys.platform == "linux":  # getrusage begins with what the launcher took before it became this process
        return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30  # in bytes on macOS


def clock(seconds: float) -> str:
    return str(datetime.timedelta(seconds=round(seconds)))


def versions() -> dict[str, str]:
    from importlib.metadata import version

    packages = ("torch", "torchvision", "accelerate", "datasets", "evaluate", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def git_commit() -> str | None:
    """The commit of the code, with "+" behind it if files were changed since; None outside a checkout."""
    here = Path(__file__).parent

    def git(*words):
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else None

    try:
        commit = git("rev-parse", "HEAD")
        return commit and commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except OSError:  # no git here
        return None


class Tracker:
    """run.json, metrics.jsonl, summary.json, curves.png, and the lines on the screen."""

    def __init__(self, accelerator: Accelerator, args: argparse.Namespace):
        """Claim `args.output_dir` for this run: make it, try to write to it, lock it. A collective.

        The lock is held until the process ends, and the kernel takes it back after a `kill -9` too.
        Raises: SystemExit on all ranks, in one sentence, if the folder holds a run and `args.resume` is off, if
        another process writes to it, or if it cannot be written to.
        """
        self.accelerator, self.args = accelerator, args
        self.folder = Path(args.output_dir)
        self.metrics_file = self.bar = self.in_body_since = None
        self.train_time_s = self.wait_time_s = self.shown_train_s = self.shown_wait_s = 0.0
        self.images = self.batches = self.updates = 0
        self.first_update_s = self.updates_s = self.drawn_at = 0.0
        self.test_s, self.testing = None, False
        problem = broadcast_object_list([self._claim() if accelerator.is_main_process else None])[0]
        if problem:
            stop(problem)

    def _claim(self) -> str | None:
        try:
            if not self.folder.exists():
                atexit.register(remove_if_unused, self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(self.folder / ".lock")
            self.lock.acquire(timeout=10 if self.args.resume else 0)  # a run told to stop may still be saving
            probe = self.folder / ".probe"
            probe.write_text("")
            probe.unlink()
        except Timeout:
            return f"another run is writing to {self.folder}: wait for it, or take another --output_dir"
        except OSError as error:
            return f"--output_dir {self.folder} cannot be written to: {error.strerror}"
        if not self.args.resume and (self.folder / "run.json").exists():
            way_out = "" if self.args.resume is None else "add --resume to go on with it, or "  # None: no such flag
            return f"{self.folder} already holds a run: {way_out}take another --output_dir"
        return None

    def is_complete(self) -> bool:
        """Whether this run was finished before. A collective."""
        return broadcast_object_list([(self.folder / "summary.json").exists()])[0]

    def start(
        self, step: int, total_steps: int, steps_per_epoch: int, metrics_bytes: int, topology: dict, data: dict
    ) -> None:
        """Begin at `step`, with the first `metrics_bytes` of metrics.jsonl: what is behind them comes once more.

        topology and data go to run.json.
        """
        self.started_at, self.logged_at = time.time(), time.perf_counter()
        self.first_step, self.total_steps, self.steps_per_epoch = step, total_steps, steps_per_epoch
        self.tests_left = -(-total_steps // steps_per_epoch) - max(step - 1, 0) // steps_per_epoch
        self.test_updates = data.get("test", 0) / self.args.batch_size / 3  # a forward pass is a third of an update
        if self.args.log_with:
            config = {name: value for name, value in vars(self.args).items() if isinstance(value, (int, float, str))}
            self.accelerator.init_trackers("run", config=config)
        if not self.accelerator.is_main_process:
            return
        path = self.folder / "run.json"
        launches = json.loads(path.read_text())["launches"] if step else []
        launch = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "from_step": step, **topology}
        write_json(
            path,
            {
                "arguments": vars(self.args),
                "command": sys.argv,
                "total_steps": self.total_steps,
                "data": data,
                "versions": versions(),
                "git_commit": git_commit(),
                "launches": [*launches, launch],
            },
        )
        self.metrics_file = open(self.folder / "metrics.jsonl", "ab")  # noqa: SIM115  open as long as the run
        self.metrics_file.truncate(metrics_bytes)
        if sys.stderr.isatty():
            layout = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} updates{postfix}"
            self.bar = tqdm(total=total_steps, initial=step, bar_format=layout, leave=False, dynamic_ncols=True)

    def timed(self, batches: Iterable, per_update: int | None = None) -> Iterator:
        """The same batches, with the time in this loop and the time spent waiting for a batch added up.

        per_update: how many of them make one update; None: the accumulation steps.
        """
        per_update = per_update or self.accelerator.gradient_accumulation_steps
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
                if self.batches % per_update == 0:
                    self.updates, self.updates_s = self.updates + 1, self.train_time_s
                    self.first_update_s = self.first_update_s or self.updates_s
                    if self.bar is not None and asked > self.drawn_at + 0.1:
                        self.draw_bar(self.first_step + self.updates)

    def speed(self, step: int) -> tuple[float, float]:
        """Seconds of an update, and those that are left of the whole run with its evaluations, at `step`."""
        update_s = self.updates_s
        if self.updates > 1:  # the first one is slow: memory is allocated, kernels are chosen or compiled
            update_s = (self.updates_s - self.first_update_s) / (self.updates - 1)
        test_s = self.test_updates * update_s if self.test_s is None else self.test_s
        return update_s, (self.total_steps - step) * update_s + self.tests_left * test_s

    def draw_bar(self, step: int) -> None:
        if self.bar is None:
            return
        update_s, left_s = self.speed(step)
        self.bar.n, self.drawn_at = step, time.perf_counter()
        if update_s:
            rate = f"{1 / update_s:.1f} updates/s" if update_s < 1 else f"{update_s:.1f} s/update"
            doing = "testing" if self.testing else rate
            self.bar.set_postfix_str(f"{doing}, {clock(left_s)} left", refresh=False)
        self.bar.refresh()

    def log(self, split: str, step: int, epoch: int, metrics: dict) -> None:
        """One line to metrics.jsonl, the screen and the trackers. Takes `samples` of train metrics for images/s."""
        metrics = dict(metrics)
        samples = metrics.pop("samples", 0)
        if split == "train":
            # Losses and accuracies are a function of the run's arguments; from here on stand the times.
            now = time.perf_counter()
            train_now = self.train_time_s + (now - self.in_body_since if self.in_body_since else 0.0)
            train_s, wait_s = train_now - self.shown_train_s, self.wait_time_s - self.shown_wait_s
            metrics["images_per_s"] = round(samples / max(train_s, 1e-9), 1)
            metrics["data_wait_pct"] = round(100 * wait_s / max(train_s, 1e-9), 1)
            self.shown_train_s, self.shown_wait_s = train_now, self.wait_time_s
            self.images += samples
        self.accelerator.log({f"{split}/{name}": value for name, value in metrics.items()}, step=step)
        if self.metrics_file is None:
            return
        line = {"split": split, "step": step, "epoch": epoch, **metrics}
        try:
            self.metrics_file.write(json.dumps(line).encode() + b"\n")
            self.metrics_file.flush()
        except OSError as error:
            stop(f"{self.folder}/metrics.jsonl cannot be written ({error.strerror}); --resume goes on when it can")
        if metrics.get("data_wait_pct", 10) < 10:  # not worth a look
            del metrics["data_wait_pct"]
        width = 6 + 2 * len(str(self.total_steps))  # the columns stay where they are
        words = [f"{split:<5} epoch {epoch:g}", f"step {step}/{self.total_steps}".ljust(width)]
        words += [FORMATS.get(name, name + " {:.4g}").format(value) for name, value in metrics.items()]
        if split == "test":
            self.test_s, self.tests_left = time.perf_counter() - self.logged_at, self.tests_left - 1
        self.logged_at = time.perf_counter()
        self.testing = split == "train" and (step % self.steps_per_epoch == 0 or step == self.total_steps)
        if self.bar is None and split == "train" and self.updates:
            words.append(f"eta {clock(self.speed(step)[1])}")
        show("  ".join(words))
        if self.bar is not None and split == "test" and self.tests_left == 0:
            self.bar.close()
            self.bar = None
        self.draw_bar(step)

    def metrics_bytes(self) -> int:
        """The length of metrics.jsonl, safe on the disk: a checkpoint holds it as its place in the file."""
        if self.metrics_file is None:
            return 0
        os.fsync(self.metrics_file.fileno())
        return self.metrics_file.tell()

    def finish(self, step: int, test: dict, **more) -> None:
        """summary.json, with the last `test` metrics and `more`, and curves.png."""
        peak = peak_memory_gib(self.accelerator.device)
        self.accelerator.end_training()
        if not self.accelerator.is_main_process:
            return
        summary = {
            "step": step,
            **{f"test_{name}": value for name, value in test.items()},
            **more,
            "wall_time_s": round(time.time() - self.started_at, 3),
            "train_time_s": round(self.train_time_s, 3),
            "train_steps_timed": step - self.first_step,
            "images_per_s": round(self.images / max(self.train_time_s, 1e-9), 1),
            "peak_memory_gib": round(peak, 3),
        }
        title = f"{self.folder.name}: {step} updates of {self.args.batch_size} images"
        plot_curves(self.folder / "metrics.jsonl", self.folder / "curves.png", title)
        write_json(self.folder / "summary.json", summary)
        show(
            f"done: test loss {test['loss']:.4f}, test accuracy {test['accuracy']:.2%} in "
            f"{summary['train_time_s']:.1f} s of training; model, curves and summary in {self.folder}",
            "green",
        )


def plot_curves(metrics_file: Path, picture: Path, title: str = "") -> None:
    """Loss and accuracy of metrics.jsonl over the steps, as a PNG."""
    from matplotlib.figure import Figure  # not pyplot, which looks for a screen and a font cache of its own
    from matplotlib.ticker import LogLocator, NullLocator, PercentFormatter

    lines = [json.loads(line) for line in metrics_file.read_text().splitlines()]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, name, shown in zip(figure.subplots(1, 2), ("loss", "accuracy"), ("{:.3g}", "{:.2%}"), strict=True):
        for split, style in (("train", {"color": "#0072b2"}), ("test", {"color": "#d55e00", "marker": "o"})):
            points = [(line["step"], line[name]) for line in lines if line["split"] == split]
            if points:
                label = f"{split}, at the end {shown.format(points[-1][1])}"
                axes.plot(*zip(*points, strict=True), label=label, **style)
        axes.set(xlabel="step (optimizer updates)", ylabel=name)
        axes.grid(alpha=0.3)
        axes.legend()
    losses, accuracies = figure.axes
    losses.set_yscale("log")
    losses.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    losses.yaxis.set_major_formatter("{x:g}")
    losses.yaxis.set_minor_locator(NullLocator())
    accuracies.yaxis.set_major_formatter(PercentFormatter(1))
    figure.suptitle(title)
    write(picture, lambda part: figure.savefig(part, dpi=120))


def plot_confusion(confusion: list[list[int]], classes: list[str], picture: Path) -> None:
    """A confusion matrix, counts by [true][predicted], as a PNG: shares of each true class; with counts up to 30."""
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    shares = [[count / max(sum(row), 1) for count in row] for row in confusion]
    side = min(12, 3 + 0.4 * len(classes))
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    norm = PowerNorm(0.4, 0, 1)  # so that a mistake of a few percent can be seen beside what is right
    figure.colorbar(axes.imshow(shares, cmap="Blues", norm=norm), label="share of the true class", shrink=0.8)
    right, all_of_them = sum(row[i] for i, row in enumerate(confusion)), max(sum(map(sum, confusion)), 1)
    title = f"{picture.parent.name}\n{right} of {all_of_them} right, {right / all_of_them:.2%}"
    axes.set(xlabel="predicted", ylabel="true", title=title)
    if len(classes) <= 30:
        names = [name[:20] for name in classes]
        axes.set_xticks(range(len(names)), names, rotation=90 if max(map(len, names)) > 2 else 0)
        axes.set_yticks(range(len(names)), names)
        for row, counts in enumerate(confusion):
            for column, count in enumerate(counts):
                if count:
                    color = "white" if norm(shares[row][column]) > 0.5 else "black"
                    axes.text(column, row, count, ha="center", va="center", color=color, fontsize=8)
    write(picture, lambda part: figure.savefig(part, dpi=120))


def plot_images(images: list, titles: list[str], picture: Path) -> None:
    """A grid of images, each array (H, W, 3) with a title above, as a PNG."""
    from matplotlib.figure import Figure

    columns = 6
    rows = -(-len(images) // columns)
    figure = Figure(figsize=(2 * columns, 2.3 * rows), layout="constrained")
    for axes in figure.subplots(rows, columns, squeeze=False).flat:
        axes.axis("off")
    for axes, image, title in zip(figure.axes, images, titles, strict=False):
        axes.imshow(image)
        axes.set_title(title, fontsize=8)
    figure.suptitle(f"{picture.parent.name}: {picture.stem.replace('_', ' ')}")
    write(picture, lambda part: figure.savefig(part, dpi=120))
