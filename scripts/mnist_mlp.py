"""A multi-layer perceptron on MNIST: the smallest complete training script, for any topology.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/mnist_mlp.py
    accelerate launch --config_file accelerate_configs/ddp.yaml scripts/mnist_mlp.py --batch_size 1024

98.19 % test accuracy after 4 epochs, 4 s of training on one core of a 2.8 GHz Xeon; torch 2.15, accelerate 1.15.
One-cycle schedule: L. N. Smith and N. Topin, https://arxiv.org/abs/1708.07120.
"""

import sys
from pathlib import Path

import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds utils from any folder, without an install

from utils import launch, stop
from utils.checkpoint import Checkpoints, save_model
from utils.data import BUNDLED_MNIST, GlobalBatches, describe, load_grey_image, load_images, random_uniform
from utils.metrics import SampleStats, classification_metric, gather_predictions
from utils.profiling import Profiler
from utils.tracking import Tracker

# Mean and standard deviation of the pixels of the 60,000 training images, 0 to 255.
MEAN, STD = 33.3184, 78.5675
TEST_BATCH_SIZE = 2000
ACTIVATIONS = {"silu": F.silu, "relu": F.relu}


def parse_args():
    parser = launch.ArgumentParser(__doc__)
    count, size, real = launch.at_least(0), launch.at_least(1), launch.at_least(0.0, float)
    add = parser.add_argument_group("data").add_argument
    add("--dataset", default=BUNDLED_MNIST, help="Hub id, or folder of parquet files or of <split>/<class>/ images")
    add("--num_workers", type=count, default=0, help="threads that decode the images, once; 0: none")
    add = parser.add_argument_group("model").add_argument
    add("--hidden", type=size, default=192, help="hidden units")
    add("--activation", choices=ACTIVATIONS, default="silu", help="smooth, so that rounding does not grow; or relu")
    add("--dropout", type=launch.at_least(0.0, float, below=1.0), default=0.0, help="share of hidden units left out")
    add("--dtype", choices=("float32", "float64"), default="float32", help="float64: to compare topologies to 1e-12")
    add = parser.add_argument_group("training").add_argument
    add("--num_epochs", type=size, default=4, help="passes over the training images")
    add("--max_steps", type=count, default=0, help="optimizer updates, instead of num_epochs; 0: off")
    add("--batch_size", type=size, default=256, help="of one optimizer update, over all processes together")
    add("--gradient_accumulation_steps", type=size, default=1, help="micro-batches of a process in one update")
    add("--optimizer", choices=("adamw", "sgd"), default="adamw", help="sgd: without momentum")
    add("--lr", type=real, default=6e-3, help="highest learning rate of the one-cycle schedule")
    add("--weight_decay", type=real, default=0.1, help="of the optimizer")
    add("--seed", type=launch.at_least(0, below=2**31), default=0, help="of weights, data order and dropout")
    parser.add_run_flags(log_every=100)
    add = parser.add_argument_group("instead of training").add_argument
    add("--predict", nargs="+", metavar="IMAGE", help="classify images with the model in --output_dir")
    return parser.parse_args()


class MLP(nn.Module):
    def __init__(self, num_inputs, hidden, num_classes, activation="silu", dropout=0.0):
        super().__init__()
        self.fc1 = nn.Linear(num_inputs, hidden)
        self.fc2 = nn.Linear(hidden, num_classes)
        self.activation, self.dropout = ACTIVATIONS[activation], dropout

    def forward(self, images, labels=None, keep_if=None):
        """images: uint8 (N, C, H, W); keep_if: uniform numbers (N, hidden) that decide on dropout.

        Returns logits (N, classes); with labels (N,): losses (N,) and predictions (N,), computed inside each replica of
        nn.DataParallel, so that the first GPU gathers two numbers a sample and no logits.
        """
        x = images.flatten(1).to(self.fc1.weight.dtype).sub_(MEAN).mul_(1 / STD)
        x = self.activation(self.fc1(x))
        if keep_if is not None:
            x = x * (keep_if >= self.dropout) / (1 - self.dropout)
        logits = self.fc2(x)
        if labels is None:
            return logits
        return F.cross_entropy(logits, labels, reduction="none"), logits.argmax(1)


@torch.no_grad()
def evaluate(model, batches, accelerator, stop_signal, metric=None) -> dict | None:
    """Loss, accuracy and what `metric` adds, each test sample counted once; None if a signal came."""
    model.eval()
    stats, predictions, references = SampleStats(accelerator), [], []
    for batch in batches.epoch():
        losses, predicted = model(batch.images, batch.labels)
        stats.add(losses, predicted == batch.labels, batch.indices)
        predictions.append(predicted)
        references.append(batch.labels)
        if stop_signal.agreed():
            return None
    result = stats.reduce()
    if metric is not None:
        predictions, references = (gather_predictions(accelerator, each) for each in (predictions, references))
        result |= metric.compute(predictions=predictions, references=references)
    return result


def predict(args):
    """Load model.safetensors into the bare MLP and name the digit in each image: white on black, of any size."""
    file = Path(args.output_dir or "") / "model.safetensors"
    if not file.is_file():
        stop(f"--predict needs the --output_dir of a finished run: there is no {file}")
    weights = safetensors.torch.load_file(file)
    (hidden, num_inputs), (num_classes, _) = weights["fc1.weight"].shape, weights["fc2.weight"].shape
    model = MLP(num_inputs, hidden, num_classes, args.activation).to(weights["fc1.weight"].dtype)
    model.load_state_dict(weights, strict=True)
    for path in args.predict:
        probabilities = model(load_grey_image(path, int(num_inputs**0.5))).softmax(1)[0]
        print(f"{path}: {int(probabilities.argmax())} ({probabilities.max():.1%})")


def main():
    args = parse_args()
    if args.predict:
        return predict(args)
    accelerator = launch.make_accelerator(args, cpu_threads=1)  # matrices this small lose by a second thread
    stop_signal = launch.StopSignal(accelerator)
    tracker = Tracker(accelerator, args)

    train_data, test_data = load_images(args.dataset, args.num_workers)
    data = launch.same_on_all(accelerator, describe(args.dataset, train_data, test_data))
    accumulation = args.gradient_accumulation_steps
    train_batches = GlobalBatches(train_data, args.batch_size, accelerator, args.seed, accumulation)
    test_batches, steps_per_epoch = GlobalBatches(test_data, TEST_BATCH_SIZE, accelerator), len(train_batches)
    total_steps = args.max_steps or args.num_epochs * steps_per_epoch
    num_epochs = -(-total_steps // steps_per_epoch)

    num_inputs, num_classes = train_data.images[0].numel(), len(train_data.classes)
    model = MLP(num_inputs, args.hidden, num_classes, args.activation, args.dropout)
    model = launch.data_parallel(model.to(getattr(torch, args.dtype)), accelerator)
    make_optimizer = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[args.optimizer]
    optimizer = make_optimizer(model.parameters(), args.lr, weight_decay=args.weight_decay, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps, cycle_momentum=False)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    facts = {"data": data["fingerprint"], "steps_per_epoch": steps_per_epoch, "total_steps": total_steps}
    checkpoints = Checkpoints(accelerator, args, facts)
    step, extra, saved_stats = checkpoints.load(model, optimizer, scheduler)
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
        checkpoints.save(step, model, optimizer, scheduler, stats.state(), extra)

    # DDP divides by the processes and accelerator.backward by the accumulation steps, which is wrong for a smaller last
    # update: undo both, and divide the sum of the losses by the samples of the update.
    undo = accelerator.num_processes * accumulation

    # A run resumed at the end of an epoch finds no batch left in it, and begins with its evaluation.
    for epoch in range(max(step - 1, 0) // steps_per_epoch, num_epochs):
        model.train()
        for batch in tracker.timed(profiler.waits(train_batches.epoch(epoch, step - epoch * steps_per_epoch))):
            keep_if = random_uniform(args.seed, step, batch.indices, (args.hidden,)) if args.dropout else None
            with accelerator.accumulate(model):
                losses, predicted = model(batch.images, batch.labels, keep_if)
                accelerator.backward(losses.sum() * (undo / batch.update_size))
                optimizer.step()
            stats.add(losses, predicted == batch.labels, batch.indices, step)
            if not accelerator.sync_gradients:
                continue
            lr = optimizer.param_groups[0]["lr"]
            scheduler.step()
            model.zero_grad()  # Accelerate's optimizer.zero_grad takes 0.1 ms more
            step += 1  # updates done: the one number that says where the run is
            profiler.step()
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
        metric = classification_metric(num_classes) if epoch + 1 == num_epochs else None
        result = evaluate(model, test_batches, accelerator, stop_signal, metric)
        if result is None:
            save()
            stop_signal.leave(step)
        best_accuracy = max(best_accuracy, result["accuracy"])
        tracker.log("test", step, epoch + 1, {name: result[name] for name in ("loss", "accuracy", "samples")})

    save_model(accelerator, model, Path(args.output_dir) / "model.safetensors")
    tracker.finish(step, result, best_accuracy=best_accuracy, checkpoint_time_s=round(checkpoints.save_time_s, 4))


if __name__ == "__main__":
    main()
