"""Learning rates."""

from collections.abc import Iterator

from . import Comparison, Finding, close, note
from .single import Single


class Rates(Comparison):
    """The learning rates of each group: the same in each step."""

    def findings(self, number: int, wanted: dict, steps: tuple[dict, ...]) -> Iterator[Finding]:
        for rank, step in enumerate(steps):
            for group, (rate, expected) in enumerate(zip(step["rates"], wanted["rates"], strict=False)):
                is_longer = step["schedule_calls"] > wanted["schedule_calls"] and not self.is_exact
                low, high = self._allowed(number, group, is_longer)
                if low <= rate <= high:
                    continue
                if self._is_scaled(rank, group) and not self.is_exact:
                    what = f"{self.processes} times as high on {self.processes} processes: right only where the batch "
                    yield note("learning rate", what + "of a step grows with them", None, step["line"])
                    continue
                place = f"group {group} " if group else ""
                what = f"{place}{rate:.4g} on rank {rank} instead of {expected:.4g}"
                if (factor := self._faster(number, group)) is not None:
                    what += f": the schedule is {factor} times too fast"
                yield Finding("schedule", "learning rate", what, number, step["line"])
                return
        if number > 1:
            self.compared.append("learning rates")

    def _rates_of(self, record: dict, group: int) -> list[float]:
        return [step["rates"][group] for step in record["steps"] if len(step["rates"]) > group]

    def _allowed(self, number: int, group: int, is_stepped_by_accelerate: bool) -> tuple[float, float]:
        """Between which numbers the learning rate of a step must be."""
        rates = self._rates_of(self.reference, group)
        expected = rates[number - 1]
        if not is_stepped_by_accelerate:
            slack = 1e-6 * abs(expected)
            return expected - slack, expected + slack
        # Accelerate steps a schedule once for each process, through about as many times more batches.
        around, slack = 1 + number // 6, 0.02 * max(rates)
        slope = rates[-1] - rates[-2] if len(rates) > 1 else 0.0
        longer = rates + [rates[-1] + slope * more for more in range(1, around + 1)]
        near = longer[max(0, number - 1 - around) : number + around]
        return min(near) - slack, max(near) + slack

    def _is_scaled(self, rank: int, group: int) -> bool:
        """Whether the learning rate of each step is multiplied by the number of processes."""
        rates, expected = self._rates_of(self.ranks[rank], group), self._rates_of(self.reference, group)
        if not expected[0]:  # a warm-up from 0 is doubled by a schedule that steps twice as often
            return False
        return all(close(rate, self.processes * wanted, 1e-6) for rate, wanted in zip(rates, expected, strict=False))

    def _faster(self, number: int, group: int) -> int | None:
        """How many times too fast the schedule is in this step and the next."""
        rates, found = self._rates_of(self.reference, group), self._rates_of(self.ranks[0], group)
        for factor in dict.fromkeys((self.processes, Single(self.reference).usual_micro_batches(), 2, 3, 4)):
            places = [at for at in (number - 1, number) if at < len(found) and at * factor < len(rates)]
            if factor > 1 and len(places) == 2 and all(close(found[at], rates[at * factor], 0.02) for at in places):
                return factor
        return None
