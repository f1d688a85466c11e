"""A small regression with every optional feature of a training script behind a flag."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.run import Run


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    add = parser.add_argument_group("training", resume_invariant=True).add_argument
    add("--batch_size", type=int, default=20)
    add = parser.add_argument_group("features").add_argument
    add("--gradient_accumulation_steps", type=int, default=1)
    add("--num_epochs", type=int, default=5)
    add("--compile", action="store_true")
    add("--ema", action="store_true")
    add("--stop_at", type=int, default=0, help="as if a signal came in this step")
    parser.add_run_flags(log_every=2)
    return parser.parse_args()


def make_data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 8, generator=generator)
    return TensorDataset(inputs, inputs.square().sum(1, keepdim=True).sqrt())


@torch.no_grad()
def evaluate(model, loader, run):
    model.eval()
    metrics = run.new_metrics()
    for batch in run.test_batches(loader):
        inputs, targets = batch.data
        metrics.add(batch, loss=(model(inputs) - targets).square().squeeze(1).float())
    return metrics.reduce()


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)
    train_loader = GlobalLoader(make_data(53, 1), args.batch_size, accelerator, seed=args.seed)  # the last step has 13
    test_loader = GlobalLoader(make_data(7, 2), 4, accelerator)
    total_steps = args.num_epochs * len(train_loader)

    model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if args.ema else None
    if args.compile:
        model = torch.compile(model, backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    checkpoint = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    checkpoint |= {"average": average} if average else {}
    run.start(train_loader, test_loader, total_steps, checkpoint=checkpoint)

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            inputs, targets = batch.data
            with accelerator.accumulate(model):
                losses = (model(inputs) - targets).square().squeeze(1)
                accelerator.backward(batch.mean_loss(losses))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if average and accelerator.sync_gradients:
                average.update_parameters(accelerator.unwrap_model(model, keep_torch_compile=False))
            run.log_train(batch, loss=losses.float())
            if args.stop_at and run.step + 1 == args.stop_at and accelerator.sync_gradients:
                run.stop_signal.received = 15
        run.log_test(evaluate(model, test_loader, run))
    run.finish()


if __name__ == "__main__":
    main()
