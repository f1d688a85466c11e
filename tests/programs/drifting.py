"""Processes that drift apart: each counts the result of a test for itself."""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import launch
from utils.loader import GlobalLoader
from utils.run import Run


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", default="run")
    args = parser.parse_args()
    args.batch_size = 8
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)
    loader = GlobalLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 1)), 8, accelerator, seed=0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.start(loader, None, 12, checkpoint={"model": model, "optimizer": optimizer})
    for epoch in run.epochs():
        for batch in run.batches(loader, epoch):
            inputs, targets = batch.data
            losses = (model(inputs) - targets).square().squeeze(1)
            accelerator.backward(batch.mean_loss(losses))
            optimizer.step()
            optimizer.zero_grad()
            run.log_train(batch, loss=losses)
        run.log_test({"loss": float(losses.mean())})
    run.finish()


if __name__ == "__main__":
    main()
