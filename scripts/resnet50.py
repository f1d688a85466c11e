"""ResNet-50 on images of any size, with torchvision's ImageNet recipes.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/resnet50.py
    accelerate launch --config_file accelerate_configs/ddp.yaml --mixed_precision bf16 \
        scripts/resnet50.py --preset v1 --dataset imagenet/ --output_dir runs/imagenet

97.5 % test accuracy on MNIST at 32 pixels after 150 steps: 109 s of training on 2 cores of a 2.8 GHz Xeon.
Recipes: torchvision's for ImageNet (76.1 % and 80.9 %),
https://github.com/pytorch/vision/tree/main/references/classification; a learning rate in proportion to the batch size,
warm-up and zero-init: P. Goyal et al., https://arxiv.org/abs/1706.02677.
"""

import argparse
import functools
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torchvision
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torchvision.models.resnet import Bottleneck
from torchvision.transforms import v2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of utils/

from utils import launch
from utils.console import stop
from utils.data.image_files import ImageFiles, crop_and_resize
from utils.data.images import load_splits
from utils.flags import ArgumentParser, at_least, fraction, non_negative_float, non_negative_int, positive_int
from utils.launched import data_parallel_gpus, share_of_cores
from utils.loader import GlobalLoader
from utils.parallel.batch_norm import BatchNorms
from utils.parallel.fsdp import shard, update_average
from utils.pretrained import load_pretrained
from utils.run import Run

# Mean and standard deviation of ImageNet's pixels per channel, 0 to 255; torchvision's weights expect them.
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
TEST_BATCH_SIZE = 256

# torchvision's recipes for ImageNet, as flags; v2 without its repeated augmentation (4 copies of an image in a step).
# The defaults are for a quick run on MNIST at 32 pixels.
PRESETS = {
    "v1": """
        --image_size 224 --eval_resize 256 --min_crop 0.08 --flip 0.5
        --num_epochs 90 --batch_size 256 --lr 0.1 --schedule step --warmup_epochs 0
        --weight_decay 1e-4 --norm_weight_decay 1e-4 --no-nesterov --no-zero_init""",
    "v2": """
        --image_size 176 --eval_size 224 --eval_resize 232 --min_crop 0.08 --flip 0.5
        --num_epochs 600 --batch_size 1024 --lr 0.125 --schedule cosine --warmup_epochs 5
        --weight_decay 2e-5 --norm_weight_decay 0 --no-nesterov --no-zero_init --label_smoothing 0.1
        --mixup 0.2 --cutmix 1 --trivial_augment --erase 0.1 --ema_decay 0.9989 --ema_every 32""",
}


def parse_args():
    parser = ArgumentParser(__doc__)
    parser.add_argument("--preset", choices=PRESETS, help="torchvision's recipe; other flags override its values")
    switch = argparse.BooleanOptionalAction

    data = parser.add_argument_group("data")
    data.add_argument("--dataset", default="ylecun/mnist", help="Hub id, or folder of parquet, images or tar files")
    data.add_argument("--image_column", metavar="NAME", help="column, or extension in tar files, if there are several")
    data.add_argument("--label_column", metavar="NAME", help="column, or extension or entry of .json in tar files")
    data.add_argument("--cache_dir", metavar="FOLDER", help="for what is made once (default: Hugging Face's cache)")
    data.add_argument("--num_workers", type=non_negative_int, help="processes that decode (default: by the cores)")
    data.add_argument("--max_test_samples", type=non_negative_int, default=0, help="test on the first N images; 0: all")
    data.add_argument("--metrics", nargs="+", metavar="NAME|FOLDER", help="more test metrics, of the library evaluate")

    image = parser.add_argument_group("images")
    image.add_argument("--image_size", type=positive_int, default=32, help="size of the training images, in pixels")
    image.add_argument("--eval_size", type=non_negative_int, default=0, help="size of the test images; 0: image_size")
    image.add_argument("--eval_resize", type=non_negative_int, default=0, help="resize before the crop; 0: eval_size")
    image.add_argument("--min_crop", type=at_least(0.01, float, most=1.0), default=0.85, help="minimum crop area")
    image.add_argument("--flip", type=at_least(0.0, float, most=1.0), default=0.0, help="probability of a flip")
    image.add_argument("--trivial_augment", action=switch, default=False, help="one random operation")
    image.add_argument("--erase", type=fraction, default=0.0, help="probability of erasing a random rectangle")
    image.add_argument("--mixup", type=non_negative_float, default=0.0, help="alpha of the Beta distribution; 0: off")
    image.add_argument("--cutmix", type=non_negative_float, default=0.0, help="as --mixup; both: half of the steps")

    model = parser.add_argument_group("model and training")
    url = torchvision.models.ResNet50_Weights.IMAGENET1K_V2.url
    model.add_argument("--pretrained", nargs="?", const=url, metavar="FILE|URL", help="weights; no value: ImageNet's")
    model.add_argument("--zero_init", action=switch, default=True, help="residual blocks start as the identity")
    model.add_argument("--bn", choices=("local", "sync"), default="local", help="sync: over all processes, on GPUs")
    model.add_argument("--batch_size", type=positive_int, default=64, help="samples per step, over all processes")
    model.add_argument("--lr", type=non_negative_float, default=0.1, help="peak learning rate at batch size 256")
    model.add_argument("--schedule", choices=("cosine", "step"), default="cosine", help="step: / 10 every 30 epochs")
    model.add_argument("--warmup_epochs", type=non_negative_float, default=0.02, help="epochs of linear warm-up")
    model.add_argument("--weight_decay", type=non_negative_float, default=5e-5, help="for convolutions and last layer")
    model.add_argument("--norm_weight_decay", type=non_negative_float, default=0.0, help="for BatchNorm and biases")
    model.add_argument("--nesterov", action=switch, default=True, help="Nesterov momentum, 0.9")
    model.add_argument("--label_smoothing", type=fraction, default=0.0, help="label smoothing in training")
    model.add_argument("--ema_decay", type=fraction, default=0.0, help="decay of a moving average of weights; 0: off")
    model.add_argument("--ema_every", type=positive_int, default=1, help="steps between two updates of this average")

    length = parser.add_argument_group("length and memory", may_change=True)  # when resuming
    length.add_argument("--num_epochs", type=positive_int, default=None, help="passes over the training images")
    length.add_argument("--max_steps", type=positive_int, help="optimizer steps instead of epochs (default: 150)")
    length.add_argument("--gradient_accumulation_steps", type=positive_int, default=1, help="micro-batches per step")
    length.add_argument("--compile", action="store_true", help="torch.compile the model")

    parser.add_run_flags(log_every=10)
    preset = PRESETS.get(parser.parse_known_args()[0].preset, "")
    args = parser.parse_args([*preset.split(), *sys.argv[1:]])
    if not args.num_epochs and not args.max_steps:
        args.max_steps = 150
    args.eval_size = args.eval_size or args.image_size
    args.eval_resize = max(args.eval_resize, args.eval_size)
    return args


def check_args(args, accelerator):
    """Check that the micro-batches suit BatchNorm and mixup, and that --bn sync is possible.

    Raises:
        SystemExit: if not.
    """
    micro_batch = args.batch_size // accelerator.layout.num_slots
    is_odd = micro_batch % 2 == 1 and (args.mixup or args.cutmix)
    if micro_batch < 2 or is_odd:
        stop(
            f"--batch_size {args.batch_size} makes micro-batches of {micro_batch}: BatchNorm needs 2 images or more, "
            "mixup and cutmix an even number"
        )
    if args.bn == "sync" and accelerator.device.type not in ("cuda", "xpu", "hpu"):
        stop("--bn sync works on GPUs only: omit it")  # of the kinds for which PyTorch has SyncBatchNorm
    if args.bn == "sync" and data_parallel_gpus(accelerator) > 1:
        # Each GPU would silently use its own statistics.
        stop("--bn sync needs one process per GPU, but this config uses DataParallel: use ddp.yaml")
    if args.bn == "sync" and args.virtual_processes:
        stop("--bn sync depends on the number of processes, --virtual_processes must not: omit one of them")


class Augment:
    """torchvision's transforms for training. Their random numbers depend on (seed, epoch, image): see GlobalLoader."""

    def __init__(self, args):
        self.args, others = args, [v2.RandomHorizontalFlip(args.flip)]
        if args.trivial_augment:  # one random operation at a random strength: https://arxiv.org/abs/2103.10158
            others.append(v2.TrivialAugmentWide(interpolation=v2.InterpolationMode.BILINEAR))
        if args.erase:  # a rectangle of the mean colour: https://arxiv.org/abs/1708.04896
            others.append(v2.RandomErasing(args.erase, value=[*map(round, MEAN)]))
        self.others = v2.Compose(others)

    def __call__(self, image):
        """A PIL image to uint8 (3, H, W)."""
        # The crop is drawn before the image is decoded, so that a large JPEG is decoded at a part of its size.
        box = v2.RandomResizedCrop.get_params(image, (self.args.min_crop, 1.0), (3 / 4, 4 / 3))
        return self.others(crop_and_resize(image, box, self.args.image_size))


class CenterCrop:
    """Resize the shorter side of a PIL image to `eval_resize`, and crop eval_size x eval_size from the center."""

    def __init__(self, args):
        self.args = args

    def __call__(self, image):
        """A PIL image to uint8 (3, H, W)."""
        width, height = image.size
        side = self.args.eval_size * min(width, height) / self.args.eval_resize
        box = ((height - side) / 2, (width - side) / 2, side, side)
        return crop_and_resize(image, box, self.args.eval_size)


def load_data(args):
    """The training set, the test set, and their description for run.json."""
    train_split, test_split = load_splits(args.dataset, args.image_column, args.label_column, args.cache_dir)
    train_data = ImageFiles(train_split, Augment(args))
    test_data = ImageFiles(test_split, CenterCrop(args), deterministic=True)
    return train_data, test_data, {"dataset": args.dataset, "classes": len(train_data.classes)}


def start_as_identity(model):
    """Initialise the residual blocks of constant shape as the identity, by a weight of 0 in their last BatchNorm.

    torchvision's `zero_init_residual` also changes the four other blocks. The shortcuts of three of them have
    stride 2, and in sequence they see only one corner of a small image. In most digits it is black, so the first
    gradients would be amplified rounding errors.
    """
    for block in model.modules():
        if isinstance(block, Bottleneck) and block.downsample is None:
            torch.nn.init.zeros_(block.bn3.weight)


def make_model(args, num_classes, accelerator, is_resumed=False):
    """torchvision's ResNet-50 on the device, in channels_last (contiguous with fsdp.yaml)."""
    model = torchvision.models.resnet50(num_classes=num_classes)
    if args.zero_init:
        start_as_identity(model)
    if args.pretrained and not is_resumed:
        load_pretrained(model, args.pretrained, head="fc")
    if args.bn == "sync":
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model.to(accelerator.device, memory_format=torch.channels_last)


def make_optimizer(args, model, accelerator):
    """SGD, with a separate weight decay for BatchNorm and biases."""
    lr = args.lr * args.batch_size / 256
    accelerator.print(f"learning rate {lr:.4g} = {args.lr:g} x {args.batch_size} / 256")
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": args.norm_weight_decay},
    ]
    fused = not accelerator.is_fsdp2  # a fused step of SGD takes no sharded parameters in torch 2.15, unlike AdamW's
    return torch.optim.SGD(groups, lr, momentum=0.9, nesterov=args.nesterov, fused=fused)


def lr_factor(step, schedule, warmup_steps, steps_per_epoch, total_steps) -> float:
    """Learning rate of a step / highest learning rate: linear warm-up, then a cosine or steps."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "step":
        return 0.1 ** (step // (30 * steps_per_epoch))
    progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    return 0.5 + 0.5 * math.cos(math.pi * progress)


def mix(images, mixup: float, cutmix: float, seed: int, step: int):
    """Mixup or CutMix of neighbours: sample 2i with sample 2i + 1.

    All samples of a step share the fraction and the box, which depend on (seed, step) only. Neighbours are mixed, not
    samples of a random permutation, because one process holds both of them on any number of processes.
    Sources: https://arxiv.org/abs/1710.09412, https://arxiv.org/abs/1905.04899.

    Args:
        images: uint8 (N, 3, H, W), N even.
        mixup, cutmix: alpha of the Beta distribution; 0: off. With both, each is used in half of the steps.

    Returns:
        The mixed images, 0 to 255, float32 after mixup and uint8 otherwise; the index of the sample that each image is
        mixed with, int64 (N,); the fraction of each image that is kept.
    """
    partners = torch.arange(len(images), device=images.device)
    if not mixup and not cutmix:
        return images, partners, 1.0
    partners = partners ^ 1
    rng = np.random.default_rng([seed, step])
    if mixup and (not cutmix or rng.random() < 0.5):
        kept = rng.beta(mixup, mixup)
        return torch.lerp(images[partners].float(), images.float(), kept), partners, kept
    height, width = images.shape[2:]
    y, x = rng.random(2)
    half = 0.5 * np.sqrt(1 - rng.beta(cutmix, cutmix))
    top, bottom = (int(height * np.clip(y + side, 0, 1)) for side in (-half, half))
    left, right = (int(width * np.clip(x + side, 0, 1)) for side in (-half, half))
    mixed = images.clone()
    mixed[:, :, top:bottom, left:right] = images[partners, :, top:bottom, left:right]
    return mixed, partners, 1 - (bottom - top) * (right - left) / (height * width)


@functools.cache
def mean_and_std(device, dtype):
    """MEAN and STD, (3, 1, 1). Cached, because each copy to a GPU waits until the GPU is idle."""
    values = torch.tensor([MEAN, STD], device=device, dtype=dtype)
    return values[:, :, None, None].unbind()


def normalize(images):
    """Normalise images (N, 3, H, W), uint8 or float32, 0 to 255, as torchvision's weights expect them."""
    mean, std = mean_and_std(images.device, torch.get_default_dtype())
    return images.to(mean.dtype, copy=True).sub_(mean).div_(std)  # in place: half of the time on CPUs


def losses_and_predictions(model, images, labels, partners=None, kept=1.0, label_smoothing=0.0):
    """Losses, predictions, and the number of classes with a larger logit than the true one; (N,) each.

    Args:
        partners: labels of the images that were mixed in, (N,).
        kept: the fraction of each image that is not from its partner.
    """
    inputs = normalize(images)
    logits = model(inputs).to(inputs.dtype)
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=label_smoothing)
    if kept < 1:
        others = F.cross_entropy(logits, partners, reduction="none", label_smoothing=label_smoothing)
        losses = kept * losses + (1 - kept) * others
    num_larger = (logits > logits.gather(1, labels[:, None])).sum(1)
    return losses, logits.argmax(1), num_larger


def load_metrics(args, num_classes):
    """The metrics of --metrics; None without."""
    if not args.metrics:
        return None
    from utils.sample_metrics import EvaluateMetrics  # imports the library evaluate

    return EvaluateMetrics(args.metrics, example=list(range(num_classes)))


@torch.no_grad()
def evaluate(model, loader, run, others=None) -> dict:
    """Loss, top-1 and top-5 accuracy, and the metrics `others`, of all test images; each counts once."""
    model.eval()
    metrics = run.new_metrics()
    for batch in run.test_batches(loader):
        images, labels = batch.data
        with run.accelerator.autocast():  # the moving average was not passed to `prepare`
            losses, predicted, num_larger = losses_and_predictions(model, images, labels)
        metrics.add(batch, loss=losses, accuracy=predicted == labels, top5_accuracy=num_larger < 5)
        if others is not None:
            others.add(batch, predicted.tolist(), labels.tolist())
    return metrics.reduce() | (others.compute() if others is not None else {})


def make_loaders(args, train_data, test_data, accelerator):
    num_workers = args.num_workers
    if num_workers is None:  # this process's share of the cores; none when training on the CPU, which needs them
        num_workers = 0 if accelerator.device.type == "cpu" else min(16, share_of_cores())
    options = {"collate_fn": train_data.collate, "num_workers": num_workers}
    train_loader = GlobalLoader(
        train_data,
        args.batch_size,
        accelerator,
        seed=args.seed,
        drop_last=True,  # a micro-batch of one image has no variance
        **options,
    )
    test_loader = GlobalLoader(test_data, TEST_BATCH_SIZE, accelerator, max_samples=args.max_test_samples, **options)
    return train_loader, test_loader


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args)
    check_args(args, accelerator)
    run = Run(accelerator, args)

    train_data, test_data, about_data = load_data(args)
    train_loader, test_loader = make_loaders(args, train_data, test_data, accelerator)
    metrics = load_metrics(args, len(train_data.classes))
    steps_per_epoch = len(train_loader)
    total_steps = args.max_steps or args.num_epochs * steps_per_epoch
    warmup_steps = args.warmup_epochs * steps_per_epoch

    model = make_model(args, len(train_data.classes), accelerator, run.folder.has_checkpoint)
    ema = AveragedModel(model) if args.ema_decay else None
    optimizer = make_optimizer(args, model, accelerator)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, args.schedule, warmup_steps, steps_per_epoch, total_steps)
    )
    if args.compile:
        model.compile()
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    checkpoint = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if ema is not None:
        shard(accelerator, ema.module)  # with fsdp.yaml, like the model in `prepare`
        checkpoint["model_ema"] = ema
    # DDP would copy rank 0's running statistics to all ranks. Instead they are averaged over all micro-batches.
    batch_norms = BatchNorms(model, accelerator)
    run.start(train_loader, test_loader, total_steps, data=about_data, checkpoint=checkpoint)

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            images, labels = batch.data
            images, partners, kept = mix(images, args.mixup, args.cutmix, args.seed, run.step)
            with accelerator.accumulate(model), batch_norms.averaged():
                losses, predicted, _ = losses_and_predictions(
                    model, images, labels, labels[partners], kept, args.label_smoothing
                )
                accelerator.backward(batch.mean_loss(losses))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.log_train(batch, loss=losses, accuracy=predicted == labels)
            if ema is not None and accelerator.sync_gradients and (run.step + 1) % args.ema_every == 0:
                # The last micro-batch of step run.step + 1. During warm-up the average is a copy of the model.
                decay = args.ema_decay if run.step + 1 > max(warmup_steps, args.ema_every) else 0.0
                update_average(ema.module, accelerator.unwrap_model(model), decay)
        result = evaluate(model, test_loader, run, metrics)
        if ema is not None:
            averaged = evaluate(ema, test_loader, run, metrics)
            result |= {f"ema_{name}": value for name, value in averaged.items() if name != "samples"}
        run.log_test(result)
    run.finish()


if __name__ == "__main__":
    main()
