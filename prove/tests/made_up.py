"""Records of a correct run, which tests change in one place."""

from dataclasses import replace

import torch

from prove_training.recording import Recording
from prove_training.records import Draw, Evaluation, Facts, Loader, MicroBatch, Part, Pass, Plan, Record, Save, Step
from prove_training.stages import Comparison, Finding, several, single
from prove_training.tensors import sampled


def made_recording(tmp_path, **plan) -> Recording:
    rank = plan.pop("rank", 0)
    return Recording(Plan(13, output=str(tmp_path), **plan), rank)


def made_up(processes: int = 1, steps: int = 4) -> list[Record]:
    """The records of a correct run: samples 0 to 5 in step 1, 6 to 11 in step 2 and so on."""
    ranks = []
    for rank in range(processes):
        loader = Loader("train.py:5", given=6, length=24, items=24, sampler="RandomSampler", shuffles=True)
        facts = Facts(loaders={"loader": loader}, optimizers=["SGD"], schedules=1, ddp=["train.py:7"])
        facts.group, facts.is_complete = "train.py:3", True
        record = Record(rank, facts, [made_up_step(number, rank, processes) for number in range(steps)])
        record.passes = [Pass("loader", 0, in_training=True, batches=4, is_whole=True)]
        record.weights = dict.fromkeys(range(steps + 1), "weights.pt")
        record.initial, record.final = {"weight": sampled(torch.ones(3))}, {"weight": sampled(torch.ones(3))}
        ranks.append(record)
    return ranks


def made_up_step(number: int, rank: int, processes: int) -> Step:
    samples = [str(6 * number + index) for index in range(rank, 6, processes)]
    gradient = {"weight": sampled(torch.tensor([1.0, 2.0, 3.0]) + number)}
    losses = [(1.0, len(samples), "train.py:8")]
    micro = MicroBatch([Part("loader", 0, samples)], losses, syncs=True, line="train.py:9")
    step = Step("train.py:10", [micro], gradients=gradient, at_step=dict(gradient), schedule_calls=number)
    step.rates, step.bases, step.options, step.modes = [0.1 * 0.8**number], [0.1], ["lr"], {0: True}
    step.before = {"weight": sampled(torch.ones(3))}
    step.weights = {"weight": sampled(torch.ones(3) - 0.1 * gradient["weight"][1:])}
    return step


def found(reference: Record, ranks: list[Record]) -> list[Finding]:
    return [*single.findings(reference), *several.findings(Comparison(reference, ranks))]


def scale(entries: dict, factor: float) -> None:
    entries["weight"] = entries["weight"] * factor


def add(entries: dict, values: list[float]) -> None:
    entries["weight"] = sampled(entries["weight"][1:] + torch.tensor(values))


def every_step(records: list[Record], **changes) -> None:
    for record in records:
        for step in record.steps:
            vars(step).update(changes)


def drawn(digest: str, **others) -> list[Draw]:
    return [Draw("train.py:8", "randn", digest, 3, is_per_sample=True, **others)]


def save_state(**others) -> Save:
    return Save("save_state", 2, "last", "train.py:9", **others)


def evaluation(after: int = 2, **others) -> Evaluation:
    return Evaluation(after, "train.py:20", {"test": ["a", "b"]}, models={1: 0.5}, **others)


def accumulated(counts: list[int], weight: float = 0.5) -> Record:
    """The record of one process whose steps have these numbers of micro-batches, each with samples of its own."""
    (record,) = made_up(steps=len(counts))
    record.facts.loaders["loader"].length = 27  # five batches, of which one is left
    samples = iter(range(100))
    for step, count in zip(record.steps, counts, strict=True):
        micro = replace(step.micro_batches[0], losses=[(weight, 6, "train.py:8")])
        step.micro_batches = [replace(micro, samples=[Part("loader", 0, [str(next(samples))])]) for _ in range(count)]
    return record


def digests_of(rank: Record, step: int) -> Part:
    return rank.steps[step].micro_batches[0].samples[0]
