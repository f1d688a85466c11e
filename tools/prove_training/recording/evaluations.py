"""Evaluations: what happens and is said between two steps in which nothing is trained."""

import contextlib
import logging
import sys

from .where import wrap

MOST_OUTPUT = 20_000  # characters of an evaluation
MOST_PRINTED = 1_000_000  # of the whole run


class Evaluations:
    """The evaluation that is going on, from its first forward pass to the next training step, and those before."""

    def __init__(self, recording):
        self.recording, self.batches = recording, recording.batches
        self.found, self.current = [], None

    def begin(self) -> None:
        """A model is called without gradients."""
        if self.current is None:
            self.current = {"after": len(self.recording.steps), "line": self.recording.where.line(), "samples": {}}
            self.current |= {"collectives": [], "said": [], "draws": False, "result": {}, "in_training": ""}
        for batch in self.batches.fresh:
            if not batch["is_tested"]:
                samples = self.current["samples"].setdefault(batch["pass"]["key"], [])
                samples += batch["digests"] or []
                batch["is_tested"] = True  # and may still be trained on, as where a teacher looks at it first

    def note_draws(self) -> None:
        if self.current is not None:
            self.current["draws"] = self.batches.draws() or self.current["draws"]

    def end(self) -> None:
        """The next training step begins."""
        if self.current is not None:
            self.note_draws()
            self.found.append(self.current)
            self.current = None

    def said(self, text: str) -> None:
        if self.current is None or self.recording.is_ending:
            return
        if sum(map(len, self.current["said"])) < MOST_OUTPUT:
            self.current["said"].append(text[:500])

    def in_training_mode(self) -> None:
        """A layer that behaves otherwise in training does so now."""
        if self.current is not None:
            self.current["in_training"] = self.current["in_training"] or self.current["line"]

    def add_result(self, result: dict) -> None:
        """Numbers that Run.log_test was given."""
        if self.current is not None:
            for name, value in result.items():
                with contextlib.suppress(TypeError, ValueError, RuntimeError):
                    self.current["result"][name] = float(value)

    def result(self) -> tuple[dict, dict]:
        return {}, {"evaluations": self.found}

    def install(self) -> None:
        sys.stdout = Listener(sys.stdout, self)

        @wrap(logging.Logger, "callHandlers")
        def log(original, logger, record):
            with contextlib.suppress(Exception):
                self.said(record.getMessage())
            return original(logger, record)


class Listener:
    """stdout, of which the lines after an evaluation are noted; more than a megabyte is not kept."""

    def __init__(self, stream, evaluations: Evaluations):
        self.stream, self.evaluations, self.rest, self.left = stream, evaluations, "", MOST_PRINTED

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + text[:MOST_OUTPUT]).split("\n")
        self.rest = self.rest[-MOST_OUTPUT:]
        for line in lines:
            if line.strip():
                self.evaluations.said(line)
        if self.left > 0:
            self.left -= len(text)
            self.stream.write(text[: self.left])
        return len(text)
