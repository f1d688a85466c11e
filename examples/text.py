"""Next-character prediction on lines of different lengths: a GRU, a collate_fn that pads, and the mean over tokens.

    accelerate launch --config_file accelerate_configs/cpu.yaml examples/text.py

The numbers are the same with cpu_ddp.yaml, and after --resume. A metric of the library evaluate takes the predicted and
the right lines of the whole test set: `--metrics cer`, or a folder such as examples/character_error_rate.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of utils/

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.run import Run
from utils.sample_metrics import EvaluateMetrics

LETTERS = " abcdefghijklmnopqrstuvwxyz"
PAD = 0
ERROR_RATE = str(Path(__file__).with_name("character_error_rate"))


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    add = parser.add_argument_group("training").add_argument
    add("--batch_size", type=int, default=48)
    add("--lr", type=float, default=5e-3)
    add = parser.add_argument_group("length and memory", may_change=True).add_argument
    add("--num_epochs", type=int, default=2)
    add("--gradient_accumulation_steps", type=int, default=1)
    add("--metrics", nargs="+", default=[ERROR_RATE], metavar="NAME|FOLDER", help="of the library evaluate")
    parser.add_run_flags(log_every=1)
    return parser.parse_args()


def make_lines(count, start):
    """Lines such as "the quick fox jumps", of one to nine words."""
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while"]
    words += ["it", "sleeps"]
    return [" ".join(words[(start + i * j) % len(words)] for j in range(1, 2 + i % 9)) for i in range(count)]


def pad(lines):
    """Token ids int64 (n, longest line), 0 where a line is over."""
    tokens = [torch.tensor([LETTERS.index(letter) for letter in line]) for line in lines]
    return pad_sequence([line + 1 for line in tokens], batch_first=True, padding_value=PAD)


def count_targets(tokens):
    """Tokens to predict in each line, (n,): all but the first."""
    return (tokens[:, 1:] != PAD).sum(1)


class CharGRU(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS) + 1, width, padding_idx=PAD)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, len(LETTERS) + 1)

    def forward(self, tokens):
        states, _ = self.gru(self.embed(tokens))
        return self.head(states)


def to_lines(tokens):
    return ["".join(LETTERS[token - 1] for token in line if token != PAD) for line in tokens.tolist()]


def losses_and_predictions(model, tokens):
    """The mean loss and accuracy over the tokens of each line, both (n,); and the predicted tokens."""
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    count = count_targets(tokens).clamp(min=1)
    losses = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=PAD, reduction="none")
    predicted = logits.argmax(2).masked_fill(targets == PAD, PAD)
    hits = (predicted == targets) & (targets != PAD)
    return losses.sum(1) / count, hits.sum(1) / count, predicted


@torch.no_grad()
def evaluate(model, loader, run, others):
    model.eval()
    metrics = run.new_metrics()
    for batch in run.test_batches(loader):
        losses, accuracies, predicted = losses_and_predictions(model, batch.data)
        metrics.add(batch, weights=batch.weights, loss=losses, accuracy=accuracies)
        others.add(batch, to_lines(predicted), to_lines(batch.data[:, 1:]))
    return metrics.reduce() | others.compute()


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    text = {"collate_fn": pad, "loss_weights": count_targets}
    train_loader = GlobalLoader(make_lines(203, 0), args.batch_size, accelerator, seed=args.seed, **text)
    test_loader = GlobalLoader(make_lines(501, 3), 100, accelerator, **text)
    metrics = EvaluateMetrics(args.metrics, example=["one line", "another"])
    total_steps = args.num_epochs * len(train_loader)

    model = CharGRU()
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    run.start(
        train_loader,
        test_loader,
        total_steps,
        checkpoint={"model": model, "optimizer": optimizer, "scheduler": scheduler},
    )

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            with accelerator.accumulate(model):
                losses, accuracies, _ = losses_and_predictions(model, batch.data)
                accelerator.backward(batch.mean_loss(losses))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.log_train(batch, weights=batch.weights, loss=losses, accuracy=accuracies)
        run.log_test(evaluate(model, test_loader, run, metrics))
    run.finish()


if __name__ == "__main__":
    main()
