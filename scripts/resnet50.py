"""ResNet-50 on images of any size, with the recipes that people train with: from a first look on a CPU to ImageNet.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/resnet50.py
    accelerate launch --config_file accelerate_configs/ddp.yaml --mixed_precision bf16 scripts/resnet50.py \
        --preset v1 --dataset imagenet/ --output_dir runs/imagenet

96.0 % test accuracy on MNIST at 32 pixels after 150 updates: 109 s of training on 2 cores of a 2.8 GHz Xeon.
Recipes: torchvision's, https://github.com/pytorch/vision/tree/main/references/classification (76.1 and 80.9 %);
learning rate by the batch, warm-up and zero-init: P. Goyal et al., https://arxiv.org/abs/1706.02677.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
from accelerate.utils import gather_object
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision.models import ResNet, ResNet50_Weights
from torchvision.models.resnet import Bottleneck

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds utils from any folder, without an install

from utils import images, launch, stop
from utils.batch_norm import average_batch_norms, weigh_batch_norms
from utils.checkpoint import Checkpoints, load_pretrained, save_model
from utils.data import BUNDLED_MNIST, GlobalSampler, load_splits
from utils.metrics import SampleStats, classification_metric, gather_predictions
from utils.profiling import Profiler
from utils.tracking import Tracker, plot_confusion, plot_images

# Mean and standard deviation of ImageNet's pixels, 0 to 255, by channel: those of all pretrained weights.
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
TEST_BATCH_SIZE = 256

# Without one: a quick look at 32 pixels, made for the bundled MNIST.
PRESETS = {
    "v1": {
        "image_size": 224, "eval_resize": 256, "min_crop": 0.08, "flip": 0.5,
        "num_epochs": 90, "max_steps": 0, "batch_size": 256, "lr": 0.1, "schedule": "step", "warmup_epochs": 0,
        "weight_decay": 1e-4, "norm_weight_decay": 1e-4, "nesterov": False, "zero_init": False,
    },
    "v2": {
        "image_size": 176, "eval_size": 224, "eval_resize": 232, "min_crop": 0.08, "flip": 0.5,
        "num_epochs": 600, "max_steps": 0, "batch_size": 1024, "lr": 0.125, "schedule": "cosine", "warmup_epochs": 5,
        "weight_decay": 2e-5, "norm_weight_decay": 0.0, "nesterov": False, "zero_init": False,
        "label_smoothing": 0.1, "mixup": 0.2, "cutmix": 1.0, "trivial_augment": True, "erase": 0.1, "repeats": 4,
        "ema_decay": 0.9989, "ema_every": 32,
    },
}  # fmt: skip


def parse_args():
    parser = launch.ArgumentParser(__doc__)
    count, size, real = launch.at_least(0), launch.at_least(1), launch.at_least(0.0, float)
    part, flag = launch.at_least(0.0, float, below=1.0), argparse.BooleanOptionalAction
    parser.add_argument("--preset", choices=PRESETS, help="torchvision's recipe for ImageNet; flags beside it count")
    add = parser.add_argument_group("data").add_argument
    add("--dataset", default=BUNDLED_MNIST, help="Hub id, or folder of parquet files or of <split>/<class>/ images")
    add("--synthetic", action="store_true", help="random images of 1000 classes that lie on the device, for speed")
    add("--skip_bad_images", action="store_true", help="read all images first, and leave out what cannot be decoded")
    add("--num_workers", type=count, help="processes that decode (default: chosen for the machine)")
    add("--image_size", type=size, default=32, help="pixels of a side in training")
    add("--eval_size", type=count, default=0, help="pixels of a side in the test; 0: image_size")
    add("--eval_resize", type=count, default=0, help="shorter side before the middle is cut out; 0: eval_size")
    add = parser.add_argument_group("augmentation").add_argument
    add("--min_crop", type=launch.at_least(0.01, float, below=1.01), default=0.85, help="smallest area of a crop")
    add("--flip", type=launch.at_least(0.0, float, below=1.01), default=0.0, help="probability of a mirror image")
    add("--trivial_augment", action=flag, default=False, help="one random operation at random strength")
    add("--erase", type=part, default=0.0, help="probability of an erased rectangle")
    add("--mixup", type=real, default=0.0, help="alpha of the Beta distribution; 0: off")
    add("--cutmix", type=real, default=0.0, help="alpha of the Beta distribution; 0: off; with mixup: half of each")
    add("--repeats", type=size, default=1, help="augmented copies of a sample in one update")
    add = parser.add_argument_group("model").add_argument
    url = ResNet50_Weights.IMAGENET1K_V2.url
    add("--pretrained", nargs="?", const=url, metavar="FILE|URL", help="weights to begin with; no name: torchvision's")
    add("--zero_init", action=flag, default=True, help="begin with residual blocks that do nothing")
    add("--bn", choices=("local", "sync"), default="local", help="sync: statistics over all processes, on GPUs")
    add("--compile", action="store_true", help="torch.compile the model")
    add = parser.add_argument_group("training").add_argument
    add("--num_epochs", type=size, default=1, help="passes over the training images")
    add("--max_steps", type=count, default=150, help="optimizer updates, instead of num_epochs; 0: off")
    add("--batch_size", type=size, default=64, help="of one optimizer update, over all processes together")
    add("--gradient_accumulation_steps", type=size, default=1, help="micro-batches of a process in one update")
    add("--lr", type=real, default=0.1, help="highest learning rate for a batch of 256; scaled by the batch size")
    add("--schedule", choices=("cosine", "step"), default="cosine", help="step: a tenth after each 30 epochs")
    add("--warmup_epochs", type=real, default=0.02, help="in which the learning rate rises")
    add("--weight_decay", type=real, default=5e-5, help="of SGD")
    add("--norm_weight_decay", type=real, default=0.0, help="weight decay of BatchNorm and of the biases")
    add("--nesterov", action=flag, default=True, help="momentum 0.9 by Nesterov's rule")
    add("--label_smoothing", type=part, default=0.0, help="share of the label that all classes have alike")
    add("--ema_decay", type=part, default=0.0, help="moving average of the weights; 0: none")
    add("--ema_every", type=size, default=1, help="updates between two steps of the moving average")
    add("--seed", type=launch.at_least(0, below=2**31), default=0, help="of weights, data order and augmentation")
    parser.add_run_flags(log_every=10)
    parser.set_defaults(**PRESETS.get(parser.parse_known_args()[0].preset, {}))
    args = parser.parse_args()
    args.eval_size = args.eval_size or args.image_size
    args.eval_resize = max(args.eval_resize, args.eval_size)
    return args


class ResNet50(ResNet):
    """torchvision's resnet50, keys and all, that takes bytes and returns a loss for each sample."""

    def __init__(self, num_classes: int, zero_init: bool = False, label_smoothing: float = 0.0):
        super().__init__(Bottleneck, [3, 4, 6, 3], num_classes, zero_init_residual=zero_init)
        self.label_smoothing = label_smoothing
        for name, values in (("mean", MEAN), ("std", STD)):
            self.register_buffer(name, torch.tensor(values)[:, None, None], persistent=False)

    def forward(self, images, labels=None, partners=None, share=1.0):
        """images: uint8, or float, 0 to 255 (N, 3, H, W); labels: (N,); partners: labels of what is mixed in (N,).

        Returns logits (N, classes); with labels: losses (N,), predictions (N,), and how many classes were thought
        likelier than the right one (N,), computed inside each replica of nn.DataParallel.
        """
        logits = super().forward((images.to(self.mean.dtype) - self.mean) / self.std)
        if labels is None:
            return logits
        logits, smoothing = logits.to(self.mean.dtype), self.label_smoothing if self.training else 0.0
        losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
        if share < 1:  # else nothing is mixed in
            others = F.cross_entropy(logits, partners, reduction="none", label_smoothing=smoothing)
            losses = share * losses + (1 - share) * others
        return losses, logits.argmax(1), (logits > logits.gather(1, labels[:, None])).sum(1)


def lr_factor(step: int, schedule: str, warmup_steps: float, steps_per_epoch: int, total_steps: int) -> float:
    """Share of the highest learning rate after `step` updates: a linear rise, then half a cosine, or stairs."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if schedule == "step":
        return 0.1 ** (step // (30 * steps_per_epoch))
    return 0.5 + 0.5 * math.cos(math.pi * (step - warmup_steps) / max(total_steps - warmup_steps, 1))


@torch.no_grad()
def evaluate(model, batches, accelerator, stop_signal, num_classes: int = 0) -> dict | None:
    """Loss, top-1 and top-5 accuracy, each sample counted once; None if a signal came.

    With num_classes: F1 and confusion matrix too, and the 24 samples of largest loss: (loss, index, prediction, label).
    """
    model.eval()
    stats, top5, predictions, labels, worst = SampleStats(accelerator), SampleStats(accelerator), [], [], []
    for batch in batches:
        with accelerator.autocast():  # for the moving average, which `prepare` has not seen
            losses, predicted, likelier = model(batch.images, batch.labels)
        stats.add(losses, predicted == batch.labels, batch.indices)
        top5.add(losses, likelier < 5, batch.indices)
        predictions.append(predicted)
        labels.append(batch.labels)
        if num_classes:
            columns = (column.tolist() for column in (losses, batch.indices, predicted, batch.labels))
            worst = sorted([*worst, *zip(*columns, strict=True)])[-24:]
        if stop_signal.agreed():
            return None
    result = {**stats.reduce(), "top5_accuracy": top5.reduce()["accuracy"]}
    if num_classes:
        predictions, labels = (gather_predictions(accelerator, each) for each in (predictions, labels))
        result |= classification_metric(num_classes).compute(predictions=predictions, references=labels)
        result["worst"] = sorted(gather_object(worst))[:-25:-1]
    return result


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args)
    stop_signal = launch.StopSignal(accelerator)
    tracker = Tracker(accelerator, args)
    accumulation = args.gradient_accumulation_steps
    share = args.batch_size // (accelerator.num_processes * accumulation)
    if share < 2 or (share % 2 and (args.mixup or args.cutmix)) or args.batch_size % args.repeats:
        stop(
            f"--batch_size {args.batch_size} makes micro-batches of {share}: BatchNorm needs 2 images or more, mixup "
            f"and cutmix an even number, and --repeats {args.repeats} must divide the batch"
        )
    if args.bn == "sync" and accelerator.device.type != "cuda":
        stop("--bn sync is made for GPUs alone by PyTorch: leave it out here")

    splits = None if args.synthetic else load_splits(args.dataset)
    train_loader, test_loader, data = images.make_loaders(args, splits, accelerator)
    data, classes = launch.same_on_all(accelerator, data), train_loader.classes
    train_sampler = GlobalSampler(
        train_loader.labels, args.batch_size, accelerator, args.seed, accumulation, drop_last=True, repeats=args.repeats
    )
    test_sampler = GlobalSampler(test_loader.labels, TEST_BATCH_SIZE, accelerator)
    steps_per_epoch = len(train_sampler)
    if steps_per_epoch == 0:
        stop(f"--batch_size {args.batch_size} is more than the {len(train_loader.labels)} training images")
    total_steps = args.max_steps or args.num_epochs * steps_per_epoch
    num_epochs, warmup_steps = -(-total_steps // steps_per_epoch), args.warmup_epochs * steps_per_epoch

    model = ResNet50(len(classes), args.zero_init and not args.pretrained, args.label_smoothing)
    if args.pretrained:
        load_pretrained(model, args.pretrained, head="fc")
    if args.bn == "sync":
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = model.to(accelerator.device, memory_format=torch.channels_last)
    average = get_ema_multi_avg_fn(args.ema_decay)
    ema = AveragedModel(model, multi_avg_fn=average, use_buffers=True) if args.ema_decay else None
    lr = args.lr * args.batch_size / 256
    accelerator.print(f"learning rate {lr:.4g} = {args.lr:g} x {args.batch_size} / 256")
    groups = [
        {"params": [weight for weight in model.parameters() if weight.ndim > 1], "weight_decay": args.weight_decay},
        {"params": [each for each in model.parameters() if each.ndim == 1], "weight_decay": args.norm_weight_decay},
    ]
    optimizer = torch.optim.SGD(groups, lr, momentum=0.9, nesterov=args.nesterov, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_factor(step, args.schedule, warmup_steps, steps_per_epoch, total_steps)
    )
    if args.compile:
        model.compile()
    model, optimizer, scheduler = accelerator.prepare(launch.data_parallel(model, accelerator), optimizer, scheduler)
    model.forward_sync_buffers = False  # DDP's: the statistics of process 0 alone; see average_batch_norms

    facts = {"data": data["fingerprint"], "steps_per_epoch": steps_per_epoch, "total_steps": total_steps}
    checkpoints = Checkpoints(accelerator, args, facts)
    step, extra, saved_stats = checkpoints.load(model, optimizer, scheduler, ema)
    best_accuracy = extra.get("best_accuracy", 0.0)
    stats = SampleStats(accelerator, saved_stats)
    topology = launch.announce(accelerator, args, steps_per_epoch, total_steps, data)
    if step == total_steps and tracker.is_complete():
        accelerator.print(f"all {total_steps} updates are done: nothing to do")
        return accelerator.end_training()
    profiler = Profiler(accelerator, args, model, optimizer, total_steps - step)
    tracker.start(step, total_steps, steps_per_epoch, extra.get("metrics_bytes", 0), topology, data)

    def save():
        stats.check()
        extra = {"best_accuracy": best_accuracy, "metrics_bytes": tracker.metrics_bytes()}
        checkpoints.save(step, model, optimizer, scheduler, stats.state(), extra, ema)

    # DDP averages over the processes and accelerator.backward divides by the accumulation steps: undo both, and divide
    # the sum of the losses by the samples of the update.
    undo = accelerator.num_processes * accumulation

    # A run resumed at the end of an epoch finds no batch left in it, and begins with its evaluation.
    for epoch in range(max(step - 1, 0) // steps_per_epoch, num_epochs):
        model.train()
        pieces = train_sampler.pieces(epoch, first_update=step - epoch * steps_per_epoch)
        for micro_step, batch in enumerate(tracker.timed(profiler.waits(train_loader.load(pieces, epoch)))):
            mixed, partners, own = images.mix(batch.images, args.mixup, args.cutmix, args.seed, step)
            weigh_batch_norms(model, micro_step % accumulation, accumulation)
            with accelerator.accumulate(model):
                losses, predicted, _ = model(mixed, batch.labels, batch.labels[partners], own)
                accelerator.backward(losses.sum() * (undo / batch.update_size))
                optimizer.step()
            stats.add(losses, predicted == batch.labels, batch.indices % len(train_loader.labels), step)
            if not accelerator.sync_gradients:
                continue
            average_batch_norms(model, accelerator)
            lr = optimizer.param_groups[0]["lr"]
            scheduler.step()
            model.zero_grad()
            step += 1  # updates done: the one number that says where the run is
            profiler.step()
            if ema is not None and step % args.ema_every == 0:
                if step <= warmup_steps:
                    ema.n_averaged.zero_()  # begins anew, with a copy
                ema.update_parameters(accelerator.unwrap_model(model))
            epoch_ends = step % steps_per_epoch == 0 or step == total_steps
            if step % args.log_every == 0 or epoch_ends:
                tracker.log("train", step, epoch + 1, {**stats.reduce(), "lr": lr})
            if step == total_steps or (step % args.checkpoint_every == 0 if args.checkpoint_every else epoch_ends):
                save()
            if stop_signal.agreed():
                save()
                stop_signal.leave(step)
            if step == total_steps:
                break
        shown_classes, averaged = len(classes) if epoch + 1 == num_epochs else 0, {}
        result = evaluate(model, test_loader.load(test_sampler.pieces()), accelerator, stop_signal, shown_classes)
        if ema is not None and result is not None:
            averaged = evaluate(ema, test_loader.load(test_sampler.pieces()), accelerator, stop_signal)
        if result is None or averaged is None:
            save()
            stop_signal.leave(step)
        result |= {f"ema_{name}": value for name, value in averaged.items()}
        best_accuracy = max(best_accuracy, result["accuracy"])
        shown = ("loss", "accuracy", "top5_accuracy", "ema_accuracy", "ema_top5_accuracy", "samples")
        tracker.log("test", step, epoch + 1, {name: result[name] for name in shown if name in result})

    folder = Path(args.output_dir)
    save_model(accelerator, model, folder / "model.safetensors")
    if ema is not None:
        save_model(accelerator, ema.module, folder / "model_ema.safetensors")
    worst = result.pop("worst")
    if accelerator.is_main_process and not args.synthetic:
        plot_confusion(result["confusion"], classes, folder / "confusion.png")
        titles = [f"{classes[label]}, taken for {classes[guess]}\nloss {loss:.2f}" for loss, _, guess, label in worst]
        plot_images([test_loader.reader.read(row) for _, row, _, _ in worst], titles, folder / "worst_predictions.png")
    tracker.finish(step, result, best_accuracy=best_accuracy, checkpoint_time_s=round(checkpoints.save_time_s, 4))


if __name__ == "__main__":
    main()
