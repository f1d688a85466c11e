"""Which process read which samples."""

import collections
from collections.abc import Iterator

from ..text import plural
from . import Comparison, Finding, note, parts_of, passes_of, step_size


class Samples(Comparison):
    """The samples of each epoch: together those of one process, and each once."""

    def findings(self) -> Iterator[Finding]:
        if not self.facts["loaders"]:
            yield from self._own_batches()
            return
        expected, found = passes_of(self.reference), [passes_of(rank) for rank in self.ranks]
        said = set()
        for (key, number), wanted in expected.items():
            if number > 0 and not self.facts["is_complete"]:
                continue
            parts = [collections.Counter(rank.get((key, number), [])) for rank in found]
            for finding in self._pass(key, collections.Counter(wanted), parts):
                if finding.what not in said:
                    said.add(finding.what)
                    yield finding
        if "samples" not in self.not_compared:
            self.compared.append("samples")

    def _pass(self, key: str, wanted: collections.Counter, parts: list[collections.Counter]) -> Iterator[Finding]:
        loader = self.facts["loaders"].get(key) or self.reference["facts"]["loaders"].get(key, {})
        line, union = loader.get("line", ""), sum(parts, collections.Counter())
        if not union or not wanted:
            self.not_compared["samples"] = "they were not read by a DataLoader that this can follow"
            return
        extra, missing = union - wanted, wanted - union
        if all(part == parts[0] for part in parts) and parts[0].total() >= 0.9 * wanted.total():
            what = f"each of the {self.processes} processes trains on all samples: each counts {self.processes} times"
            yield Finding("all_the_data", "samples", what, 1, line)
            return
        if any(loader.get(fact) for fact in ("is_iterable", "has_own_batches")) and (extra or missing):
            why = "the batches are not made by DataLoader" if loader["has_own_batches"] else "it is an IterableDataset"
            self.not_compared["samples"] = f"{why} ({line})"
            return
        unknown = [digest for digest in extra if digest not in wanted]
        tested = {each for test in self.reference["evaluations"] for some in test["samples"].values() for each in some}
        batch = max((step_size(step) for step in self.reference["steps"]), default=0)
        if leaked := tested.intersection(unknown):
            what = f"{plural(len(leaked), 'sample')} of the evaluation on rank 0 are trained on by other processes"
            yield Finding("split", "samples", what, None, line)
        elif unknown and missing:
            what = f"{plural(len(unknown), 'item')} of {union.total()} are not among those of 1 process"
            yield Finding("items", "samples", what, None, line)
        elif missing and (missing.total() >= batch or not loader.get("drop_last") or self.is_exact):
            what = f"{missing.total()} of {wanted.total()} samples of an epoch are in no process's part"
            yield Finding("samples", "samples", what, None, line)
        elif extra.total() > batch or (extra and self.is_exact):
            what = f"{extra.total()} of {wanted.total()} samples of an epoch count twice"
            yield Finding("samples", "samples", what, None, line)
        elif extra:
            who = "DistributedSampler" if loader.get("sampler") == "DistributedSampler" else "Accelerate"
            what = f"in the last step of an epoch {who} repeats {plural(extra.total(), 'sample')}, so that all "
            yield note("samples", what + "processes have as many: drop_last=True leaves it out", None, line)

    def _own_batches(self) -> Iterator[Finding]:
        self.not_compared["samples and gradients with 1 process"] = "the script draws its own batches"
        for number, steps in enumerate(zip(*(rank["steps"] for rank in self.ranks), strict=False), 1):
            drawn = [[part["digests"] for part in parts_of(step)] for step in steps]
            for rank, batches in enumerate(drawn[1:], 1):
                if any(batch and batch in drawn[0] for batch in batches):
                    what = f"ranks 0 and {rank} draw the same batch: each of its samples counts twice"
                    yield Finding("same_batches", "samples", what, number, steps[0]["micro_batches"][0]["line"])
                    return
