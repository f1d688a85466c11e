"""Regression with two outputs, an error in pixels, and a metric of the library evaluate.

    accelerate launch --config_file accelerate_configs/cpu.yaml examples/regression.py

The correlation of where a ball lands and where the model expects it is 0.95 in the end. The numbers are the same with
cpu_ddp.yaml, and after --resume.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of utils/

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.run import Run
from utils.sample_metrics import EvaluateMetrics

CORRELATION = str(Path(__file__).with_name("correlation"))


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    add = parser.add_argument_group("training").add_argument
    add("--batch_size", type=int, default=36)
    add("--lr", type=float, default=3e-2)
    add = parser.add_argument_group("length and memory", may_change=True).add_argument
    add("--num_epochs", type=int, default=60)
    add("--gradient_accumulation_steps", type=int, default=1)
    add("--metrics", nargs="+", default=[CORRELATION], metavar="NAME|FOLDER", help="of the library evaluate")
    parser.add_run_flags(log_every=60)
    return parser.parse_args()


def make_points(count):
    """Where a ball lands, in pixels from the middle of the image, by its speed and angle."""
    generator = torch.Generator().manual_seed(count)
    speed, angle = torch.rand(2, count, generator=generator)
    targets = 50 * torch.stack([speed * (6.28 * angle).cos(), speed * (6.28 * angle).sin()], dim=1)
    return TensorDataset(torch.stack([speed, angle], dim=1), targets)


@torch.no_grad()
def evaluate(model, loader, run, others):
    model.eval()
    metrics = run.new_metrics()
    for batch in run.test_batches(loader):
        inputs, targets = batch.data
        outputs = model(inputs)
        others.add(batch, outputs[:, 0].tolist(), targets[:, 0].tolist())
        difference = outputs - targets
        errors = difference.norm(dim=1)
        metrics.add(batch, loss=errors.square(), error_px=errors, bias_x=difference[:, 0])
    return metrics.reduce() | others.compute()


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    train_loader = GlobalLoader(make_points(200), args.batch_size, accelerator, seed=args.seed)
    test_loader = GlobalLoader(make_points(77), 25, accelerator)
    total_steps = args.num_epochs * len(train_loader)

    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    model, optimizer = accelerator.prepare(model, optimizer)
    metrics = EvaluateMetrics(args.metrics, example=[0.0, 1.0])
    run.start(train_loader, test_loader, total_steps, checkpoint={"model": model, "optimizer": optimizer})

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            inputs, targets = batch.data
            with accelerator.accumulate(model):
                errors = (model(inputs) - targets).norm(dim=1)
                accelerator.backward(batch.mean_loss(errors.square()))
                optimizer.step()
                optimizer.zero_grad()
            run.log_train(batch, loss=errors.square(), error_px=errors)
        run.log_test(evaluate(model, test_loader, run, metrics))
    run.finish()


if __name__ == "__main__":
    main()
