"""A bar on a terminal, below the lines of a run."""

import time

from tqdm import tqdm

DRAW_EVERY_S = 0.1


class ProgressBar:
    """The steps of a run.

    Args:
        step: steps done so far.
    """

    def __init__(self, step: int, total_steps: int):
        self.drawn_at = 0.0
        self.bar = tqdm(
            total=total_steps,
            initial=step,
            bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} steps{postfix}",
            leave=False,
            dynamic_ncols=True,
        )

    def is_due(self) -> bool:
        return time.perf_counter() > self.drawn_at + DRAW_EVERY_S

    def draw(self, step: int, text: str) -> None:
        """text: after the number of steps."""
        self.bar.n, self.drawn_at = step, time.perf_counter()
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.refresh()

    def close(self) -> None:
        self.bar.close()
