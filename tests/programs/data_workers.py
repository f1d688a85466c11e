"""Two workers read noisy points; a step has two micro-batches."""

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.run import Run


class NoisyPoints(torch.utils.data.Dataset):
    fingerprint = "noisy points"

    def __len__(self):
        return 800

    def __getitem__(self, index):
        x = torch.tensor([index / 800, 1.0])
        return x + torch.rand(2) / 8, x[:1].sin()


def main():
    parser = flags.ArgumentParser(__doc__)
    parser.add_run_flags(log_every=10)
    args = parser.parse_args()
    args.gradient_accumulation_steps = 2
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)
    loader = GlobalLoader(NoisyPoints(), 8, accelerator, seed=args.seed, num_workers=2)
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.start(loader, None, 200, checkpoint={"model": model, "optimizer": optimizer})
    for epoch in run.epochs():
        for batch in run.batches(loader, epoch):
            with accelerator.accumulate(model):
                points, targets = batch.data
                losses = (model(points) - targets).square().mean(1)
                accelerator.backward(batch.mean_loss(losses))
                optimizer.step()
                optimizer.zero_grad()
            run.log_train(batch, loss=losses)
    run.finish()


if __name__ == "__main__":
    main()
