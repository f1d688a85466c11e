"""Random numbers that the training loop draws, such as the noise of a diffusion model.

Where a draw has one row for each sample of a batch, each row becomes numbers of its sample: they depend on the digest
of the sample and on how many draws came before, and not on the number of processes. So gradients can be compared. A
single number for a whole batch, such as a coin, is that of the step.
"""

import torch

from ..records import Draw
from ..tensors import digest
from .same_work import generator_states
from .where import wrap

IN_PLACE = ("normal_", "uniform_", "random_", "bernoulli_", "exponential_")
FILLS = {"rand": "uniform_", "randn": "normal_", "randint": "random_", "bernoulli": "bernoulli_", "normal": "normal_"}
FILLS |= {f"{name}_like": FILLS[name] for name in ("rand", "randn", "randint")}
Generator = torch.Generator  # before a GPU is pretended


class Noise:
    """Records the draws of a script after its first batch, and repeats those that are drawn by sample."""

    def __init__(self, recording):
        self.recording, self.batches = recording, recording.batches
        self.is_repeating = False

    def draw(self, original, name: str, args: tuple, kwargs: dict):
        """Call a function of torch that draws random numbers."""
        recording, batches = self.recording, self.batches
        current = batches.used + batches.fresh
        known = batches.used_before + current
        if self.is_repeating or batches.is_reading or recording.facts.is_exact or not known:
            return original(*args, **kwargs)
        state = digest((kwargs.get("generator") or torch.default_generator).get_state())
        was_expected = batches.expected_draws == generator_states()
        numbers = original(*args, **kwargs)
        if type(numbers) is not torch.Tensor or not numbers.ndim or numbers.is_complex():
            return numbers
        of_samples = [batch for batch in known if len(batch.digests or ()) == len(numbers)]
        if current or of_samples:
            draw = Draw(recording.where.line(), name, state, len(numbers), bool(of_samples))
            draw.in_model = recording.models.depth > 0
            recording.step.drawn.append(draw)
        is_of_batch = current and numbers.numel() == 1 and recording.facts.loaders  # without, it may choose the samples
        if of_samples or is_of_batch:
            draw.is_repeated, batch = True, (of_samples or current)[-1]
            number = batch.draws.setdefault(state, len(batch.draws))  # also if it is made again for the backward pass
            owners = batch.digests if of_samples else [len(recording.steps)]
            self._repeat(name, numbers, [[owner, number] for owner in owners], args, kwargs)
            if was_expected:
                batches.expect_draws()
        return numbers

    def _repeat(self, name: str, numbers: torch.Tensor, seeds: list[list], args: tuple, kwargs: dict) -> None:
        """Replace each row by numbers that are drawn with its seed."""
        self.is_repeating, generator = True, Generator()
        with torch.no_grad():
            for row, seed in enumerate(seeds):
                generator.manual_seed(int(digest(seed)[:15], 16))
                numbers[row] = row_of(name, numbers, row, args, kwargs, generator)
        self.is_repeating = False


def row_of(name: str, numbers: torch.Tensor, row: int, args: tuple, kwargs: dict, generator) -> torch.Tensor:
    """One row of what a function of torch draws with these arguments, drawn with another generator."""

    def of_row(value):
        return value.broadcast_to(numbers.shape)[row] if isinstance(value, torch.Tensor) and value.ndim else value

    def argument(position: int, word: str, default):
        return of_row(kwargs.get(word, args[position] if len(args) > position else default))

    made = torch.empty(numbers.shape[1:], dtype=numbers.dtype)
    if name in IN_PLACE:
        options = {word: of_row(value) for word, value in kwargs.items()}
        return getattr(made, name)(*map(of_row, args[1:]), **options | {"generator": generator})
    fill = getattr(made, FILLS[name])
    if name.startswith("randint"):
        bounds = [value for value in args if isinstance(value, int)]
        bounds += [kwargs[word] for word in ("low", "high") if word in kwargs]
        return fill(*[0, *bounds][-2:], generator=generator)
    if name == "bernoulli":
        return fill(argument(1, "p", args[0] if args else kwargs["input"]), generator=generator)
    fill(generator=generator)
    return made * argument(1, "std", 1.0) + argument(0, "mean", 0.0) if name == "normal" else made


def install(recording) -> None:
    noise = Noise(recording)
    for name in (*FILLS, *IN_PLACE):

        @wrap(torch.Tensor if name in IN_PLACE else torch, name)
        def draw(original, *args, name=name, **kwargs):
            return noise.draw(original, name, args, kwargs)
