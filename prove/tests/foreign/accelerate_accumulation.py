"""In the style of Accelerate's by_feature/gradient_accumulation: accumulate, clipping where gradients are complete."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def get_dataloaders(batch_size):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(700, 10, generator=generator)
    targets = inputs[:, :3].prod(1, keepdim=True) + 0.1 * torch.randn(700, 1, generator=generator)
    train, test = TensorDataset(inputs[:600], targets[:600]), TensorDataset(inputs[600:], targets[600:])
    return DataLoader(train, shuffle=True, batch_size=batch_size), DataLoader(test, batch_size=batch_size)


def training_function(config, args):
    gradient_accumulation_steps = args.gradient_accumulation_steps
    accelerator = Accelerator(gradient_accumulation_steps=gradient_accumulation_steps)
    set_seed(config["seed"])
    train_dataloader, eval_dataloader = get_dataloaders(config["batch_size"])
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    num_training_steps = len(train_dataloader) * config["num_epochs"] // gradient_accumulation_steps
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_training_steps)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(config["num_epochs"]):
        model.train()
        for inputs, targets in train_dataloader:
            with accelerator.accumulate(model):
                output = model(inputs)
                loss = nn.functional.mse_loss(output, targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

        model.eval()
        losses = []
        with torch.no_grad():
            for inputs, targets in eval_dataloader:
                errors = nn.functional.mse_loss(model(inputs), targets, reduction="none")
                losses.append(accelerator.gather_for_metrics(errors))
        accelerator.print(f"epoch {epoch}: mse {torch.cat(losses).mean().item():.5f}")
    accelerator.wait_for_everyone()
    accelerator.save(accelerator.unwrap_model(model).state_dict(), "model.pt")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    training_function({"lr": 0.05, "num_epochs": 3, "seed": 42, "batch_size": 16}, parser.parse_args())


if __name__ == "__main__":
    main()
