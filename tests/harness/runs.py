"""Runs of scripts, made in one launch per topology when a test first looks at one of them: the fixture `runs`.

one, two = runs("my_script", *FLAGS), runs("my_script", *FLAGS, on=("cpu_ddp",))
again = runs("my_script", *FLAGS, on=("cpu_ddp",), resumes=two, at=3)
assert two.differs_from(one) < 1e-10
assert again.bits == two.bits
"""

from pathlib import Path

import run_many
import run_reader
from same_numbers import largest_difference


class Run:
    """A run that is made when its folder is first asked for."""

    def __init__(self, make, name: str, on: tuple, words: list, resumes: "Run | None"):
        self.make, self.name, self.on, self.words, self.resumes = make, name, on, words, resumes

    @property
    def folder(self) -> Path:
        return self.make(self)

    @property
    def bits(self) -> dict[str, str]:
        return run_reader.final_models(self.folder)

    def differs_from(self, other: "Run") -> float:
        return largest_difference(other.folder, self.folder)


class Runs:
    """Makes and launches the runs of a module's tests."""

    def __init__(self, launcher):
        self.launcher, self.waiting, self.count = launcher, {}, 0

    def __call__(self, script, *flags, on=("cpu",), resumes: Run | None = None, at: int | None = None) -> Run:
        """A run to come.

        Args:
            script: as in `run_many.path_of`.
            flags: of the script; run_many.py explains --float64.
            on: the config, and flags of `accelerate launch`.
            resumes: it goes on with this run, asked for before, as killed just after its checkpoint of step `at`.
        """
        self.count += 1
        name = f"run_{self.count}"
        back = ["--back_to", resumes.name, at, name] if resumes else []
        words = ["--script", run_many.path_of(script), *back, *flags, *["--resume"] * bool(resumes)]
        run = Run(self.make, name, tuple(on), [*words, "--output_dir", name], resumes)
        self.waiting.setdefault(run.on, []).append(run)
        return run

    def make(self, run: Run) -> Path:
        """The folder of a run, after one launch of all that wait for its topology, unless it is there."""
        if run in self.waiting.get(run.on, ()):
            asked = self.waiting.pop(run.on)
            for other in asked:
                if other.resumes:
                    self.make(other.resumes)
            config, *launch_flags = run.on
            words = run_many.words("mlp", *(each.words for each in asked))
            self.launcher(config, *words, script=run_many.FILE, launch_flags=launch_flags, timeout=400)
        return self.launcher.folder / run.name
