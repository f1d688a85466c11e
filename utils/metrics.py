"""Numbers over all processes in which every sample counts once."""

import math

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from utils import stop


class SampleStats:
    """Loss and accuracy over the samples since the last `reduce`, kept on the device: `add` never waits for it."""

    def __init__(self, accelerator: Accelerator, state: dict[str, torch.Tensor] | None = None):
        """state: what another one's `state()` returned, to go on from it."""
        self.accelerator = accelerator
        self.clear()
        if state:
            mine = {name: tensor.to(accelerator.device) for name, tensor in state.items()}
            self.add(mine["losses"], mine["correct"], mine["indices"], mine["steps"])

    def clear(self) -> None:
        self.losses, self.correct, self.indices, self.steps = [], [], [], []

    def add(self, losses: torch.Tensor, correct: torch.Tensor, indices: torch.Tensor, step: int = 0) -> None:
        """losses: float (n,), one a sample; correct: bool (n,); indices: int64 (n,), which samples of the data."""
        self.losses.append(losses.detach())
        self.correct.append(correct)
        self.indices.append(indices)
        self.steps.append(step)

    def reduce(self) -> dict[str, float]:
        """{"loss", "accuracy", "samples"} over all processes, then start again. A collective: call it on all ranks.

        Sums and counts are added up and divided at the end: an average of per-process averages is wrong as soon as one
        process has fewer samples. Raises: SystemExit on all ranks if a loss is not finite, naming its step and samples.
        """
        loss_sum, correct, samples = self._sums()
        self.clear()
        return {"loss": loss_sum / samples, "accuracy": correct / samples, "samples": int(samples)}

    def check(self) -> None:
        """Stop all ranks if a loss since the last `reduce` is not finite, before it gets into a checkpoint."""
        self._sums()

    def _sums(self) -> list[float]:
        device = self.accelerator.device
        wide = torch.float32 if device.type == "mps" else torch.float64  # Apple GPUs have no float64
        mine = torch.zeros(3, dtype=wide, device=device)
        if self.losses:
            losses, correct = torch.cat(self.losses), torch.cat(self.correct)
            mine[0], mine[1], mine[2] = losses.sum(dtype=wide), correct.sum(), len(losses)
        sums = self.accelerator.reduce(mine, "sum").tolist()
        if not math.isfinite(sums[0]):
            self._stop_at_first_bad()
        return sums

    def _stop_at_first_bad(self) -> None:
        bad = []
        if self.losses:
            mine = self.state()
            here = ~mine["losses"].isfinite()
            bad = list(zip(mine["steps"][here].tolist(), mine["indices"][here].tolist(), strict=True))
        bad = gather_object(bad)
        step = min(step for step, _ in bad)
        samples = sorted(sample for at, sample in bad if at == step)
        stop(
            f"the loss is not finite at step {step}, for {len(samples)} samples with these indices in the data: "
            f"{', '.join(map(str, samples[:10]))}{', ...' * (len(samples) > 10)}; the last checkpoint is from before it"
        )

    def state(self) -> dict[str, torch.Tensor]:
        """What this process collected since the last `reduce`, for a checkpoint: one entry a sample in each tensor."""
        if not self.losses:
            return {}
        steps = [torch.as_tensor(step).expand(len(ids)) for step, ids in zip(self.steps, self.indices, strict=True)]
        lists = {"losses": self.losses, "correct": self.correct, "indices": self.indices, "steps": steps}
        return {name: torch.cat(tensors).cpu() for name, tensors in lists.items()}


def gather_predictions(accelerator: Accelerator, predictions: list[torch.Tensor]) -> np.ndarray:
    """Each process's int64 (n,) tensors as one array (N,), n different between processes. A collective.

    Pads to the longest and cuts the padding off again; Accelerate's `gather_for_metrics` needs a loader that it
    prepared itself, and then drops the last samples of the last batch whoever holds them.
    """
    mine = torch.cat(predictions)
    padded = accelerator.pad_across_processes(mine, pad_index=-1)
    everything = accelerator.gather(padded).cpu().numpy()
    return everything[everything >= 0]


def classification_metric(num_classes: int):
    """An `evaluate.Metric` with accuracy, macro F1 and confusion matrix [true][predicted], defined here.

    `evaluate.load("accuracy")` fetches its definition from the Hub and fails where there is no network.
    Macro F1: the mean over classes of 2 tp / (2 tp + fp + fn), 0 for a class that neither occurs nor is predicted.
    """
    import datasets
    import evaluate

    class Classification(evaluate.Metric):
        def _info(self):
            features = datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            )
            return evaluate.MetricInfo(description=classification_metric.__doc__, citation="", features=features)

        def _compute(self, predictions, references):
            pairs = np.asarray(references) * num_classes + np.asarray(predictions)
            confusion = np.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)
            hits, either = np.diag(confusion), confusion.sum(0) + confusion.sum(1)
            return {
                "accuracy": float(hits.sum() / confusion.sum()),
                "f1_macro": float((2 * hits / np.maximum(either, 1)).mean()),
                "confusion": confusion.tolist(),
            }

    return Classification()
