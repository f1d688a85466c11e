"""In the style of Accelerate's cv_example and by_feature/checkpointing: one cycle, gather_for_metrics, save_state."""

import argparse
import os

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset


class PetsDataset(Dataset):
    """Images of noise; the label is the quadrant that is brighter."""

    def __init__(self, length, seed):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(length, 3, 8, 8, generator=generator)
        self.labels = torch.randint(4, (length,), generator=generator)
        for image, label in zip(self.images, self.labels, strict=True):
            row, column = 4 * (label // 2), 4 * (label % 2)
            image[:, row : row + 4, column : column + 4] += 0.5

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index], "label": self.labels[index]}


def create_model():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(128, 4))


def training_function(config, args):
    accelerator = Accelerator()
    set_seed(config["seed"])
    train_dataset, eval_dataset = PetsDataset(600, seed=1), PetsDataset(150, seed=2)
    train_dataloader = DataLoader(train_dataset, shuffle=True, batch_size=config["batch_size"], num_workers=2)
    eval_dataloader = DataLoader(eval_dataset, shuffle=False, batch_size=config["batch_size"])

    model = create_model()
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=config["lr"] / 25)
    lr_scheduler = OneCycleLR(
        optimizer=optimizer,
        max_lr=config["lr"],
        epochs=config["num_epochs"],
        steps_per_epoch=len(train_dataloader),
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    starting_epoch = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        starting_epoch = int(args.resume_from_checkpoint.rsplit("_", 1)[1]) + 1

    for epoch in range(starting_epoch, config["num_epochs"]):
        model.train()
        for batch in train_dataloader:
            outputs = model(batch["image"])
            loss = nn.functional.cross_entropy(outputs, batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

        model.eval()
        accurate = 0
        num_elems = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                outputs = model(batch["image"])
            predictions = outputs.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["label"]))
            accurate_preds = predictions == references
            num_elems += accurate_preds.shape[0]
            accurate += accurate_preds.long().sum()
        accelerator.print(f"epoch {epoch}: {100 * accurate.item() / num_elems:.2f}")
        accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
    accelerator.end_training()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="checkpoints")
    parser.add_argument("--resume_from_checkpoint")
    args = parser.parse_args()
    training_function({"lr": 3e-2, "num_epochs": 3, "seed": 42, "batch_size": 16}, args)


if __name__ == "__main__":
    main()
