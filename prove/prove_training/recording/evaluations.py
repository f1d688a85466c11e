"""Evaluations: what happens, and what is printed, while no step is made."""

import contextlib
import logging
import sys

from ..records import Evaluation
from ..tensors import rows_of_inputs
from .where import wrap

OF_TRAINING = ("optim", ".step(", ".fit(", "Trainer", ".learn(", ".train(", "backward")  # words of a script that trains
MOST_OUTPUT = 20_000  # characters of an evaluation


class Evaluations:
    """The current evaluation, from its first forward pass to the next training step."""

    def __init__(self, recording):
        self.recording, self.batches = recording, recording.batches
        self.current = None
        self.last_line = ""  # that was printed, and is not empty

    def begin(self, model, inputs: list) -> None:
        """A model is called without gradients."""
        if not self.recording.models.optimizers and not self.recording.where.has(*OF_TRAINING):
            self.recording.stop("the script has no optimizer: it calls a model, and trains none")
        if self.current is None:
            self.current = Evaluation(len(self.recording.steps), self.recording.where.line())
        if id(model) not in self.current.models:
            parameters = [each for each in model.parameters() if not hasattr(each, "full_tensor")]
            self.current.models[id(model)] = sum(float(each.double().sum()) for each in parameters)
        if not self.recording.facts.loaders:
            self.current.inputs += rows_of_inputs(inputs)
        for batch in self.batches.fresh:
            if not batch.is_tested:
                samples = self.current.samples.setdefault(batch.source.key, [])
                samples += batch.digests or []
                batch.is_tested = True  # and may still be trained on, as after the forward pass of a teacher

    def note_draws(self, draws: bool) -> None:
        if self.current is not None:
            self.current.draws = draws or self.current.draws

    def end(self, draws: bool) -> None:
        """The next training step begins."""
        self.note_draws(draws)
        if self.current is not None:
            self.recording.record.evaluations.append(self.current)
            self.current = None

    def said(self, text: str) -> None:
        if self.current is None or self.recording.is_ending:
            return
        if sum(map(len, self.current.said)) < MOST_OUTPUT:
            self.current.said.append(text[:500])

    def in_training_mode(self) -> None:
        """A layer is in training mode without gradients."""
        if self.current is not None:
            self.current.in_training = self.current.in_training or self.current.line

    def add_result(self, result: dict) -> None:
        """Record what Run.log_test was given."""
        if self.current is not None:
            for name, value in result.items():
                with contextlib.suppress(TypeError, ValueError, RuntimeError):
                    self.current.result[name] = float(value)


def install(recording) -> None:
    sys.stdout = Listener(sys.stdout, recording.evaluations)

    @wrap(logging.Logger, "callHandlers")
    def log(original, logger, record):
        with contextlib.suppress(Exception):
            recording.evaluations.said(record.getMessage())
        return original(logger, record)


class Listener:
    """stdout that records lines printed after an evaluation."""

    def __init__(self, stream, evaluations: Evaluations):
        self.stream, self.evaluations, self.rest = stream, evaluations, ""

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        *lines, self.rest = (self.rest + text[:MOST_OUTPUT]).split("\n")
        self.rest = self.rest[-MOST_OUTPUT:]
        for line in lines:
            if line.strip():
                self.evaluations.last_line = line.strip()[:200]
                self.evaluations.said(line)
        return self.stream.write(text)
