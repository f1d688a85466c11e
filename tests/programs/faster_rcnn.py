"""Faster R-CNN of torchvision: images and targets as lists, and a dict of losses that are means over the batch."""

import sys
from pathlib import Path

import torch
from torch import nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign, box_iou

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.run import Run


def make_squares(count):
    """Grey images (1, 32, 32) with one or two brighter squares, and their targets."""
    items = []
    for i in range(count):
        corners = torch.tensor([[2.0 + i % 5, 3 + i % 3], [18, 16 - i % 7]][: 1 + i % 2])
        boxes, image = torch.cat([corners, corners + 8 + i % 4], 1), torch.rand(1, 32, 32) / 2
        for left, top, right, bottom in boxes.int().tolist():
            image[:, top:bottom, left:right] += 0.5
        items.append((image, {"boxes": boxes, "labels": torch.ones(len(boxes), dtype=torch.int64)}))
    return items


def as_lists(items):
    return tuple(zip(*items, strict=True))


def make_model():
    backbone = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.SiLU())
    backbone.out_channels = 8
    anchors, pool = AnchorGenerator(((8, 12),), ((1.0,),)), MultiScaleRoIAlign(["0"], 3, 2)
    sizes = {"min_size": 32, "max_size": 32, "image_mean": [0.5], "image_std": [0.3]}
    sizes |= {"rpn_post_nms_top_n_train": 32, "box_detections_per_img": 5}
    return FasterRCNN(backbone, num_classes=2, rpn_anchor_generator=anchors, box_roi_pool=pool, **sizes)


def main():
    parser = flags.ArgumentParser(__doc__)
    parser.add_argument("--gradient_accumulation_steps", type=flags.positive_int, default=1)
    parser.add_run_flags(log_every=1)
    args = parser.parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    train_loader = GlobalLoader(make_squares(29), 7, accelerator, seed=args.seed, collate_fn=as_lists)
    test_loader = GlobalLoader(make_squares(13), 6, accelerator, collate_fn=as_lists)

    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), 0.002)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.start(train_loader, test_loader, 2 * len(train_loader), checkpoint={"model": model, "optimizer": optimizer})

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            images, targets = batch.data
            with accelerator.accumulate(model):
                losses = model(images, targets)  # scalars by name: means over the boxes that the model samples
                loss = sum(losses.values())
                accelerator.backward(batch.mean_loss(loss))
                optimizer.step()
                optimizer.zero_grad()
            run.log_train(batch, loss=loss, **losses)
        model.eval()
        metrics = run.new_metrics()
        with torch.no_grad():
            for batch in run.test_batches(test_loader):
                images, targets = batch.data
                found = [detected["boxes"] for detected in model(images)]
                pairs = zip(found, targets, strict=True)
                overlaps = [box_iou(boxes, target["boxes"]).sum() / max(1, len(boxes)) for boxes, target in pairs]
                metrics.add(batch, iou=torch.stack(overlaps))
        run.log_test(metrics.reduce())
    run.finish()


if __name__ == "__main__":
    main()
