"""In the style of Accelerate's nlp_example: sentences padded to the longest of the batch, warm-up, two metrics."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

MAX_GPU_BATCH_SIZE = 16
VOCABULARY, PADDING = 50, 0


def make_dataset(length, seed):
    """Sentences of 3 to 12 words; the label says whether most of the words are in the upper half of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    dataset = []
    for _ in range(length):
        words = torch.randint(1, VOCABULARY, (int(torch.randint(3, 13, (), generator=generator)),), generator=generator)
        dataset.append({"input_ids": words, "labels": int(words.float().mean() > VOCABULARY / 2)})
    return dataset


def collate_fn(examples):
    words = nn.utils.rnn.pad_sequence([each["input_ids"] for each in examples], True, PADDING)
    return {"input_ids": words, "labels": torch.tensor([each["labels"] for each in examples])}


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16, padding_idx=PADDING)
        self.dropout = nn.Dropout(0.1)
        self.classifier = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, input_ids, labels):
        mask = (input_ids != PADDING).unsqueeze(-1)
        mean = (self.embedding(input_ids) * mask).sum(1) / mask.sum(1)
        logits = self.classifier(self.dropout(mean))
        return nn.functional.cross_entropy(logits, labels), logits


def get_linear_schedule_with_warmup(optimizer, num_warmup_steps, num_training_steps):
    def factor(step):
        if step < num_warmup_steps:
            return step / max(1, num_warmup_steps)
        return max(0.0, (num_training_steps - step) / max(1, num_training_steps - num_warmup_steps))

    return LambdaLR(optimizer, factor)


def training_function(config):
    accelerator = Accelerator()
    set_seed(config["seed"])
    train_dataloader = DataLoader(
        make_dataset(500, 1), shuffle=True, collate_fn=collate_fn, batch_size=config["batch_size"], drop_last=True
    )
    eval_dataloader = DataLoader(make_dataset(200, 2), collate_fn=collate_fn, batch_size=32)
    model = Classifier().to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=config["lr"])
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=len(train_dataloader) // 2,
        num_training_steps=len(train_dataloader) * config["num_epochs"],
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )

    for epoch in range(config["num_epochs"]):
        model.train()
        for batch in train_dataloader:
            batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
            loss, _ = model(**batch)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

        model.eval()
        hits = found = positive = seen = 0
        for batch in eval_dataloader:
            with torch.no_grad():
                _, logits = model(**batch)
            predictions = logits.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
            hits += (predictions == references).sum().item()
            found += (predictions * references).sum().item()
            positive += (predictions + references).sum().item()
            seen += len(references)
        accelerator.print(f"epoch {epoch}:", {"accuracy": hits / seen, "f1": 2 * found / max(positive, 1)})


if __name__ == "__main__":
    training_function({"lr": 2e-2, "num_epochs": 3, "seed": 42, "batch_size": MAX_GPU_BATCH_SIZE})
