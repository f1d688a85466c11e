"""In the style of timm's train.py: train_one_epoch and validate, an average of the weights, a schedule by updates."""

import argparse
import logging
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

_logger = logging.getLogger("train")


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0.0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n


class ModelEma:
    def __init__(self, model, decay):
        self.decay = decay
        self.module = make_model()
        self.module.load_state_dict(model.state_dict())
        self.module.eval()

    @torch.no_grad()
    def update(self, model):
        for average, value in zip(self.module.parameters(), model.parameters(), strict=True):
            average.lerp_(value, 1 - self.decay)


class CosineScheduler:
    """timm's own schedulers are not torch's: they set the rate from the number of updates."""

    def __init__(self, optimizer, updates, warmup):
        self.optimizer, self.updates, self.warmup = optimizer, updates, warmup
        self.base = [group["lr"] for group in optimizer.param_groups]

    def step_update(self, num_updates):
        factor = min(1.0, (num_updates + 1) / self.warmup)
        factor *= 0.5 * (1 + math.cos(math.pi * min(1.0, num_updates / self.updates)))
        for group, lr in zip(self.optimizer.param_groups, self.base, strict=True):
            group["lr"] = lr * factor


def make_model():
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 5))


def make_data(length, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(length, 3, 4, 4, generator=generator)
    return TensorDataset(images, images.mean((2, 3)).argmax(1) + (images[:, 0, 0, 0] > 0.5))


def reduce_sums(meters):
    totals = torch.tensor([[meter.sum, meter.count] for meter in meters], dtype=torch.float64)
    dist.all_reduce(totals, op=dist.ReduceOp.SUM)
    return [total / count for total, count in totals.tolist()]


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args, lr_scheduler, model_ema):
    losses = AverageMeter()
    model.train()
    num_updates = epoch * len(loader)
    for input, target in loader:
        output = model(input)
        loss = loss_fn(output, target)
        optimizer.zero_grad()
        loss.backward()
        if args.clip_grad is not None:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        optimizer.step()
        model_ema.update(model.module)
        num_updates += 1
        lr_scheduler.step_update(num_updates=num_updates)
        losses.update(loss.item(), len(target))
    return {"loss": reduce_sums([losses])[0]}


def validate(model, loader, loss_fn, rank, world_size):
    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    with torch.inference_mode():
        for number, (input, target) in enumerate(loader):
            if number % world_size != rank:
                continue
            output = model(input)
            losses.update(loss_fn(output, target).item(), len(target))
            top1.update((output.argmax(1) == target).float().mean().item(), len(target))
    loss, accuracy = reduce_sums([losses, top1])
    return {"loss": loss, "top1": 100 * accuracy}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--clip-grad", type=float, default=1.0)
    parser.add_argument("--smoothing", type=float, default=0.1)
    parser.add_argument("--model-ema-decay", type=float, default=0.9)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group(backend="gloo")
    torch.manual_seed(42 + rank)
    model = make_model()
    dataset_train, dataset_eval = make_data(800, 1), make_data(150, 2)
    sampler = DistributedSampler(dataset_train)
    loader_train = DataLoader(dataset_train, args.batch_size, sampler=sampler, drop_last=True)
    loader_eval = DataLoader(dataset_eval, args.batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=2e-5)
    model = DistributedDataParallel(model, broadcast_buffers=False)
    model_ema = ModelEma(model.module, args.model_ema_decay)
    lr_scheduler = CosineScheduler(optimizer, updates=args.epochs * len(loader_train), warmup=4)
    train_loss_fn = nn.CrossEntropyLoss(label_smoothing=args.smoothing)
    validate_loss_fn = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train_metrics = train_one_epoch(
            epoch, model, loader_train, optimizer, train_loss_fn, args, lr_scheduler, model_ema
        )
        metrics = validate(model, loader_eval, validate_loss_fn, rank, world_size)
        ema_metrics = validate(model_ema.module, loader_eval, validate_loss_fn, rank, world_size)
        if rank == 0:
            _logger.info(f"Train: {epoch} Loss: {train_metrics['loss']:.4f}")
            _logger.info(f"Test: {epoch} Loss: {metrics['loss']:.4f} Acc@1: {metrics['top1']:.3f}")
            _logger.info(f"Test (EMA): {epoch} Loss: {ema_metrics['loss']:.4f} Acc@1: {ema_metrics['top1']:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
