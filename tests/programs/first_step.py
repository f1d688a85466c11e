"""Loops and models that would train something else on another topology, and right ones: what a run of each says, as
JSON."""

import argparse
import contextlib
import io
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import launch
from utils.loader import GlobalLoader
from utils.parallel.batch_norm import BatchNorms
from utils.parallel.fsdp import shard
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


class Container:
    """Something with a state that is no object of torch: a moving average, or what saves other objects."""

    def __init__(self, parts=()):
        self.parts, self.updates = parts, 0

    def state_dict(self):
        copies = [parameter.detach().clone() for part in self.parts for parameter in part.parameters()]
        return {"updates": self.updates, "parameters": copies}

    def load_state_dict(self, state):
        raise NotImplementedError


class Model(nn.Module):
    """A word's vector, normalised or quantised in some way, and a linear layer."""

    def __init__(self, case: str, rank: int):
        super().__init__()
        self.case, self.rank, self.calls = case, rank, 0
        if case == "picks":
            self.layers = nn.ModuleList(nn.Linear(110, 110) for _ in range(2))  # each of a size that FSDP shards alone
        self.words = nn.Embedding(64, 8, max_norm=0.5 if case == "max_norm" else None)
        self.norm = {
            "batch_norm": nn.BatchNorm1d(8),
            "average, batch_norm averaged": nn.BatchNorm1d(8),
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
        self.calls += self.training
        if self.case == "picks":
            h = h + self.layers[self.rank % 2](h.repeat(1, 14)[:, :110])[:, :8]
        h = self.norm(h)
        is_changed = self.case == "codebook, compiled" or (self.case == "late" and self.calls > 3)
        if is_changed and self.training:
            self.codes.lerp_(h.detach().mean(0), 0.1)
        if self.case == "unsaved" and self.training:
            self.unsaved += 1
        if self.case == "growing cache" and len(self.cache) < x.max():
            self.cache = torch.arange(float(x.max()))
        return self.out(h).squeeze(1)


def train(args, case: str) -> None:
    args = argparse.Namespace(**{**vars(args), "output_dir": f"{args.output_dir}/{case.replace(' ', '_')}"})
    accelerator = launch.make_accelerator(args, cpu_threads=1, find_unused_parameters=case == "picks")
    run = Run(accelerator, args)
    data = torch.randint(0, 64, (48,)), torch.randn(48)
    loader = GlobalLoader(TensorDataset(*data), args.batch_size, accelerator, seed=0, drop_last=True)
    rank = accelerator.process_index
    model = Model(case, rank)
    if case == "weights of the first half" and rank < accelerator.num_processes // 2:  # one replica of HSDP
        model.words.weight.data.mul_(2)
    if case == "thawed later":
        model.out.requires_grad_(False)
    outside = nn.Parameter(torch.ones(1))
    more = [outside] if case == "outside" else []
    momentum = 0.9 if "optimizer" in case or case == "in an object" else 0.0
    optimizer = torch.optim.SGD([*model.parameters(), *more], 0.1, momentum)
    bare, average = model, AveragedModel(model) if case.startswith("average") else None
    if case == "codebook, compiled":
        model.compile(backend="eager")
    if case == "raw optimizer":
        model = accelerator.prepare(model)
    else:
        model, optimizer = accelerator.prepare(model, optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step) if "schedule" in case else None
    if case == "schedule":
        schedule = accelerator.prepare(schedule)
    batch_norms = BatchNorms(model, accelerator, Codebook) if case.endswith("averaged") else None
    if case == "frozen on rank 1" and rank == 1:
        next(model.parameters()).requires_grad_(False)
    checkpoint = {"model": model, "optimizer": optimizer}
    checkpoint |= {"schedule": schedule} if schedule else {}
    if average:
        shard(accelerator, average.module)
        checkpoint["average"] = average
    own = Container()
    checkpoint |= {"own": own} if case.startswith("own average") else {}
    if case == "reference":  # the only way to shard a model that does not train
        accelerator.prepare_model(nn.Linear(8, 8).requires_grad_(False), evaluation_mode=True)
    other = (
        accelerator.prepare(nn.Linear(8, 8)) if case in ("forgotten model", "in one module", "in an object") else None
    )
    if case == "in one module":
        checkpoint = {"both": nn.ModuleDict({"model": model, "other": other}), "optimizer": optimizer}
    if case == "in an object":
        checkpoint = {"all": Container([model, other])}
    if case == "optimizer forgotten":
        del checkpoint["optimizer"]
    if case == "optimizer left out":
        checkpoint["optimizer"] = None
    run.start(loader, None, 6, checkpoint=checkpoint)
    for epoch in run.epochs():
        model.train()
        if epoch == 1 and case == "thawed later":
            bare.out.requires_grad_(True)
        if case.endswith("in steps"):
            for batches in run.steps(loader, epoch):
                for batch in run.seeded(batches):
                    losses = micro_batch(case, accelerator, model, bare, optimizer, None, None, batch, outside)
                    run.log_train(batch, loss=losses)
            continue
        for batch in run.batches(loader, epoch):
            losses = micro_batch(case, accelerator, model, bare, optimizer, schedule, batch_norms, batch, outside)
            if average and (case == "average, each time" or accelerator.sync_gradients):
                average.n_averaged += 1
                with torch.no_grad():
                    for mean, parameter in zip(average.module.parameters(), bare.parameters(), strict=True):
                        mean.lerp_(parameter, 0.1)
                    for mean, buffer in zip(average.module.buffers(), bare.buffers(), strict=True):
                        mean.copy_(buffer)
            own.updates += case == "own average, each time" or accelerator.sync_gradients
            run.log_train(batch, loss=losses)
    run.finish()


def micro_batch(case, accelerator, model, bare, optimizer, schedule, batch_norms, batch, outside):
    """One micro-batch of the loop; returns its losses."""
    words, targets = batch.data
    with accelerator.accumulate(model), batch_norms.averaged() if batch_norms else contextlib.nullcontext():
        if case == "clears first":
            optimizer.zero_grad()
        noise = [torch.full_like(p, 0.01) for p in bare.parameters()] if case == "noise, put back" else []
        before = [parameter.detach().clone() for parameter in bare.parameters()] if noise else []
        with torch.no_grad():
            for parameter, number in zip(bare.parameters(), noise, strict=False):
                parameter.add_(number)
        outputs = (bare if case == "beside" else model)(words)
        losses = (outputs * (outside if case == "outside" else 1) - targets).square()
        loss = losses.mean() if case == "plain mean" else batch.mean_loss(losses)
        if case == "loss.backward":
            loss.backward()
        elif case != "no backward" and not (case == "some without backward" and batch.micro_step == 0):
            accelerator.backward(loss)
        with torch.no_grad():
            for parameter, value in zip(bare.parameters(), before, strict=False):
                parameter.copy_(value)
        if case == "clips each time" or (case == "clips" and accelerator.sync_gradients):
            accelerator.clip_grad_norm_(bare.parameters(), 0.01)
        if case == "logs norms":
            accelerator.clip_grad_norm_(bare.parameters(), 1e9)
        optimizer.step()
        if schedule:
            schedule.step()
        if case not in ("clears first", "never clears"):
            optimizer.zero_grad()
        if case == "model.zero_grad in steps":
            bare.zero_grad()
        if case == "changed on rank 1" and accelerator.process_index == 1 and accelerator.sync_gradients:
            with torch.no_grad():
                next(model.parameters()).mul_(1.1)
    if case == "changed by a method":
        with torch.no_grad():
            bare.codes.add_(losses.mean())
    return losses


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
