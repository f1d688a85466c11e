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
        state: what another one's `state()` returned, to go on from it.
        all_ranks_add: False if some ranks never call `add`, as in a pipeline, where only the last stage has losses.
        test_after: optimizer steps before a test, for the message about a loss that is not finite; None: these
            are metrics of the training.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        state: dict[str, torch.Tensor] | None = None,
        all_ranks_add: bool = True,
        test_after: int | None = None,
    ):
        self.accelerator, self.all_ranks_add, self.test_after = accelerator, all_ranks_add, test_after
        self.clear()
        if state:
            state = {name: [tensor.to(accelerator.device)] for name, tensor in state.items()}
            self.indices, self.weights, self.steps = state["indices"], state["weights"], state["steps"]
            self.values = {name[6:]: parts for name, parts in state.items() if name.startswith("value:")}

    def clear(self) -> None:
        self.values, self.indices, self.weights, self.steps = {}, [], [], []

    def add(self, batch, *, weights: torch.Tensor | None = None, step: int = 0, **values: torch.Tensor) -> None:
        """Count the samples of a Batch: `add(batch, loss=losses, accuracy=logits.argmax(1) == labels)`.

        Args:
            values: (n,), one per sample, of any number type or bool, or a scalar, their mean: tensors, or what
                torch.as_tensor makes one of; the same names in every call.
            weights: (n,); None: those of the batch, else all samples count alike. What has the weight 0 does not count
                even if it is nan, as the mean loss of a text without tokens to predict.
            step: for the message about a loss that is not finite.

        Raises:
            ValueError: naming the metric, if it has a different shape, or a name that is taken.
        """
        if self.indices and self.values.keys() != values.keys():
            now, before = (", ".join(names) or "none" for names in (values, self.values))
            raise ValueError(f"metrics {now} follow on {before}: name the same ones each time")
        for name in RESERVED & values.keys():
            raise ValueError(f"a metric cannot be named {name}: the names {', '.join(sorted(RESERVED))} are taken")
        weights = batch.weights if weights is None else weights
        if weights is not None:
            check_shape("weights have", weights, batch)
            weights = batch.counted(weights)
        values = {name: torch.as_tensor(value, device=self.accelerator.device) for name, value in values.items()}
        values = {name: value.expand(len(batch)) if value.ndim == 0 else value for name, value in values.items()}
        for name, value in values.items():
            check_shape(f"metric {name} has", value, batch)
        for name, value in values.items():
            value = batch.counted(value.detach())
            self.values.setdefault(name, []).append(value if weights is None else value.masked_fill(weights == 0, 0))
        self.weights.append(weights)  # None: all samples count alike
        self.indices.append(batch.counted(batch.indices))
        self.steps.append(step)

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
        means = {name: means[name] for name in dict.fromkeys([*self.values, *names])}
        self.clear()
        return means | {"samples": int(samples)}

    def check(self) -> None:
        """`reduce` without its result, to stop before a loss that is not finite gets into a checkpoint. Collective."""
        self._sums()

    def _sums(self) -> tuple[list[str], list[float]]:
        """The names; and the weighted sum of each, the sum of the weights, and the samples, over all processes."""
        names = self._names()
        if virtual_processes(self.accelerator):
            columns = [*(self.values[name] for name in names), self._known_weights()] if self.indices else []
            columns = [torch.cat(parts) for parts in columns]
            from .parallel.virtual_processes import exact_sums

            sums = exact_sums(self.accelerator, columns, len(names))
        else:
            sums = self.accelerator.reduce(self._own_sums(names), "sum").tolist()
        for name, total in zip(names, sums, strict=False):
            if is_loss(name) and not math.isfinite(total):
                self._stop_at_first_bad(name)
        return names, sums

    def _names(self) -> list[str]:
        """The names of all ranks, sorted: a checkpoint may have restored them in a different order. Collective.

        Raises: SystemExit on every rank, if ranks have metrics of different names: their sums would be mixed up.
        """
        by_rank = gather_object([sorted(self.values)])
        if self.all_ranks_add and any(names != by_rank[0] for names in by_rank):
            shown = " | ".join(dict.fromkeys(", ".join(names) or "none" for names in by_rank))
            stop(f"the ranks have metrics of different names: {shown}; add the same ones on each")
        return sorted({name for names in by_rank for name in names})

    def _own_sums(self, names: list[str]) -> torch.Tensor:
        """This process's part of `_sums`."""
        dtype = widest_float(self.accelerator.device)
        sums = torch.zeros(len(names) + 2, dtype=dtype, device=self.accelerator.device)
        if self.indices:
            sums[-2:] = sum(map(len, self.indices))
            columns = [torch.cat(self.values[name]).to(dtype) for name in names]
            if any(weights is not None for weights in self.weights):
                weights = torch.cat(self._known_weights()).to(dtype)
                sums[-2] = weights.sum()
                # Not `values @ weights`: a dot product adds in another order on other numbers of threads.
                columns = [values * weights for values in columns]
            for column, values in enumerate(columns):
                sums[column] = values.sum()
        return sums

    def _known_weights(self) -> list[torch.Tensor]:
        pairs = zip(self.weights, self.indices, strict=True)
        return [torch.ones_like(indices) if weights is None else weights for weights, indices in pairs]

    def _stop_at_first_bad(self, name: str) -> None:
        bad = []
        if self.indices:
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
        if not self.indices:
            return {}
        steps = [
            torch.as_tensor(step).expand(len(indices)) for step, indices in zip(self.steps, self.indices, strict=True)
        ]
        lists = {"indices": self.indices, "weights": self._known_weights(), "steps": steps}
        lists |= {f"value:{name}": parts for name, parts in self.values.items()}
        return {name: torch.cat([part.cpu() for part in parts]) for name, parts in lists.items()}


def check_shape(what: str, values: torch.Tensor, batch) -> None:
    if values.shape != batch.indices.shape:
        raise ValueError(
            f"the {what} the shape {tuple(values.shape)} for {len(batch)} samples: one value per sample, "
            f"shape ({len(batch)},), is needed"
        )


def is_loss(name: str) -> bool:
    """Whether a metric is a loss: it must be finite, and less of it is better."""
    return name == "loss" or name.endswith("_loss")
