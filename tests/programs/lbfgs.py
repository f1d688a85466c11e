"""L-BFGS, which evaluates the loss of a step several times: its closure goes through all micro-batches of the step."""

import functools
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.run import Run

NUM_POINTS = 31


def losses_of(model, batch):
    inputs, targets = batch.data
    return (model(inputs) - targets).square().squeeze(1)


def main():
    parser = flags.ArgumentParser(__doc__)
    parser.add_argument("--gradient_accumulation_steps", type=flags.positive_int, default=1)
    parser.add_run_flags(log_every=1)
    args = parser.parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    inputs = torch.linspace(-2, 2, NUM_POINTS)[:, None]
    train_loader = GlobalLoader(TensorDataset(inputs, (3 * inputs).sin()), NUM_POINTS, accelerator, seed=args.seed)

    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    model, optimizer = accelerator.prepare(model, optimizer)
    run.start(train_loader, None, total_steps=10, checkpoint={"model": model, "optimizer": optimizer})

    def closure(batches):
        """The mean loss of the step over all processes, so that all take the same path; leaves its gradient."""
        optimizer.zero_grad()
        metrics = run.new_metrics()
        for batch in batches:
            with accelerator.accumulate(model):
                losses = losses_of(model, batch)
                accelerator.backward(batch.mean_loss(losses))
            metrics.add(batch, loss=losses)
        return metrics.reduce()["loss"]

    for epoch in run.epochs():
        for batches in run.steps(train_loader, epoch):  # all micro-batches of a step, in a list
            optimizer.step(functools.partial(closure, batches))
            for batch in batches:
                with torch.no_grad():
                    run.log_train(batch, loss=losses_of(model, batch))  # after the step
    run.finish()


if __name__ == "__main__":
    main()
