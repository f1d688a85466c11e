"""In the style of torchvision's references: GradScaler and clipping, a plateau schedule, an average, early stopping."""

import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make_data(length, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(length, 1, 8, 8, generator=generator)
    return TensorDataset(images, (images[:, 0, :4].mean((1, 2)) > images[:, 0, 4:].mean((1, 2))).long())


def make_model():
    features = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(features, nn.Dropout(0.2), nn.Linear(216, 2))


class ExponentialMovingAverage:
    def __init__(self, model, decay):
        self.decay, self.module = decay, copy.deepcopy(model).eval().requires_grad_(False)

    @torch.no_grad()
    def update_parameters(self, model):
        for average, value in zip(self.module.parameters(), model.parameters(), strict=True):
            average.lerp_(value, 1 - self.decay)


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def should_stop(self, loss):
        self.bad = 0 if loss < self.best else self.bad + 1
        self.best = min(self.best, loss)
        return self.bad > self.patience


def train_one_epoch(model, criterion, optimizer, data_loader, args, model_ema, scaler):
    model.train()
    optimizer.zero_grad()
    for i, (image, target) in enumerate(data_loader):
        with torch.amp.autocast("cuda", enabled=args.amp):
            loss = criterion(model(image), target) / args.accumulate
        scaler.scale(loss).backward()
        if (i + 1) % args.accumulate == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            model_ema.update_parameters(model.module)


def evaluate(model, data_loader):
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    with torch.inference_mode():
        for image, target in data_loader:
            output = model(image)
            totals[0] += nn.functional.cross_entropy(output, target, reduction="sum").item()
            totals[1] += (output.argmax(1) == target).sum().item()
            totals[2] += len(target)
    dist.all_reduce(totals)
    return totals[0].item() / totals[2].item(), 100 * totals[1].item() / totals[2].item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--clip-grad-norm", type=float, default=1.0)
    parser.add_argument("--patience", type=int, default=5)
    parser.add_argument("--amp", type=int, default=1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = make_model()
    dataset, dataset_test = make_data(600, 1), make_data(120, 2)
    train_sampler = DistributedSampler(dataset)
    data_loader = DataLoader(dataset, args.batch_size, sampler=train_sampler, drop_last=True)
    part = Subset(dataset_test, range(rank, len(dataset_test), world_size))
    data_loader_test = DataLoader(part, args.batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=bool(args.amp))
    lr_scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    stopping = EarlyStopping(args.patience)
    model = DistributedDataParallel(model)
    model_ema = ExponentialMovingAverage(model.module, decay=0.9)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, data_loader, args, model_ema, scaler)
        loss, accuracy = evaluate(model, data_loader_test)
        ema_loss, _ = evaluate(model_ema.module, data_loader_test)
        lr_scheduler.step(loss)
        if rank == 0:
            print(f"epoch {epoch} loss {loss:.4f} accuracy {accuracy:.2f} averaged model {ema_loss:.4f}")
        if stopping.should_stop(loss):
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
