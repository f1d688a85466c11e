"""Semi-supervised learning with a mean teacher: labelled and unlabelled points in each step, from two loaders.

    accelerate launch --config_file accelerate_configs/cpu.yaml examples/two_loaders.py

The numbers are the same with cpu_ddp.yaml, and after --resume.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of utils/

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.run import Run


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    add = parser.add_argument_group("training").add_argument
    add("--batch_size", type=int, default=36)
    add("--unlabelled", type=int, default=330)
    add("--lr", type=float, default=1e-2)
    add = parser.add_argument_group("length and memory", may_change=True).add_argument
    add("--num_epochs", type=int, default=2)
    add("--gradient_accumulation_steps", type=int, default=1)
    parser.add_run_flags(log_every=1)
    return parser.parse_args()


def make_spirals(count):
    """Points of two spirals, and which one."""
    labels = torch.arange(count) % 2
    radius = torch.linspace(0.1, 1, count, dtype=torch.get_default_dtype())
    angle = 6 * radius + 3.14 * labels
    return TensorDataset(radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1), labels)


@torch.no_grad()
def evaluate(model, loader, run):
    model.eval()
    metrics = run.new_metrics()
    for batch in run.test_batches(loader):
        points, labels = batch.data
        logits = model(points)
        metrics.add(batch, loss=F.cross_entropy(logits, labels, reduction="none"), accuracy=logits.argmax(1) == labels)
    return metrics.reduce()


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    labelled_loader = GlobalLoader(make_spirals(100), args.batch_size, accelerator, seed=args.seed)
    unlabelled = make_spirals(args.unlabelled)
    unlabelled_loader = GlobalLoader(unlabelled, 3 * args.batch_size, accelerator, seed=args.seed, name="unlabelled")
    test_loader = GlobalLoader(make_spirals(61), 30, accelerator)
    total_steps = args.num_epochs * len(labelled_loader)

    model = nn.Sequential(nn.Linear(2, 32), nn.SiLU(), nn.Linear(32, 2))
    teacher = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.Adam(model.parameters(), args.lr)
    model, optimizer = accelerator.prepare(model, optimizer)
    checkpoint = {"model": model, "teacher": teacher, "optimizer": optimizer}
    run.start(labelled_loader, test_loader, total_steps, checkpoint=checkpoint)

    unlabelled_batches = unlabelled_loader.from_step(run.step)
    for epoch in run.epochs():
        model.train()
        for batch in run.batches(labelled_loader, epoch):
            points, labels = batch.data
            others = next(unlabelled_batches)
            with accelerator.accumulate(model):
                noisy = others.data[0] + 0.1 * others.randn(2)
                # One forward pass for both, because DDP takes one per backward pass.
                logits, other_logits = model(torch.cat([points, noisy])).split([len(batch), len(others)])
                with torch.no_grad():
                    targets = teacher(others.data[0]).softmax(1)
                losses = F.cross_entropy(logits, labels, reduction="none")
                other_losses = F.cross_entropy(other_logits, targets, reduction="none")
                accelerator.backward(batch.mean_loss(losses) + 0.5 * others.mean_loss(other_losses))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:  # the last micro-batch of a step
                teacher.update_parameters(accelerator.unwrap_model(model))
            run.log_train(batch, loss=losses)
        run.log_test(evaluate(teacher, test_loader, run))
    run.finish()


if __name__ == "__main__":
    main()
