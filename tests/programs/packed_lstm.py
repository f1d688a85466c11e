"""A packed LSTM that classifies sequences of different lengths."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.run import Run


def pad(items):
    """Sequences float (n, longest, 1), their lengths int64 (n,) and labels int64 (n,)."""
    sequences, labels = zip(*items, strict=True)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    return pad_sequence(sequences, batch_first=True), lengths, torch.tensor(labels)


class Classifier(nn.Module):
    def __init__(self, hidden=16, num_classes=3):
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, sequences, lengths):
        packed = pack_padded_sequence(sequences, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (last, _) = self.lstm(packed)
        return self.head(last[-1])


def make_waves(count):
    """Sine waves of three frequencies, float (5 to 15, 1), with their labels."""
    return [((torch.arange(5.0 + i % 11) * (0.5 + i % 3) + i).sin()[:, None], i % 3) for i in range(count)]


def main():
    parser = flags.ArgumentParser(__doc__)
    parser.add_argument("--gradient_accumulation_steps", type=flags.positive_int, default=1)
    parser.add_run_flags(log_every=1)
    args = parser.parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    waves = make_waves(42)
    train_loader = GlobalLoader(waves[:29], 7, accelerator, seed=args.seed, collate_fn=pad)
    test_loader = GlobalLoader(waves[29:], 6, accelerator, collate_fn=pad)

    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.start(train_loader, test_loader, 2 * len(train_loader), checkpoint={"model": model, "optimizer": optimizer})

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            sequences, lengths, labels = batch.data
            with accelerator.accumulate(model):
                losses = F.cross_entropy(model(sequences, lengths), labels, reduction="none")
                accelerator.backward(batch.mean_loss(losses))
                optimizer.step()
                optimizer.zero_grad()
            run.log_train(batch, loss=losses)
        model.eval()
        metrics = run.new_metrics()
        with torch.no_grad():
            for batch in run.test_batches(test_loader):
                sequences, lengths, labels = batch.data
                metrics.add(batch, accuracy=model(sequences, lengths).argmax(1) == labels)
        run.log_test(metrics.reduce())
    run.finish()


if __name__ == "__main__":
    main()
