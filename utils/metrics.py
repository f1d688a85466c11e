"""Metrics over all processes in which every sample counts once."""

import itertools
import math

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from .console import plural, stop
from .randomness import widest_float

# The other keys of a line in metrics.jsonl.
RESERVED = {"split", "step", "epoch", "samples", "lr", "samples_per_s", "data_wait_pct"}
MOST_ROWS = 512  # before they are added up


class Metrics:
    """Weighted means of named values over the samples since the last `reduce`.

    The values stay on the device, where they are added up per micro-batch, and `add` never waits for it. These sums are
    added exactly, so it does not matter which process has which micro-batch. Each metric has its own samples and
    weights, so steps and ranks may add different metrics.

    Args:
        saved: what another one's `state()` returned, to continue from.
        test_after: steps before this test, for the message about a loss that is not finite; None: metrics of the
            training.
    """

    def __init__(self, accelerator: Accelerator, saved: dict | None = None, test_after: int | None = None):
        self.accelerator, self.test_after = accelerator, test_after
        self._begin(saved or {"samples": 0, "sums": {}})

    def _begin(self, saved: dict) -> None:
        self.saved, self.samples, self.last_indices = saved, 0, None
        self.last_batches: dict[str, torch.Tensor] = {}  # by metric, the indices of the last batch that has it
        # Of a micro-batch and a metric: values, their weights if any, the samples' indices, (n,) each; (name, step).
        self.rows: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, tuple[str, int]]] = []
        # Of rows that are added up: (name, step) of each; (4, rows): the weighted sum, the sum of the weights, how many
        # values are not finite, and the index of one of them.
        self.sums: list[tuple[list[tuple[str, int]], torch.Tensor]] = []

    def add(self, batch, *, weights: torch.Tensor | None = None, step: int = 0, **values: torch.Tensor) -> None:
        """Count the samples of a Batch: `add(batch, loss=losses, accuracy=logits.argmax(1) == labels)`.

        Args:
            values: one value per sample, shape (n,), or a scalar that is their mean. Anything torch.as_tensor accepts.
                A further call for the same batch adds further metrics.
            weights: (n,), of all these values, such as `batch.weights`. None: a loss (see `is_loss`) has the batch's
                weights, if there are any; in other metrics all samples count equally. A value of weight 0 may be nan,
                as the mean loss of a text without tokens to predict is.
            step: for the message about a loss that is not finite.

        Raises:
            ValueError: naming the metric, if it has a different shape, a name that is taken, or a value for this batch.
        """
        for name in RESERVED & values.keys():
            raise ValueError(f"a metric cannot be named {name}: the names {', '.join(sorted(RESERVED))} are taken")
        rows, indices = [], batch.counted(batch.indices)
        for name, value in values.items():
            value = torch.as_tensor(value, device=self.accelerator.device).detach()
            value = value.expand(len(batch)) if value.ndim == 0 else value
            weight = batch.weights if weights is None and is_loss(name) else weights
            for column in (value, weight):
                if column is not None and column.shape != batch.indices.shape:
                    raise ValueError(
                        f"{f'metric {name}' if column is value else 'weights'} of shape {tuple(column.shape)} for "
                        f"{len(batch)} samples: needs one value per sample, shape ({len(batch)},)"
                    )
            if self.last_batches.get(name) is batch.indices:
                raise ValueError(f"metric {name} is added twice for one batch")
            rows.append((value, weight, indices, (name, step)))
        self.last_batches |= dict.fromkeys(values, batch.indices)
        self.rows += [] if batch.is_stand_in else rows
        self.samples += len(indices) if batch.indices is not self.last_indices else 0
        self.last_indices = batch.indices
        if len(self.rows) >= MOST_ROWS:
            self._add_up()

    def _add_up(self) -> None:
        """Add up each row, many at a time, without waiting for the device."""
        rows_by_kind: dict[tuple, list] = {}
        for row in self.rows:
            kind = row[0].shape, row[0].dtype, getattr(row[1], "dtype", None)
            rows_by_kind.setdefault(kind, []).append(row)
        self.rows = []
        for rows in rows_by_kind.values():
            values, weights, indices, keys = zip(*rows, strict=True)
            values = torch.stack(values).to(widest_float(self.accelerator.device))
            if weights[0] is None:
                weights = torch.full_like(values[:, 0], values.shape[1])
            else:
                weights = torch.stack(weights).to(values)
                values = (values * weights).masked_fill(weights == 0, 0)
                weights = sum_rows_pairwise(weights)
            is_bad = values * 0 != 0  # on CPUs 10 times faster than isfinite
            bad = is_bad.sum(1), torch.where(is_bad, torch.stack(indices), -1).amax(1)
            self.sums.append((keys, torch.stack([sum_rows_pairwise(values), weights, *bad])))

    def reduce(self) -> dict[str, float]:
        """The means by name, losses first, and "samples", over all processes; then start again. Collective.

        Sums and weights are added up and divided at the end: an average of per-process averages is wrong as soon as
        one process has fewer samples. If the weights add up to 0, the mean is nan. A loss that is not finite
        stops the run.
        """
        sums, samples = self._over_processes()
        self._begin({"samples": 0, "sums": {}})
        pairs = {name: [*map(math.fsum, pair)] for name, pair in sums.items()}
        means = {name: total / weight if weight else math.nan for name, (total, weight) in pairs.items()}
        return means | {"samples": samples}

    def state(self) -> dict:
        """The sums over all processes since the last `reduce`, as JSON, the same on all of them. Collective.

        A loss that is not finite stops the run, before it gets into a checkpoint.
        """
        sums, samples = self._over_processes()
        # As strings: nan, which is not equal to itself, would make two copies of a checkpoint different.
        sums = {name: [[*map(repr, parts)] for parts in pair] for name, pair in sums.items()}
        return {"samples": samples, "sums": sums}

    def _over_processes(self) -> tuple[dict[str, list[list[float]]], int]:
        """By metric, the weighted sum and the sum of the weights, by `exact_sum`; and the number of samples."""
        own, bad = self._own_sums()
        by_rank = gather_object([(own, self.samples, bad)])
        self._stop_if_bad([found for *_, bad in by_rank for found in bad])
        everyone = [sums for sums, _, _ in by_rank]
        # In a pipeline, only the last stage has losses.
        if self.accelerator.layout.split_batch and {} in everyone and any(everyone):
            stop(f"rank {everyone.index({})} added no metrics and others did: add them on every rank")
        samples = self.saved["samples"] + sum(samples for _, samples, _ in by_rank)
        return add_sums([*everyone, self.saved["sums"]]), samples

    def _own_sums(self) -> tuple[dict[str, list[list[float]]], list[tuple[str, int, int, int]]]:
        """The sums of this process, and the losses that are not finite, for `_stop_if_bad`."""
        self._add_up()
        keys = [key for keys, _ in self.sums for key in keys]
        columns = torch.cat([sums for _, sums in self.sums], dim=1).T.tolist() if keys else []  # waits for the device
        own, bad = {name: ([], []) for name in self.last_batches}, []
        for (name, step), (value, weight, num_bad, sample) in zip(keys, columns, strict=True):
            own[name][0].append(value)
            own[name][1].append(weight)
            if num_bad and is_loss(name):
                bad.append((step, name, int(num_bad), int(sample)))
        return {name: [*map(exact_sum, pair)] for name, pair in own.items()}, bad

    def _stop_if_bad(self, bad: list[tuple[int, str, int, int]]) -> None:
        """bad: the step, the loss, how many samples and the index of one, of each micro-batch that has some."""
        if not bad:
            return
        first_step, loss, *_ = min(bad)
        of_step = [row for step, name, *row in bad if (step, name) == (first_step, loss)]
        count, samples = sum(n for n, _ in of_step), sorted(sample for _, sample in of_step)[:10]
        shown = ", ".join(map(str, samples)) + ", ..." * (count > len(samples))
        when = f"in step {first_step}" if self.test_after is None else f"in the test after step {self.test_after}"
        stop(
            f"the {loss} is not finite {when}, for {plural(count, 'sample')} with these indices in the data: {shown}; "
            "the last checkpoint is from before it"
        )


def add_sums(everyone: list[dict]) -> dict[str, list[list[float]]]:
    """Add the sums of processes by metric, losses first; a number may be a string."""
    names = sorted({name for sums in everyone for name in sums}, key=lambda name: (not is_loss(name), name))
    total = {}
    for name in names:
        pairs = zip(*(sums[name] for sums in everyone if name in sums), strict=True)
        total[name] = [exact_sum([*map(float, itertools.chain(*parts))]) for parts in pairs]
    return total


def exact_sum(terms: list[float]) -> list[float]:
    """The exact sum, as the sum of a few floats: the sum rounded to a float, then the rest, and so on.

    So it depends neither on the order of the terms nor on sums of some of them by this function.
    """
    if not math.isfinite(total := sum(terms)):
        return [total]
    parts = []
    while rest := math.fsum([*terms, *(-part for part in parts)]):
        parts.append(rest)
    return parts


def sum_rows_pairwise(terms: torch.Tensor) -> torch.Tensor:
    """The sum of each row of `terms` (rows, columns), which it overwrites: (rows,).

    Halves are added elementwise: in torch.sum, strides decide the order of additions, and on GPUs the shape.
    """
    while terms.shape[1] > 1:
        terms, right = terms.tensor_split(2, dim=1)
        terms[:, : right.shape[1]].add_(right)
    return terms[:, 0]


def is_loss(name: str) -> bool:
    """Whether a metric is a loss: it must be finite, less of it is better, and the batch's weights are its own."""
    return name == "loss" or name.endswith("_loss")
