"""A Trainer class of one's own: accumulation with no_sync, clipping, EMA of the loss, checkpoints, --resume."""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


class Sequences(Dataset):
    """Next-token prediction; -100 marks what does not count."""

    def __init__(self, length, seed):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(12, (length, 9), generator=generator).cumsum(1) % 12

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        return tokens[:-1], tokens[1:]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.rnn = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, 12)

    def forward(self, tokens):
        return self.head(self.rnn(self.embed(tokens))[0])


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.model = DDP(Model())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.95)
        train, valid = Sequences(640, 1), Sequences(100, 2)
        self.sampler = DistributedSampler(train, shuffle=True, seed=11)
        self.loader = DataLoader(train, args.batch_size, sampler=self.sampler, drop_last=True)
        shard = Subset(valid, range(self.rank, len(valid), self.world_size))
        self.valid_loader = DataLoader(shard, args.batch_size)
        self.epoch = self.step = self.batches_done = 0

    def loss(self, batch):
        tokens, targets = batch
        return nn.functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())

    def train_epoch(self):
        self.model.train()
        self.sampler.set_epoch(self.epoch)
        usable = len(self.loader) // self.args.accumulate * self.args.accumulate
        for number, batch in enumerate(self.loader):
            if number < self.batches_done:
                continue  # before the checkpoint
            if number == usable:
                break  # no step is made of fewer micro-batches
            is_last = (number + 1) % self.args.accumulate == 0
            with contextlib.nullcontext() if is_last else self.model.no_sync():
                (self.loss(batch) / self.args.accumulate).backward()
            if is_last:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                self.step += 1
                if self.step % self.args.save_every == 0:
                    self.save(number + 1)
        self.batches_done = 0

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        totals = torch.zeros(2, dtype=torch.float64)
        for batch in self.valid_loader:
            loss = self.loss_of_module(batch)
            totals += torch.tensor([loss.sum().item(), loss.numel()])
        dist.all_reduce(totals)
        if self.rank == 0:
            print(f"epoch {self.epoch} valid loss {totals[0] / totals[1]:.5f}")

    def loss_of_module(self, batch):
        tokens, targets = batch
        logits = self.model.module(tokens)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")

    def save(self, batches_done):
        if self.rank == 0:
            state = {
                "model": self.model.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scheduler": self.scheduler.state_dict(),
                "epoch": self.epoch,
                "step": self.step,
                "batches_done": batches_done,
            }
            torch.save(state, self.args.checkpoint)
        dist.barrier()

    def load(self):
        state = torch.load(self.args.checkpoint)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch, self.step, self.batches_done = state["epoch"], state["step"], state["batches_done"]

    def fit(self):
        if self.args.resume and os.path.exists(self.args.checkpoint):
            self.load()
        while self.epoch < self.args.epochs:
            self.train_epoch()
            self.validate()
            self.epoch += 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=12)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--save_every", type=int, default=2)
    parser.add_argument("--checkpoint", default="last.pt")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    Trainer(args).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
