"""Cross-validation in one launch: a run per fold, whose folders lie in --output_dir."""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Subset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.programs.regression import make_points
from utils import launch
from utils.atomic_files import write_json
from utils.flags import ArgumentParser
from utils.loader import GlobalLoader
from utils.run import Run


def parse_args():
    parser = ArgumentParser(__doc__)
    parser.add_argument("--folds", type=int, default=3)
    parser.add_argument("--trained_folds", type=int, help="train only the first ones")
    parser.add_argument("--batch_size", type=int, default=20)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--one_accelerator", action="store_true", help="for all folds")
    parser.add_run_flags(log_every=1)
    return parser.parse_args()


@torch.no_grad()
def evaluate(model, loader, run):
    model.eval()
    metrics = run.new_metrics()
    for batch in run.test_batches(loader):
        inputs, targets = batch.data
        metrics.add(batch, loss=(model(inputs) - targets).norm(dim=1))
    return metrics.reduce()


def train(args, fold, accelerator=None) -> tuple:
    """Train on all folds but one. Returns the accelerator, and the summary of the run."""
    args = argparse.Namespace(**vars(args) | {"output_dir": f"{args.output_dir}/fold_{fold}"})
    # Also seeds the generators, so each fold trains as it would in a launch of its own.
    accelerator = accelerator or launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)
    data = make_points(61, torch.float64)
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
    return accelerator, run.finish()


def main():
    args = parse_args()
    accelerator, losses = None, []
    for fold in range(args.trained_folds or args.folds):
        accelerator, summary = train(args, fold, accelerator if args.one_accelerator else None)
        losses.append(summary["test_loss"])
    write_json(Path(args.output_dir) / f"rank_{accelerator.process_index}.json", {"losses": losses})


if __name__ == "__main__":
    main()
