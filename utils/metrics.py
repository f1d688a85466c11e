"""Metrics over all processes in which every sample counts once."""

import math

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from .console import stop
from .randomness import widest_float

# The other keys of a line in metrics.jsonl.
RESERVED = {"split", "step", "epoch", "samples", "lr", "samples_per_s", "data_wait_pct"}
COLUMNS = ("value", "weight", "index", "step")


class Metrics:
    """Weighted means of named values over the samples since the last `reduce`.

    The values stay on the device, and `add` never waits for it. Each metric has its own samples and weights, so steps
    and ranks may add different metrics.

    Args:
        state: what another one's `state()` returned, to continue from.
        test_after: steps before this test, for the message about a loss that is not finite; None: metrics of the
            training.
    """

    def __init__(
        self, accelerator: Accelerator, state: dict[str, torch.Tensor] | None = None, test_after: int | None = None
    ):
        self.accelerator, self.test_after = accelerator, test_after
        self.ones = torch.ones(1, dtype=widest_float(accelerator.device), device=accelerator.device)
        self.samples, self.last_indices = 0, None
        # By metric, COLUMNS for each call of `add`: (n,) each; a weight may be None, and a step an int.
        self.rows: dict[str, list[dict]] = {}
        for key, tensor in (state or {}).items():
            column, _, name = key.partition(":")
            if column == "samples":
                self.samples = int(tensor.sum())
            else:
                self.rows.setdefault(name, [{}])[0][column] = tensor.to(accelerator.device)

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
        loss_weights = batch.weights if weights is None else weights
        columns = {} if weights is None else {"weights": weights}
        for name, value in values.items():
            value = torch.as_tensor(value, device=self.accelerator.device).detach()
            columns[f"metric {name}"] = value.expand(len(batch)) if value.ndim == 0 else value
        for name, column in columns.items():
            if column.shape != batch.indices.shape:
                raise ValueError(
                    f"{name} of shape {tuple(column.shape)} for {len(batch)} samples: needs one value per sample, "
                    f"shape ({len(batch)},)"
                )
        indices = batch.counted(batch.indices)
        for name in values:
            rows = self.rows.setdefault(name, [])
            if rows and rows[-1]["index"] is indices:
                raise ValueError(f"metric {name} is added twice for one batch")
            value, weight = columns[f"metric {name}"], loss_weights if is_loss(name) else weights
            weight = None if weight is None else batch.counted(weight)
            rows.append({"value": batch.counted(value), "weight": weight, "index": indices, "step": step})
        if batch.indices is not self.last_indices:
            self.samples += len(indices)
        self.last_indices = batch.indices

    def reduce(self) -> dict[str, float]:
        """The means by name, losses first, and "samples", over all processes; then start again. Collective.

        Sums and weights are added up and divided at the end: an average of per-process averages is wrong as soon as
        one process has fewer samples. If the weights add up to 0, the mean is nan. A loss that is not finite
        stops the run.
        """
        sums = self._sums()
        samples, _ = sums.pop("samples")
        self.rows, self.samples, self.last_indices = {}, 0, None
        means = {name: total / weight if weight else math.nan for name, (total, weight) in sums.items()}
        return means | {"samples": int(samples)}

    def check(self) -> None:
        """`reduce` without its result, to stop before a loss that is not finite gets into a checkpoint. Collective."""
        self._sums()

    def _sums(self) -> dict[str, tuple[float, float]]:
        """By metric and for "samples": the weighted sum and the sum of the weights, over all processes."""
        by_rank = gather_object([list(self.rows)])
        # In a pipeline, only the last stage has losses.
        if self.accelerator.layout.split_batch and [] in by_rank and any(by_rank):
            stop(f"rank {by_rank.index([])} added no metrics and others did: add them on every rank")
        # Sorted: a checkpoint may have restored them in a different order.
        names = sorted({name for names in by_rank for name in names}, key=lambda name: (not is_loss(name), name))
        columns = [self._columns(name) for name in names] + [(self.ones * self.samples, self.ones)]
        if self.accelerator.layout.virtual_processes:
            from .parallel.virtual_processes import exact_sums

            sums = exact_sums(self.accelerator, columns)
        else:
            # Not `values @ weights`: a dot product adds in a different order on different numbers of threads.
            own = [terms.sum() for values, weights in columns for terms in (values * weights, weights)]
            sums = self.accelerator.reduce(torch.stack(own), "sum").tolist()
        sums = dict(zip([*names, "samples"], zip(sums[::2], sums[1::2], strict=True), strict=True))
        for name in names:
            if is_loss(name) and not math.isfinite(sums[name][0]):
                self._stop_at_first_bad(name)
        return sums

    def _columns(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """This process's values of a metric, 0 where they have no weight, and their weights; (N,) each."""
        rows = self.rows.get(name, [])
        values = torch.cat([row["value"] for row in rows] or [self.ones[:0]]).to(self.ones)
        if all(row["weight"] is None for row in rows):
            return values, self.ones.expand(len(values))
        weights = [torch.ones_like(row["index"]) if row["weight"] is None else row["weight"] for row in rows]
        weights = torch.cat(weights).to(self.ones)
        return values.masked_fill(weights == 0, 0), weights

    def _stop_at_first_bad(self, name: str) -> None:
        mine = self.state()
        value, weight, indices, steps = (mine.get(f"{column}:{name}", torch.zeros(0)) for column in COLUMNS)
        here = ~(value * weight).isfinite()
        bad = gather_object(list(zip(steps[here].tolist(), indices[here].tolist(), strict=True)))
        step = min(step for step, _ in bad)
        samples = sorted(sample for at, sample in bad if at == step)
        when = f"at step {step}" if self.test_after is None else f"in the test after step {self.test_after}"
        shown = ", ".join(map(str, samples[:10])) + ", ..." * (len(samples) > 10)
        stop(
            f"the {name} is not finite {when}, for {len(samples)} samples with these indices in the data: {shown}; "
            "the last checkpoint is from before it"
        )

    def state(self) -> dict[str, torch.Tensor]:
        """What this process collected since the last `reduce`, for a checkpoint: tensors with one entry per sample."""
        state = {"samples": torch.tensor([self.samples])} if self.samples else {}
        for name, rows in self.rows.items():
            steps = [torch.as_tensor(row["step"]).expand(row["index"].shape).cpu() for row in rows]
            columns = [*self._columns(name), torch.cat([row["index"] for row in rows]), torch.cat(steps)]
            state |= {f"{column}:{name}": part.cpu() for column, part in zip(COLUMNS, columns, strict=True)}
        return state


def is_loss(name: str) -> bool:
    """Whether a metric is a loss: it must be finite, less of it is better, and the batch's weights are its own."""
    return name == "loss" or name.endswith("_loss")
