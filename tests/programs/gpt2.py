"""GPT-2 of transformers on sequences of different lengths: its own mean loss, exact on any topology."""

import sys
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.run import Run


def pad(sequences):
    """What GPT-2 takes, int64 (n, longest). Labels of -100 do not count in its loss."""
    ids = pad_sequence(sequences, batch_first=True)
    mask = pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def count_targets(data):
    """What the loss is a mean over: the tokens to predict in each sequence, (n,); all but the first."""
    return (data["labels"][:, 1:] != -100).sum(1)


def main():
    parser = flags.ArgumentParser(__doc__)
    parser.add_argument("--gradient_accumulation_steps", type=flags.positive_int, default=1)
    parser.add_run_flags(log_every=1)
    args = parser.parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    sequences = [(i + (1 + i % 4) * torch.arange(3 + i % 7)) % 20 for i in range(42)]  # each counts in its own steps
    text = {"collate_fn": pad, "loss_weights": count_targets}
    train_loader = GlobalLoader(sequences[:29], 7, accelerator, seed=args.seed, **text)
    test_loader = GlobalLoader(sequences[29:], 6, accelerator, **text)

    # No dropout here: it is drawn per micro-batch, so its numbers depend on how many of these a step has.
    sizes = {"vocab_size": 20, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.start(train_loader, test_loader, 2 * len(train_loader), checkpoint={"model": model, "optimizer": optimizer})

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            with accelerator.accumulate(model):
                loss = model(**batch.data).loss  # a scalar: the mean over the tokens of this micro-batch
                accelerator.backward(batch.mean_loss(loss))
                optimizer.step()
                optimizer.zero_grad()
            run.log_train(batch, loss=loss)
        model.eval()
        metrics = run.new_metrics()
        with torch.no_grad():
            for batch in run.test_batches(test_loader):
                metrics.add(batch, loss=model(**batch.data).loss)
        run.log_test(metrics.reduce())
    run.finish()


if __name__ == "__main__":
    main()
