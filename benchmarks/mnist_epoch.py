"""One epoch of MNIST.

    python benchmarks/mnist_epoch.py

Seconds of the training loop of one epoch on the CPU: 60,000 images in batches of 64 over all processes, an MLP of
784-192-10, AdamW and a one-cycle schedule, one thread per process.

- mnist_mlp.py: the script, unchanged, with its log, the order of the data, what it needs to resume, and without the
  checkpoint at its end
- loop over tensors: a plain PyTorch loop over normalised images in memory, on two processes with
  DistributedDataParallel. It logs nothing and cannot be resumed
- PyTorch's MNIST example: the same loop with the data as that example reads them. A DataLoader takes one image after
  the other as a PIL image, through ToTensor and Normalize, and the loss is printed every 10 batches
- DDP loop of blog posts: the same transforms, DataLoader and DistributedSampler, and DistributedDataParallel
"""

import functools
import sys
import time
from pathlib import Path

import torch
from PIL import Image
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchvision import transforms

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from scripts import mnist_mlp

BATCH, HIDDEN, LR = 64, 192, 6e-3
OURS, TENSORS = "mnist_mlp.py", "loop over tensors"
EXAMPLE, BLOG = "PyTorch's MNIST example", "DDP loop of blog posts"


def parse_args():
    return common.make_parser(__doc__, rounds=3, dataset=True).parse_args()


class PilImages(Dataset):
    """MNIST as torchvision gives it: an image is made and transformed when it is asked for."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor):
        self.images, self.labels = images.squeeze(1), labels
        normalize = transforms.Normalize((mnist_mlp.MEAN / 255,), (mnist_mlp.STD / 255,))
        self.transform = transforms.Compose([transforms.ToTensor(), normalize])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.images[index].numpy())), int(self.labels[index])


def train(batches, steps: int, print_every: int | None = None) -> float:
    """Seconds of a plain loop over batches of normalised images and labels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, 10))
    optimizer = torch.optim.AdamW(model.parameters(), LR, weight_decay=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, steps, cycle_momentum=False)
    if distributed.is_initialized():
        model = DistributedDataParallel(model)
        distributed.barrier()
    began = time.perf_counter()
    for i, (images, labels) in enumerate(batches):
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if print_every and i % print_every == 0:
            print(f"{i}/{steps} loss {loss.item():.6f}", file=sys.stderr)
    return time.perf_counter() - began


def over_tensors(dataset: str) -> float:
    images, labels = normalized(dataset)
    rank, processes = (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    parts = [batch[rank::processes] for batch in order.split(BATCH)]
    return train(((images[part], labels[part]) for part in parts), len(parts))


@functools.cache
def normalized(dataset: str) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = mnist_mlp.load_images(dataset)[0].tensors
    return (images.float() - mnist_mlp.MEAN) / mnist_mlp.STD, labels


def as_in_the_example(dataset: str) -> float:
    loader = DataLoader(PilImages(*mnist_mlp.load_images(dataset)[0].tensors), BATCH)
    return train(loader, len(loader), print_every=10)


def as_in_blogs(dataset: str) -> float:
    data = PilImages(*mnist_mlp.load_images(dataset)[0].tensors)
    loader = DataLoader(data, BATCH // distributed.get_world_size(), sampler=DistributedSampler(data))
    return train(loader, len(loader))


def script(dataset: str) -> float:
    flags = ["--dataset", dataset, "--batch_size", BATCH, "--hidden", HIDDEN, "--lr", LR, "--num_epochs", 1]
    summary, _ = common.run_script("mnist_mlp", *flags)
    return common.training_s(summary)


def worker(args) -> dict[str, list[float]]:
    ways = {OURS: script, TENSORS: over_tensors}
    common.take_turns({way: functools.partial(run, args.dataset) for way, run in ways.items()}, 1)  # warm-up
    ways |= {BLOG: as_in_blogs} if distributed.is_initialized() else {EXAMPLE: as_in_the_example}
    return common.take_turns({way: functools.partial(run, args.dataset) for way, run in ways.items()}, args.rounds)


def measure(args) -> dict:
    configs = {"1 process": "cpu", "2 processes": "cpu_ddp"}
    return {on: common.launch_workers(config, __file__) for on, config in configs.items()}


def report(measured) -> list[str]:
    return [common.compare("on", measured.items(), "s", OURS, "{:.2f}")]


if __name__ == "__main__":
    common.main(parse_args(), measure, report, worker)
