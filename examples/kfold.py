"""Cross-validation in one launch: a run per fold, in a folder of its own inside --output_dir.

    accelerate launch --config_file accelerate_configs/cpu.yaml examples/kfold.py

The numbers are the same with cpu_ddp.yaml, and after --resume.
"""

import argparse
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from torch import nn
from torch.utils.data import Subset, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of utils/

from utils import launch
from utils.flags import ArgumentParser
from utils.loader import GlobalLoader
from utils.run import Run


def parse_args():
    parser = ArgumentParser(__doc__)
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=20)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_run_flags(log_every=1)
    parser.set_defaults(output_dir="runs/kfold")
    return parser.parse_args()


def make_points(count):
    """Where a ball lands, by its speed and angle."""
    speed, angle = torch.rand(2, count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    targets = 50 * torch.stack([speed * (6.28 * angle).cos(), speed * (6.28 * angle).sin()], dim=1)
    return TensorDataset(torch.stack([speed, angle], dim=1), targets)


@torch.no_grad()
def evaluate(model, loader, run):
    model.eval()
    metrics = run.new_metrics()
    for batch in run.test_batches(loader):
        inputs, targets = batch.data
        metrics.add(batch, loss=(model(inputs) - targets).norm(dim=1))
    return metrics.reduce()


def train(args, fold) -> dict:
    """Train on all folds but one; returns the summary of the run, on every process."""
    args = argparse.Namespace(**vars(args) | {"output_dir": f"{args.output_dir}/fold_{fold}"})
    accelerator = launch.make_accelerator(args, cpu_threads=1)  # also seeds: as in a launch of its own
    run = Run(accelerator, args)
    data = make_points(61)
    is_tested = torch.arange(len(data)) % args.folds == fold
    train_data, test_data = (Subset(data, chosen.nonzero()[:, 0].tolist()) for chosen in (~is_tested, is_tested))
    train_loader = GlobalLoader(train_data, args.batch_size, accelerator, seed=args.seed)
    test_loader = GlobalLoader(test_data, 8, accelerator)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 0.01))
    run.start(train_loader, test_loader, 2 * len(train_loader), checkpoint={"model": model, "optimizer": optimizer})
    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            inputs, targets = batch.data
            with accelerator.accumulate(model):
                errors = (model(inputs) - targets).norm(dim=1)
                accelerator.backward(batch.mean_loss(errors))
                optimizer.step()
                optimizer.zero_grad()
            run.log_train(batch, loss=errors)
        run.log_test(evaluate(model, test_loader, run))
    return run.finish()


def main():
    args = parse_args()
    losses = [train(args, fold)["test_loss"] for fold in range(args.folds)]
    PartialState().print(f"mean test loss of {args.folds} folds: {sum(losses) / args.folds:.4f}")


if __name__ == "__main__":
    main()
