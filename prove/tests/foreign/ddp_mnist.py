"""In the style of PyTorch's mnist example, made parallel by hand: train(), test(), StepLR, sums over processes."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Digits(Dataset):
    def __init__(self, train, transform=None):
        generator = torch.Generator().manual_seed(1 + train)
        patterns = torch.randn(10, 1, 10, 10, generator=torch.Generator().manual_seed(7))
        self.targets = torch.randint(10, (900 if train else 200,), generator=generator)
        self.data = patterns[self.targets] + torch.randn(len(self.targets), 1, 10, 10, generator=generator)
        self.transform = transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image = self.data[index]
        return (self.transform(image) if self.transform else image), self.targets[index]


def random_shift(image):
    return torch.roll(image, int(torch.randint(-1, 2, ())), dims=-1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, 1)
        self.bn1 = nn.BatchNorm2d(8)
        self.dropout1 = nn.Dropout(0.25)
        self.fc1 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        x = self.dropout1(x)
        return F.log_softmax(self.fc1(torch.flatten(x, 1)), dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = F.nll_loss(output, target)
        loss.backward()
        optimizer.step()
        if batch_idx % args.log_interval == 0 and dist.get_rank() == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(train_loader)}]\tLoss: {loss.item():.6f}")


def test(model, device, test_loader):
    model.eval()
    totals = torch.zeros(3)
    with torch.no_grad():
        for data, target in test_loader:
            data, target = data.to(device), target.to(device)
            output = model.module(data)
            totals[0] += F.nll_loss(output, target, reduction="sum")
            totals[1] += output.argmax(dim=1).eq(target).sum()
            totals[2] += len(target)
    dist.all_reduce(totals)
    test_loss, correct, count = totals.tolist()
    if dist.get_rank() == 0:
        print(f"\nTest set: Average loss: {test_loss / count:.4f}, Accuracy: {correct:.0f}/{count:.0f}\n")


def main():
    parser = argparse.ArgumentParser(description="PyTorch MNIST Example")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N")
    parser.add_argument("--epochs", type=int, default=3, metavar="N")
    parser.add_argument("--lr", type=float, default=0.5, metavar="LR")
    parser.add_argument("--gamma", type=float, default=0.7, metavar="M")
    parser.add_argument("--log-interval", type=int, default=5, metavar="N")
    parser.add_argument("--save-model", action="store_true", default=True)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")

    dataset1, dataset2 = Digits(train=True, transform=random_shift), Digits(train=False)
    sampler = DistributedSampler(dataset1)
    train_loader = DataLoader(dataset1, batch_size=args.batch_size, sampler=sampler, num_workers=1)
    share = torch.utils.data.Subset(dataset2, range(rank, len(dataset2), world_size))
    test_loader = DataLoader(share, batch_size=args.batch_size)

    model = nn.parallel.DistributedDataParallel(Net().to(device))
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)
        train(args, model, device, train_loader, optimizer, epoch)
        test(model, device, test_loader)
        scheduler.step()

    if args.save_model and rank == 0:
        torch.save(model.module.state_dict(), "mnist_cnn.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
