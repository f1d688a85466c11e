"""The transformer beside a plain loop.

    python benchmarks/transformer.py

scripts/transformer.py against the same model, batches, optimizer and clipping in a loop of PyTorch alone, in one
process with one thread, in turns. Both are the time from one optimizer step to the next: processor time, which other
programs on the machine change least, and tokens per second of the clock. Then the script on one and on two processes of
one thread each, with the same 32 sequences per step.
"""

import argparse
import functools
import itertools
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from scripts import transformer
from utils.datasets.text import EOS, PackedText, learn_tokenizer, load_text

CONTEXT, BATCH, DDP_BATCH = 128, 8, 32
MODEL = {"dim": 128, "layers": 4, "heads": 4}


def parse_args():
    parser = common.make_parser(__doc__, rounds=5, worker=True)
    parser.add_argument("--steps", type=common.positive_int, default=30, help="of a turn, 3 or more (%(default)s)")
    parser.add_argument("--dataset", default="stdlib", help="as in transformer.py (%(default)s)")
    parser.add_argument("--tokenizer", help=argparse.SUPPRESS)  # of a --worker
    return parser.parse_args()


class Steps:
    """The times at which AdamW steps. The optimizer must be made inside: a scheduler takes hold of its method."""

    def __enter__(self):
        self.times, step = [], torch.optim.AdamW.step

        @functools.wraps(step)
        def recorded(*args, **kwargs):
            self.times.append((time.process_time(), time.perf_counter()))
            return step(*args, **kwargs)

        self.patch = mock.patch.object(torch.optim.AdamW, "step", recorded)
        self.patch.start()
        return self

    def __exit__(self, *_):
        self.patch.stop()

    def medians(self) -> tuple[float, float]:
        """Seconds of a step: of the processor, and of the clock. Without the first one, which allocates."""
        times = self.times[1:]
        pairs = [(b[0] - a[0], b[1] - a[1]) for a, b in itertools.pairwise(times)]
        return tuple(statistics.median(each) for each in zip(*pairs, strict=True))


def plain_loop(data, tokenizer, steps: int) -> None:
    torch.manual_seed(0)
    model = transformer.Transformer(tokenizer.get_vocab_size(), **MODEL, eos=tokenizer.token_to_id(EOS))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, 3e-3, betas=(0.9, 0.95), fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: transformer.lr_factor(step, steps))
    tokens, targets = data.tensors
    order = torch.randperm(len(tokens))
    for rows in order.split(BATCH)[:steps]:
        losses = model(tokens[rows], targets[rows])
        losses.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def run_script(args, batch_size: int) -> tuple[float, float]:
    words = ["--dataset", args.dataset, "--tokenizer", args.tokenizer, "--max_steps", args.steps]
    words += ["--batch_size", batch_size, "--num_tokens", 1, "--log_every", 10]
    with common.threads(1), Steps() as recorded:
        common.run_script("transformer", *words)
    return recorded.medians()


def measure(args) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        args.tokenizer = str(Path(folder) / "tokenizer.json")  # so that no run learns one
        texts, _ = load_text(args.dataset)
        tokenizer = learn_tokenizer(texts, 1024)
        tokenizer.save(args.tokenizer)
        data = PackedText(texts, tokenizer, CONTEXT)

        def run_plain_loop():
            with common.threads(1), Steps() as recorded:
                plain_loop(data, tokenizer, args.steps)
            return recorded.medians()

        def launch(config):
            flags = ["--steps", args.steps, "--dataset", args.dataset, "--tokenizer", args.tokenizer]
            return common.launch_workers(config, __file__, *flags)

        loop = {"transformer.py": lambda: run_script(args, BATCH), "plain loop": run_plain_loop}
        processes = {"one process": lambda: launch("cpu"), "two processes": lambda: launch("cpu_ddp")}
        return {
            "loop": common.take_turns(loop, args.rounds),
            "processes": common.take_turns(processes, math.ceil(args.rounds / 2)),
        }


def report(measured) -> common.Report:
    processor = {way: [each[0] for each in turns] for way, turns in measured["loop"].items()}
    speed = {way: [BATCH * CONTEXT / each[1] for each in turns] for way, turns in measured["loop"].items()}
    scaling = {way: [DDP_BATCH * CONTEXT / each[1] for each in turns] for way, turns in measured["processes"].items()}
    tables = [
        common.compare(processor, "processor time of a step, s", "plain loop", "{:.4f}"),
        common.compare(speed, "tokens/s", "plain loop", "{:,.0f}"),
        common.compare(scaling, "tokens/s", "one process", "{:,.0f}"),
    ]
    middles, speeds = common.medians(processor), common.medians(scaling)
    share = middles["transformer.py"] / middles["plain loop"]
    gain = speeds["two processes"] / speeds["one process"]
    goals = [
        common.Goal("transformer.py, processor time of a step / plain loop's", share, 1.05),
        common.Goal("transformer.py, tokens/s on two processes / on one", gain, 1.85, at_least=True),
    ]
    bars = [common.Bars("transformer, processor time of a step, s", middles, format="{:.3f}")]
    return common.Report(tables, bars, goals)


if __name__ == "__main__":
    args = parse_args()
    if args.worker:
        common.finish_worker(args.worker, run_script(args, DDP_BATCH))
    else:
        common.main(args, measure, report)
