"""Your own schedule, ReduceLROnPlateau, an optimizer for each part of a model, and torch.compile.

    accelerate launch --config_file accelerate_configs/cpu.yaml examples/schedules.py --recipe plateau

The recipes of guides/your_own_model.md.
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


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    add = parser.add_argument_group("training").add_argument
    add("--recipe", choices=("warmup", "plateau", "two_optimizers", "compile"), required=True)
    add("--batch_size", type=int, default=40)
    add("--lr", type=float, default=1e-2)
    add = parser.add_argument_group("length and memory", may_change=True).add_argument
    add("--num_epochs", type=int, default=4)
    add("--gradient_accumulation_steps", type=int, default=1)
    parser.add_run_flags(log_every=1)
    return parser.parse_args()


def make_points(count):
    """Where a ball lands, by its speed and angle."""
    speed, angle = torch.rand(2, count, generator=torch.Generator().manual_seed(count))
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


class Warmup:
    """A schedule that knows nothing of torch: the learning rate rises for `steps` steps, then stays."""

    def __init__(self, optimizer, lr, steps):
        self.optimizer, self.lr, self.steps, self.done = optimizer, lr, steps, 0
        self.set()

    def set(self):
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * min(1, (self.done + 1) / self.steps)

    def step(self):
        self.done += 1
        self.set()

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]
        self.set()


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    train_loader = GlobalLoader(make_points(200), args.batch_size, accelerator, seed=args.seed)
    test_loader = GlobalLoader(make_points(77), 25, accelerator)
    total_steps = args.num_epochs * len(train_loader)

    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    if args.recipe == "compile":
        model.compile(backend="aot_eager")  # in place: the names in checkpoints and model files stay
    if args.recipe == "two_optimizers":
        parts = {"body": model[0], "head": model[2]}
        rates = {"body": args.lr / 10, "head": args.lr}
    else:
        parts, rates = {"all": model}, {"all": args.lr}
    optimizers = {name: torch.optim.Adam(part.parameters(), rates[name]) for name, part in parts.items()}
    first = next(iter(optimizers.values()))
    state = {}
    if args.recipe == "warmup":
        state["schedule"] = Warmup(first, args.lr, steps=8)
    if args.recipe == "plateau":
        state["schedule"] = torch.optim.lr_scheduler.ReduceLROnPlateau(first, factor=0.5, patience=0, threshold=0.5)
    model, *prepared = accelerator.prepare(model, *optimizers.values())
    optimizers = dict(zip(optimizers, prepared, strict=True))
    run.start(train_loader, test_loader, total_steps, checkpoint={"model": model, **optimizers, **state})

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            inputs, targets = batch.data
            with accelerator.accumulate(model):
                errors = (model(inputs) - targets).norm(dim=1)
                accelerator.backward(batch.mean_loss(errors))
                for optimizer in optimizers.values():
                    optimizer.step()
                    optimizer.zero_grad()
                if args.recipe == "warmup" and accelerator.sync_gradients:  # once per step
                    state["schedule"].step()
            run.log_train(batch, loss=errors)
        result = evaluate(model, test_loader, run)
        if args.recipe == "plateau":
            state["schedule"].step(result["loss"])  # the same number on every process
        run.log_test(result)
    run.finish()


if __name__ == "__main__":
    main()
