"""A vision transformer of timm with mixup in the loop and timm's loss for soft targets, a mean over the batch."""

import sys
from pathlib import Path

import timm
import torch
from timm.loss import SoftTargetCrossEntropy
from torch.nn import functional as F
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.run import Run


def make_images(count):
    """Grey images (count, 1, 8, 8) of noise with a brighter quarter, and which one that is, (count,)."""
    images, labels = torch.rand(count, 1, 8, 8), torch.arange(count) % 4
    for image, label in zip(images, labels, strict=True):
        image[0].view(2, 4, 2, 4)[label // 2, :, label % 2] += 0.5
    return TensorDataset(images, labels)


def main():
    parser = flags.ArgumentParser(__doc__)
    parser.add_argument("--gradient_accumulation_steps", type=flags.positive_int, default=1)
    parser.add_run_flags(log_every=1)
    args = parser.parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    train_data, test_data = make_images(29), make_images(13)
    train_loader = GlobalLoader(train_data, 7, accelerator, seed=args.seed)
    test_loader = GlobalLoader(test_data, 6, accelerator)
    all_images, all_labels = train_loader.tensors  # on the accelerator's device

    sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=4, **sizes)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.start(train_loader, test_loader, 2 * len(train_loader), checkpoint={"model": model, "optimizer": optimizer})
    soft_cross_entropy = SoftTargetCrossEntropy()

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            images, labels = batch.data
            # Partners from all images: those within a micro-batch, as timm's Mixup takes them, depend on the topology.
            partners = (batch.rand() * len(train_data)).long()
            share = batch.rand(1, stream=1)  # of the partner; Beta(1, 1)
            images = images + share[:, :, None, None] * (all_images[partners] - images)
            targets = (1 - share) * F.one_hot(labels, 4) + share * F.one_hot(all_labels[partners], 4)
            with accelerator.accumulate(model):
                loss = soft_cross_entropy(model(images), targets)  # a scalar: the mean over this micro-batch
                accelerator.backward(batch.mean_loss(loss))
                optimizer.step()
                optimizer.zero_grad()
            run.log_train(batch, loss=loss)
        model.eval()
        metrics = run.new_metrics()
        with torch.no_grad():
            for batch in run.test_batches(test_loader):
                images, labels = batch.data
                metrics.add(batch, accuracy=model(images).argmax(1) == labels)
        run.log_test(metrics.reduce())
    run.finish()


if __name__ == "__main__":
    main()
