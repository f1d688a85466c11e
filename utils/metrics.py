"""Metrics over all processes in which every sample counts once."""

import math

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from .console import stop
from .randomness import widest_float
from .sampler import virtual_processes

# What a line of metrics.jsonl has beside the metrics.
LINE = {"split", "step", "epoch"}
RESERVED = LINE | {"samples", "lr", "samples_per_s", "data_wait_pct"}


class Metrics:
    """Weighted means of named values over the samples since the last `reduce`.

    The values stay on the device, and `add` never waits for it.

    Args:
        state: what another one's `state()` returned, to continue from.
        all_ranks_add: False if some ranks never call `add`, as in a pipeline, where only the last stage has losses.
        test_after: steps before this test, for the message about a loss that is not finite; None: metrics of the
            training.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        state: dict[str, torch.Tensor] | None = None,
        all_ranks_add: bool = True,
        test_after: int | None = None,
    ):
        self.accelerator, self.all_ranks_add, self.test_after = accelerator, all_ranks_add, test_after
        # One tensor (n,) per call of `add`: "indices", "weights", "steps", and "value:<name>" of each metric.
        self.columns = {name: [tensor.to(accelerator.device)] for name, tensor in (state or {}).items()}

    def names(self) -> list[str]:
        return [name.removeprefix("value:") for name in self.columns if name.startswith("value:")]

    def add(self, batch, *, weights: torch.Tensor | None = None, step: int = 0, **values: torch.Tensor) -> None:
        """Count the samples of a Batch: `add(batch, loss=losses, accuracy=logits.argmax(1) == labels)`.

        Args:
            values: (n,), one per sample, of any number type or bool, or a scalar, their mean: tensors, or what
                torch.as_tensor makes one of; the same names in every call.
            weights: (n,); None: those of the batch, else all samples count alike. A value of weight 0 may be nan, as
                the mean loss of a text without tokens to predict is.
            step: for the message about a loss that is not finite.

        Raises:
            ValueError: naming the metric, if it has a different shape, or a name that is taken.
        """
        if self.columns and set(self.names()) != values.keys():
            now, before = (", ".join(names) or "none" for names in (values, self.names()))
            raise ValueError(f"metrics {now} follow on {before}: name the same ones each time")
        for name in RESERVED & values.keys():
            raise ValueError(f"a metric cannot be named {name}: the names {', '.join(sorted(RESERVED))} are taken")
        weights = batch.weights if weights is None else weights
        weighted = weights is not None
        columns = {"weights": weights if weighted else torch.ones_like(batch.indices)}
        for name, value in values.items():
            value = torch.as_tensor(value, device=self.accelerator.device).detach()
            columns[f"value:{name}"] = value.expand(len(batch)) if value.ndim == 0 else value
        for name, column in columns.items():
            if column.shape != batch.indices.shape:
                raise ValueError(
                    f"{name.replace('value:', 'metric ')} of shape {tuple(column.shape)} for {len(batch)} samples: "
                    f"needs one value per sample, shape ({len(batch)},)"
                )
            if weighted and name != "weights":
                columns[name] = column.masked_fill(weights == 0, 0)
        columns |= {"indices": batch.indices, "steps": torch.full_like(batch.indices, step)}
        for name, column in columns.items():
            self.columns.setdefault(name, []).append(batch.counted(column))

    def reduce(self) -> dict[str, float]:
        """The means by name, and "samples", over all processes; then start again. Collective.

        Sums and weights are added up and divided at the end: an average of per-process averages is wrong as soon as
        one process has fewer samples. A mean over no weight at all is nan.

        Raises:
            SystemExit: on every rank, if a loss is not finite, with its step and samples, or if ranks have metrics of
                different names.
        """
        names, (*sums, weight, samples) = self._sums()
        means = {name: total / weight if weight else math.nan for name, total in zip(names, sums, strict=True)}
        means = {name: means[name] for name in dict.fromkeys([*self.names(), *names])}
        self.columns = {}
        return means | {"samples": int(samples)}

    def check(self) -> None:
        """`reduce` without its result, to stop before a loss that is not finite gets into a checkpoint. Collective."""
        self._sums()

    def _sums(self) -> tuple[list[str], list[float]]:
        """The names; and the weighted sum of each, the sum of the weights, and the samples, over all processes."""
        # Sorted: a checkpoint may have restored them in a different order.
        by_rank = gather_object([sorted(self.names())])
        if self.all_ranks_add and any(names != by_rank[0] for names in by_rank):
            shown = " | ".join(dict.fromkeys(", ".join(names) or "none" for names in by_rank))
            stop(f"the ranks have metrics of different names: {shown}; add the same ones on each")
        names = sorted({name for names in by_rank for name in names})
        columns = [*(f"value:{name}" for name in names), "weights"] if self.columns else []
        columns = [torch.cat(self.columns[column]) for column in columns]
        if virtual_processes(self.accelerator):
            from .parallel.virtual_processes import exact_sums

            sums = exact_sums(self.accelerator, columns, len(names))
        else:
            sums = self.accelerator.reduce(self._own_sums(columns, len(names)), "sum").tolist()
        for name, total in zip(names, sums, strict=False):
            if is_loss(name) and not math.isfinite(total):
                self._stop_at_first_bad(name)
        return names, sums

    def _own_sums(self, columns: list[torch.Tensor], num_values: int) -> torch.Tensor:
        """This process's part of `_sums`, of the values and the weights."""
        dtype = widest_float(self.accelerator.device)
        sums = torch.zeros(num_values + 2, dtype=dtype, device=self.accelerator.device)
        if columns:
            *values, weights = (column.to(dtype) for column in columns)
            # Not `values @ weights`: a dot product adds in a different order on different numbers of threads.
            for position, column in enumerate([*(column * weights for column in values), weights]):
                sums[position] = column.sum()
            sums[-1] = len(weights)
        return sums

    def _stop_at_first_bad(self, name: str) -> None:
        bad = []
        if self.columns:
            mine = self.state()
            here = ~(mine[f"value:{name}"] * mine["weights"]).isfinite()
            bad = list(zip(mine["steps"][here].tolist(), mine["indices"][here].tolist(), strict=True))
        bad = gather_object(bad)
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
        return {name: torch.cat(parts).cpu() for name, parts in self.columns.items()}


def is_loss(name: str) -> bool:
    """Whether a metric is a loss: it must be finite, and less of it is better."""
    return name == "loss" or name.endswith("_loss")
