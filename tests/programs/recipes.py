"""A small model, trained by the loop of a section of guides/reference/recipes.md, as it stands on the page."""

import re
import sys
import zlib  # noqa: F401 (for the lines of the page, as those below)
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.parallel.shards import local_rows  # noqa: F401
from utils.randomness import combine, random_normal  # noqa: F401
from utils.run import Run
from utils.sample_metrics import gather_samples  # noqa: F401

PAGE = Path(__file__).resolve().parents[2] / "guides" / "reference" / "recipes.md"
SECTIONS = {
    "normalizers": "Two losses with two normalizers",
    "buffer": "A buffer from the samples of all processes",
    "noise": "Noise on weights or gradients: Langevin, DP-SGD",
    "ratio": "A ratio of sums: Dice",
    "tests": "A test every N steps",
    "updates": "Several optimizer steps on one batch: PPO",
}
SAMPLES, BATCH = 22, 6  # the last step of an epoch has 4 samples


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    parser.add_argument("--recipe", choices=SECTIONS, default="normalizers")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_run_flags(log_every=1)
    return parser.parse_args()


def loop_of(recipe: str) -> str:
    """The lines on the page; with so few steps, each third one is the hundredth."""
    pattern = rf"^## {re.escape(SECTIONS[recipe])}\n.*?^```py\n(.*?)^```"
    return re.search(pattern, PAGE.read_text(), re.S | re.M)[1].replace("100", "3")


def make_data() -> TensorDataset:
    """Points (N, 4), classes (N,), how many of four boxes there are (N,), the boxes (N, 4, 2), and masks (N, 8)."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(SAMPLES, 4, generator=generator).to(torch.get_default_dtype())
    numbers = torch.arange(SAMPLES)
    boxes = points.repeat(1, 2).view(-1, 4, 2).roll(1, 0)
    return TensorDataset(points, numbers % 3, numbers % 5, boxes, (boxes.flatten(1) > 0).to(points.dtype))


def make_model(dropout: float = 0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 11))


def outputs(model, batch):
    """Scores of the classes (n, 3), and boxes or scores of pixels (n, 8)."""
    return model(batch.data[0]).split([3, 8], dim=1)


def count_boxes(batch):
    return batch.data[2]


def detection_losses(model, batch):
    _, classes, counts, boxes, _ = batch.data
    scores, found = outputs(model, batch)
    distances = (found.view(-1, 4, 2) - boxes).square().sum(2)
    exist = torch.arange(4, device=counts.device) < counts[:, None]
    return F.cross_entropy(scores, classes, reduction="none"), (distances * exist).sum(1)


def class_losses(model, batch):
    return detection_losses(model, batch)[0]


def overlap_and_size(model, batch):
    mask, found = batch.data[4], outputs(model, batch)[1].sigmoid()
    return (found * mask).sum(1), (found + mask).sum(1)


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(3))


def centered_losses(model, criterion, batch):
    scores = outputs(model, batch)[0]
    return scores, F.cross_entropy(scores - criterion.center, batch.data[1], reduction="none")


def log_probs(model, batch):
    scores = outputs(model, batch)[0].log_softmax(1)
    return scores.gather(1, batch.data[1][:, None]).squeeze(1)


def advantages(batch):
    return batch.data[0][:, 0]


@torch.no_grad()
def evaluate(model, loader, run):
    model.eval()
    metrics = run.new_metrics()
    for batch in run.test_batches(loader):
        metrics.add(batch, loss=class_losses(model, batch))
    return metrics.reduce()


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)
    train_loader = GlobalLoader(make_data(), BATCH, accelerator, seed=args.seed)
    test_loader = GlobalLoader(make_data(), 5, accelerator)
    model = make_model(dropout=0.5 if args.recipe == "tests" else 0)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.2, momentum=0.9))
    criterion = Criterion().to(accelerator.device)
    checkpoint = {"model": model, "optimizer": optimizer, "criterion": criterion}
    run.start(train_loader, test_loader, 2 * len(train_loader), checkpoint=checkpoint)
    losses_of = class_losses if args.recipe in ("tests", "noise") else detection_losses
    for epoch in run.epochs():
        model.train()
        exec(loop_of(args.recipe), {**globals(), **locals(), "epoch": epoch})
        if args.recipe == "tests":
            run.log_test(evaluate(model, test_loader, run))
    run.finish()


if __name__ == "__main__":
    main()
