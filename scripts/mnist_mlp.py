"""A multi-layer perceptron on MNIST: the smallest complete training script, for any topology.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/mnist_mlp.py
    accelerate launch --config_file accelerate_configs/ddp.yaml scripts/mnist_mlp.py --batch_size 1024

98.19 % test accuracy after 4 epochs, 4 s of training on one core of a 2.8 GHz Xeon; torch 2.14, accelerate 1.15.
One-cycle schedule: L. N. Smith and N. Topin, https://arxiv.org/abs/1708.07120.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of utils/

from utils import launch
from utils.data.images import load_images
from utils.flags import ArgumentParser, non_negative_float, positive_int
from utils.loader import GlobalLoader
from utils.run import Run

# Mean and standard deviation of the pixels of the 60,000 training images, 0 to 255.
MEAN, STD = 33.3184, 78.5675
TEST_BATCH_SIZE = 2000


def parse_args():
    parser = ArgumentParser(__doc__)
    data = parser.add_argument_group("data")
    data.add_argument("--dataset", default="ylecun/mnist", help="Hub id, or folder of <split>/<class>/ images")
    recipe = parser.add_argument_group("recipe")
    recipe.add_argument("--hidden", type=positive_int, default=192, help="hidden units")
    recipe.add_argument("--batch_size", type=positive_int, default=256, help="samples per step, over all processes")
    recipe.add_argument("--lr", type=non_negative_float, default=6e-3, help="highest learning rate")
    recipe.add_argument("--weight_decay", type=non_negative_float, default=0.1, help="weight decay of AdamW")
    length = parser.add_argument_group("length and memory", may_change=True)  # when resuming
    length.add_argument("--num_epochs", type=positive_int, default=4, help="passes over the training images")
    length.add_argument("--max_steps", type=positive_int, help="optimizer steps, instead of --num_epochs")
    length.add_argument("--gradient_accumulation_steps", type=positive_int, default=1, help="micro-batches per step")
    parser.add_run_flags(log_every=100)
    return parser.parse_args()


class MLP(nn.Module):
    def __init__(self, num_inputs: int, hidden: int, num_classes: int):
        super().__init__()
        self.fc1 = nn.Linear(num_inputs, hidden)
        self.fc2 = nn.Linear(hidden, num_classes)

    def forward(self, images):
        """Logits (N, num_classes) of images, uint8 (N, C, H, W)."""
        x = (images.flatten(1) - MEAN) / STD
        return self.fc2(F.silu(self.fc1(x)))  # with relu, runs on different process counts diverge sooner


@torch.no_grad()
def evaluate(model, loader, run) -> dict:
    """Loss and accuracy of all test samples; each counts once."""
    model.eval()
    metrics = run.new_metrics()
    for batch in run.test_batches(loader):
        images, labels = batch.data
        logits = model(images)
        losses = F.cross_entropy(logits, labels, reduction="none")
        metrics.add(batch, loss=losses, accuracy=logits.argmax(1) == labels)
    return metrics.reduce()


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)  # a second thread would slow matrices this small down
    run = Run(accelerator, args)

    # Not DataLoaders for prepare(): those repeat samples to fill the last batch, and read from the start to resume.
    train_data, test_data = load_images(args.dataset)
    train_loader = GlobalLoader(train_data, args.batch_size, accelerator, seed=args.seed)
    test_loader = GlobalLoader(test_data, TEST_BATCH_SIZE, accelerator)
    total_steps = args.max_steps or args.num_epochs * len(train_loader)

    model = MLP(train_data.images[0].numel(), args.hidden, len(train_data.classes))
    optimizer = torch.optim.AdamW(model.parameters(), args.lr, weight_decay=args.weight_decay, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps, cycle_momentum=False)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    # With --resume, this loads the newest checkpoint.
    checkpoint = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    run.start(train_loader, test_loader, total_steps, checkpoint=checkpoint)

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):  # logs, saves and stops between steps: do not `break`
            images, labels = batch.data
            with accelerator.accumulate(model):
                logits = model(images)
                losses = F.cross_entropy(logits, labels, reduction="none")  # one per sample
                accelerator.backward(batch.mean_loss(losses))  # the mean of the whole step, on any topology
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.log_train(batch, loss=losses, accuracy=logits.argmax(1) == labels)
        run.log_test(evaluate(model, test_loader, run))
    run.finish()


if __name__ == "__main__":
    main()
