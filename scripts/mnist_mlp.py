"""A multi-layer perceptron on MNIST: the smallest complete training script, for any topology.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/mnist_mlp.py
    accelerate launch --config_file accelerate_configs/ddp.yaml scripts/mnist_mlp.py \\
        --batch_size 1024

98.19 % test accuracy after 4 epochs, 4 s of training on one core of a 2.8 GHz Xeon; torch 2.15,
accelerate 1.15.
One-cycle schedule: L. N. Smith and N. Topin, https://arxiv.org/abs/1708.07120.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

# Finds utils from any folder, without an install.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils import flags, launch
from utils.checkpoint import read_trained
from utils.datasets.images_in_memory import BUNDLED_MNIST, describe, load_grey_image, load_images
from utils.features.data_parallel import data_parallel, on_each_gpu
from utils.features.fsdp import supports_fused_step
from utils.loader import GlobalLoader
from utils.metrics import classification_metrics
from utils.run import Run

# Mean and standard deviation of the pixels of the 60,000 training images, 0 to 255.
MEAN, STD = 33.3184, 78.5675
TEST_BATCH_SIZE = 2000
ACTIVATIONS = {"silu": nn.SiLU, "relu": nn.ReLU}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    count, size, real = flags.at_least(0), flags.at_least(1), flags.at_least(0.0, float)
    part = flags.at_least(0.0, float, below=1.0)

    add = parser.add_argument_group("data").add_argument
    source = "Hub id, or folder of parquet files or of <split>/<class>/ images"
    add("--dataset", default=BUNDLED_MNIST, help=source)
    add("--num_workers", type=count, default=0, help="threads that decode the images; 0: none")

    # fixed: a resumed run must have the same values.
    add = parser.add_argument_group("model", resume_invariant=True).add_argument
    add("--hidden", type=size, default=192, help="hidden units")
    add("--activation", choices=ACTIVATIONS, default="silu", help="silu is smooth: see README")
    add("--dropout", type=part, default=0.0, help="share of the hidden units that is left out")
    add("--dtype", choices=("float32", "float64"), default="float32", help="of the parameters")

    add = parser.add_argument_group("training", resume_invariant=True).add_argument
    add("--batch_size", type=size, default=256, help="of one step, over all processes together")
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="sgd: without momentum")
    add("--lr", type=real, default=6e-3, help="highest learning rate of the one-cycle schedule")
    add("--weight_decay", type=real, default=0.1, help="of the optimizer")
    seed = flags.at_least(0, below=2**31)
    add("--seed", type=seed, default=0, help="of weights, data order and dropout")

    add = parser.add_argument_group("length and memory").add_argument
    add("--num_epochs", type=size, default=4, help="passes over the training images")
    add("--max_steps", type=count, default=0, help="steps, instead of --num_epochs; 0: off")
    micro = "micro-batches of a process in one step"
    add("--gradient_accumulation_steps", type=size, default=1, help=micro)

    parser.add_run_flags(log_every=100)

    add = parser.add_argument_group("instead of training").add_argument
    add("--predict", nargs="+", metavar="IMAGE", help="classify with the model in --output_dir")
    return parser.parse_args()


class MLP(nn.Module):
    def __init__(self, num_inputs, hidden, num_classes, activation="silu", dropout=0.0):
        super().__init__()
        self.fc1 = nn.Linear(num_inputs, hidden)
        self.activation = ACTIVATIONS[activation]()
        self.fc2 = nn.Linear(hidden, num_classes)
        self.dropout = dropout

    def forward(self, images, dropout_noise=None):
        """Logits (N, classes) of images, uint8 (N, C, H, W).

        dropout_noise: uniform random numbers (N, hidden) that decide on dropout; None: no dropout.
        """
        x = (images.flatten(1) - MEAN).mul_(1 / STD).to(self.fc1.weight.dtype)
        x = self.activation(self.fc1(x))
        if dropout_noise is not None:
            x = x * (dropout_noise >= self.dropout) / (1 - self.dropout)
        return self.fc2(x)


@on_each_gpu  # with dp.yaml, each GPU computes the losses of its own part of the batch
def losses_and_predictions(model, images, labels, dropout_noise=None):
    """One loss and one prediction a sample, both (N,)."""
    logits = model(images, dropout_noise)
    return F.cross_entropy(logits, labels, reduction="none"), logits.argmax(1)


@torch.no_grad()
def evaluate(model, loader, run, num_classes) -> dict:
    """Loss, accuracy, F1 and confusion matrix; each test sample counts once."""
    model.eval()
    metrics, predictions, references = run.new_metrics(), [], []
    for batch in run.test_batches(loader):
        images, labels = batch.data
        losses, predicted = losses_and_predictions(model, images, labels)
        metrics.add(batch, loss=losses, accuracy=predicted == labels)
        predictions.append(predicted)
        references.append(labels)
    result = metrics.reduce()
    result |= classification_metrics(run.accelerator, num_classes, predictions, references)
    return result


def predict(args):
    """Name the digit in each image, white on black and of any size, by model.safetensors."""
    file = Path(args.output_dir or "") / "model.safetensors"
    weights, arguments = read_trained(file, "fc1.weight", "fc1.bias", "fc2.bias")
    args.activation = arguments.get("activation", args.activation)
    hidden, num_inputs = weights["fc1.weight"].shape
    num_classes = len(weights["fc2.bias"])
    model = MLP(num_inputs, hidden, num_classes, args.activation).to(weights["fc1.weight"].dtype)
    model.load_state_dict(weights, strict=True)
    for path in args.predict:
        probabilities = model(load_grey_image(path, int(num_inputs**0.5))).softmax(1)[0]
        print(f"{path}: {int(probabilities.argmax())} ({probabilities.max():.1%})")


def main():
    args = parse_args()
    if args.predict:
        return predict(args)
    # One thread: matrices this small lose by a second one.
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    train_data, test_data = load_images(args.dataset, args.num_workers)
    train_loader = GlobalLoader(train_data, args.batch_size, accelerator, seed=args.seed)
    test_loader = GlobalLoader(test_data, TEST_BATCH_SIZE, accelerator)
    total_steps = args.max_steps or args.num_epochs * len(train_loader)

    num_inputs, num_classes = train_data.images[0].numel(), len(train_data.classes)
    model = MLP(num_inputs, args.hidden, num_classes, args.activation, args.dropout)
    model = data_parallel(model.to(getattr(torch, args.dtype)), accelerator)
    optimizer = OPTIMIZERS[args.optimizer](
        model.parameters(), args.lr, weight_decay=args.weight_decay, fused=supports_fused_step(accelerator)
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps, cycle_momentum=False)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    data = describe(args.dataset, train_data, test_data)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    run.start(train_loader, test_loader, total_steps, data=data, checkpoint=state)  # resumes if asked to

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            images, labels = batch.data
            dropout_noise = batch.rand(args.hidden) if args.dropout else None
            with accelerator.accumulate(model):
                losses, predicted = losses_and_predictions(model, images, labels, dropout_noise)
                accelerator.backward(batch.mean_loss(losses))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.log_train(batch, loss=losses, accuracy=predicted == labels)
        run.log_test(evaluate(model, test_loader, run, num_classes))
    run.finish()


if __name__ == "__main__":
    main()
