"""Models that would train something else on each process: what a run of each says, as JSON."""

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import launch
from utils.loader import GlobalLoader
from utils.parallel.batch_norm import BatchNorms
from utils.run import Run


class Codebook(nn.Module):
    """A running mean of its inputs, a new tensor in each step, and a count."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.zeros(8))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, h):
        if self.training:
            self.codes = 0.9 * self.codes + 0.1 * h.detach().mean(0)
            self.steps += 1
        return h - self.codes


class ActNorm(nn.Module):
    """A scale that the first batch sets."""

    def __init__(self):
        super().__init__()
        self.scale, self.is_set = nn.Parameter(torch.ones(8)), False

    def forward(self, h):
        if not self.is_set:
            with torch.no_grad():
                self.scale.copy_(1 / (h.std(0) + 0.1))
            self.is_set = True
        return h * self.scale


class Model(nn.Module):
    """A word's vector, normalised or quantised in some way, and a linear layer."""

    def __init__(self, case: str):
        super().__init__()
        self.case = case
        self.words = nn.Embedding(64, 8, max_norm=0.5 if case == "max_norm" else None)
        self.norm = {
            "batch_norm": nn.BatchNorm1d(8),
            "batch_norm averaged": nn.BatchNorm1d(8),
            "instance_norm": nn.InstanceNorm1d(8, track_running_stats=True),
            "spectral_norm": nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
            "frozen batch_norm": nn.BatchNorm1d(8).eval(),
            "codebook averaged": Codebook(),
            "act_norm": ActNorm(),
        }.get(case, nn.Identity())
        self.out = nn.Linear(8, 1)
        self.register_buffer("codes", torch.zeros(8))
        self.register_buffer("unsaved", torch.zeros(8), persistent=False)
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def train(self, mode: bool = True):
        super().train(mode)
        if self.case == "frozen batch_norm":
            self.norm.eval()
        return self

    def forward(self, x):
        h = self.words(x)
        h = self.norm(h.T[None])[0].T if self.case == "instance_norm" else self.norm(h)
        if self.case == "codebook" and self.training:
            self.codes.lerp_(h.detach().mean(0), 0.1)
        if self.case == "reassigned" and self.training:
            self.codes = 0.9 * self.codes + 0.1 * h.detach().mean(0)
        if self.case == "unsaved" and self.training:
            self.unsaved += 1
        if self.case == "cache" and len(self.cache) == 0:
            self.cache = torch.arange(8.0)
        if self.case == "clipped":
            with torch.no_grad():
                self.out.weight.clamp_(-0.1, 0.1)
        return self.out(h).squeeze(1)


def train(args, case: str) -> None:
    args = argparse.Namespace(**{**vars(args), "output_dir": f"{args.output_dir}/{case.replace(' ', '_')}"})
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)
    data = torch.randint(0, 64, (48,)), torch.randn(48)
    loader = GlobalLoader(TensorDataset(*data), args.batch_size, accelerator, seed=0, drop_last=True)
    model = Model(case)
    rank = accelerator.process_index
    if case in ("thawed", "thawed later"):
        model.out.requires_grad_(False)
    outside = nn.Parameter(torch.ones(1))
    more = [outside] if case in ("outside", "outside, frozen") else []
    outside.requires_grad_(case != "outside, frozen")
    optimizer = torch.optim.SGD([*model.parameters(), *more], 0.1)
    bare = model
    model, optimizer = accelerator.prepare(model, optimizer)
    batch_norms = BatchNorms(model, accelerator, Codebook) if case.endswith("averaged") else None
    if case == "frozen on rank 1" and rank == 1:
        next(model.parameters()).requires_grad_(False)
    if case == "thawed":
        bare.out.requires_grad_(True)
    run.start(loader, None, 6, checkpoint={"model": model, "optimizer": optimizer})
    for epoch in run.epochs():
        model.train()
        if epoch == 1 and case == "thawed later":
            bare.out.requires_grad_(True)
        for batch in run.batches(loader, epoch):
            words, targets = batch.data
            with accelerator.accumulate(model), batch_norms.averaged() if batch_norms else contextlib.nullcontext():
                outputs = (bare if case == "beside" else model)(words)
                losses = (outputs * (outside if case == "outside" else 1) - targets).square()
                accelerator.backward(batch.mean_loss(losses))
                optimizer.step()
                optimizer.zero_grad()
                if case == "changed on rank 1" and rank == 1:
                    with torch.no_grad():
                        next(model.parameters()).mul_(1.1)
            run.log_train(batch, loss=losses)
    run.finish()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--output_dir", default="run")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--virtual_processes", type=int, default=0)
    parser.add_argument("--batch_size", type=int, default=16)
    args = parser.parse_args()
    said = {}
    for case in args.cases:
        text = io.StringIO()
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text), contextlib.suppress(SystemExit):
            train(args, case)
        lines = [line for line in text.getvalue().splitlines() if line.startswith(("warning", "error", "done"))]
        last_step = max([0, *(json.loads(line)["step"] for line in metrics(args.output_dir, case))])
        said[case] = {"said": lines, "last_step": last_step}
    if launch.distributed.is_initialized():
        launch.distributed.barrier()
    if int(launch.os.environ.get("RANK", 0)) == 0:
        print("SAID", json.dumps(said), flush=True)


def metrics(output_dir: str, case: str) -> list[str]:
    file = Path(output_dir) / case.replace(" ", "_") / "metrics.jsonl"
    return file.read_text().splitlines() if file.exists() else []


if __name__ == "__main__":
    main()
