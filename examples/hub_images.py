"""A dataset of the Hub with a random transform, and an unmodified model of torchvision.

    accelerate launch --config_file accelerate_configs/cpu.yaml examples/hub_images.py

The numbers are the same with cpu_ddp.yaml, and after --resume.
"""

import sys
from pathlib import Path

import datasets
import torch
from torch.nn import functional as F
from torchvision.models import VisionTransformer
from torchvision.transforms import v2 as transforms

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of utils/

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.run import Run


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    parser.add_argument("--dataset", default="ylecun/mnist", help="Hub id or folder")
    add = parser.add_argument_group("training").add_argument
    add("--batch_size", type=int, default=48)
    add("--lr", type=float, default=0.02)
    add = parser.add_argument_group("length and memory", may_change=True).add_argument
    add("--max_steps", type=int, default=8)
    add("--num_workers", type=int, default=0)
    add("--gradient_accumulation_steps", type=int, default=1)
    parser.add_run_flags(log_every=1)
    return parser.parse_args()


def transformed(split, *augmentation):
    to_pixels = transforms.Compose(
        [
            transforms.ToImage(),
            transforms.RGB(),
            *augmentation,
            transforms.ToDtype(torch.get_default_dtype(), scale=True),
            transforms.Normalize([0.1307] * 3, [0.3081] * 3),
        ]
    )

    def transform(rows):
        return {"pixels": [to_pixels(image) for image in rows["image"]], "label": rows["label"]}

    split.set_transform(transform)
    return split


@torch.no_grad()
def evaluate(model, loader, run):
    model.eval()
    metrics = run.new_metrics()
    for batch in run.test_batches(loader):
        logits = model(batch.data["pixels"])
        labels = batch.data["label"]
        losses = F.cross_entropy(logits, labels, reduction="none")
        metrics.add(batch, loss=losses, accuracy=logits.argmax(1) == labels)
    return metrics.reduce()


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    data = datasets.load_dataset(args.dataset)
    train_loader = GlobalLoader(
        transformed(data["train"], transforms.RandomCrop(28, padding=2)),
        args.batch_size,
        accelerator,
        seed=args.seed,
        num_workers=args.num_workers,
    )
    test_loader = GlobalLoader(transformed(data["test"]), 101, accelerator)

    model = VisionTransformer(28, 7, 2, 2, 32, 64, num_classes=10)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.max_steps)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    run.start(
        train_loader,
        test_loader,
        args.max_steps,
        checkpoint={"model": model, "optimizer": optimizer, "scheduler": scheduler},
    )

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            with accelerator.accumulate(model):
                logits = model(batch.data["pixels"])
                losses = F.cross_entropy(logits, batch.data["label"], reduction="none")
                accelerator.backward(batch.mean_loss(losses))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.log_train(batch, loss=losses, accuracy=logits.argmax(1) == batch.data["label"])
        run.log_test(evaluate(model, test_loader, run))
    run.finish()


if __name__ == "__main__":
    main()
