"""BERT of transformers learns masked words; the masks are those of its collator, the same on any topology."""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.run import Run

WORDS = ["[PAD]", "[MASK]", "[UNK]", *"abcdefghijklmnopqrstuvwxyz"]


class MaskedTexts(Dataset):
    """Masked as items, where what is random is seeded by (seed, epoch, item). Masked as batches, by the collator as
    collate_fn, the texts would have other masks on other numbers of processes."""

    def __init__(self, texts):
        words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", mask_token="[MASK]")
        self.texts, self.mask = texts, DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return {name: row[0] for name, row in self.mask([{"input_ids": self.texts[index]}]).items()}


def pad(items):
    padding = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {name: pad_sequence([item[name] for item in items], True, padding[name]) for name in padding}


def count_masked(data):
    """What the loss is a mean over: the masked tokens of each text, (n,)."""
    return (data["labels"] != -100).sum(1)


def main():
    parser = flags.ArgumentParser(__doc__)
    parser.add_argument("--gradient_accumulation_steps", type=flags.positive_int, default=1)
    parser.add_run_flags(log_every=1)
    args = parser.parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    texts = [[3 + (i + j * (1 + i % 3)) % 26 for j in range(8 + i % 7)] for i in range(42)]
    options = {"collate_fn": pad, "loss_weights": count_masked}
    train_loader = GlobalLoader(MaskedTexts(texts[:29]), 7, accelerator, seed=args.seed, **options)
    test_loader = GlobalLoader(MaskedTexts(texts[29:]), 6, accelerator, **options)

    sizes = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}  # drawn per micro-batch: see gpt2.py
    model = BertForMaskedLM(BertConfig(**sizes, **dropout, num_attention_heads=2))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.start(train_loader, test_loader, 2 * len(train_loader), checkpoint={"model": model, "optimizer": optimizer})

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            with accelerator.accumulate(model):
                loss = model(**batch.data).loss  # a scalar: the mean over the masked tokens of this micro-batch
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
