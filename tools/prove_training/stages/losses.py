"""With which weight each loss enters the gradient."""

from collections.abc import Iterator

from . import Comparison, Finding, close, note, size
from .single import Single


class Losses(Comparison):
    """The weights of single losses: the same for all samples, or tokens, of a step."""

    def weights(self, steps: tuple[dict, ...]) -> list[float]:
        """With which weight one loss of each micro-batch of each process enters the gradient."""
        found = []
        for rank, step in zip(self.ranks, steps, strict=True):
            weights = Single(rank).weights(step)
            if weights is None:
                return []
            for micro, (weight, count, _) in zip(step["micro_batches"], weights, strict=True):
                is_stand_in = any(part["digests"] == [] for part in micro["samples"])
                found += [weight / count] if count and not is_stand_in else []
        return found

    def are_unequal(self, steps: tuple[dict, ...]) -> bool:
        weights = self.weights(steps)
        return bool(weights) and not close(min(weights), max(weights))

    def findings(self, number: int, steps: tuple[dict, ...]) -> Iterator[Finding]:
        if not self.are_unequal(steps):
            return
        sizes = {samples for step in steps for micro in step["micro_batches"] if (samples := size(micro))}
        weights = self.weights(steps)
        if len(sizes) == 1:
            what = (
                f"a token of one micro-batch weighs {max(weights) / min(weights):.3g} times one of another: each has "
            )
            what += "the mean over its own number of tokens"
            yield Finding("token_weights", "loss weights", what, number, steps[0]["micro_batches"][0]["line"])
        else:
            line = steps[0]["micro_batches"][0]["line"]
            what = "in the last step of an epoch a sample of the smaller micro-batch weighs "
            what += f"{max(weights) / min(weights):.3g} times one of the larger: a mean of means"
            if self.is_exact:
                yield Finding("mean_of_means", "loss weights", what, number, line)
            else:
                yield note("loss weights", what, None, line)
