"""Models of other libraries: transformers, peft, timm and torchvision, a packed LSTM, a VAE and L-BFGS.

    accelerate launch --config_file accelerate_configs/cpu.yaml examples/others_models.py --model packed_lstm

One loop for all: `train` needs a model, its losses and its data. Each entry of MODELS is what a user of that library
writes; some need `pip install transformers peft timm`. The steps are small and of unequal size.
"""

import functools
import string
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import Dataset, TensorDataset
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.ops import MultiScaleRoIAlign, box_iou

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of utils/

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.run import Run

TRAIN, TEST = 29, 13  # samples: the last step of an epoch and the last batch of a test have a single one


class Data(NamedTuple):
    """Two datasets, and the arguments of GlobalLoader for them."""

    train: Dataset | list
    test: Dataset | list
    options: dict


def split(samples, **options) -> Data:
    return Data(samples[:TRAIN], samples[TRAIN:], options)


def train(accelerator, args, model, losses, data, test_metrics=None, lr=0.01):
    """Two epochs of AdamW.

    Args:
        losses: from (model, batch), the loss of each sample (n,) or a mean over the micro-batch (), and what to log.
        test_metrics: from (model, batch), the metrics of a test; by default what is logged of the training.
    """
    run = Run(accelerator, args)
    train_loader = GlobalLoader(data.train, 7, accelerator, seed=args.seed, **data.options)
    test_loader = GlobalLoader(data.test, 6, accelerator, **data.options)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.start(train_loader, test_loader, 2 * len(train_loader), checkpoint={"model": model, "optimizer": optimizer})
    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            with accelerator.accumulate(model):
                loss, logged = losses(model, batch)
                accelerator.backward(batch.mean_loss(loss))
                optimizer.step()
                optimizer.zero_grad()
            run.log_train(batch, **logged)
        model.eval()
        metrics = run.new_metrics()
        with torch.no_grad():
            for batch in run.test_batches(test_loader):
                metrics.add(batch, **(test_metrics(model, batch) if test_metrics else losses(model, batch)[1]))
        run.log_test(metrics.reduce())
    run.finish()


# GPT-2 of transformers on sequences of different lengths: its own mean loss over tokens.
# No dropout here and in BERT: it is drawn per micro-batch, so its numbers depend on how many of these a step has.


def own_mean_loss(model, batch):
    loss = model(**batch.data).loss
    return loss, {"loss": loss}


def gpt2(accelerator, args, adapt=lambda model: model):
    from transformers import GPT2Config, GPT2LMHeadModel

    def pad(sequences):
        """What GPT-2 takes, int64 (n, longest). Labels of -100 do not count in its loss."""
        ids = pad_sequence(sequences, batch_first=True)
        mask = pad_sequence([torch.ones_like(sequence) for sequence in sequences], batch_first=True)
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}

    def count_targets(data):
        """What the loss is a mean over: the tokens to predict in each sequence, (n,); all but the first."""
        return (data["labels"][:, 1:] != -100).sum(1)

    sequences = [(i + (1 + i % 4) * torch.arange(3 + i % 7)) % 20 for i in range(TRAIN + TEST)]
    sizes = {"vocab_size": 20, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    train(accelerator, args, adapt(model), own_mean_loss, split(sequences, collate_fn=pad, loss_weights=count_targets))


def gpt2_lora(accelerator, args):
    """GPT-2 with adapters of peft, beside which all weights are frozen."""
    from peft import LoraConfig, get_peft_model

    gpt2(accelerator, args, lambda model: get_peft_model(model, LoraConfig(target_modules=["c_attn"])))


# BERT of transformers learns masked words; the masks are those of its collator, the same on any topology.


class MaskedTexts(Dataset):
    """Masked as items, where what is random is seeded by (seed, epoch, item). Masked as batches, by the collator as
    collate_fn, the texts would have other masks on other numbers of processes."""

    def __init__(self, texts):
        from tokenizers import Tokenizer, models
        from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

        vocabulary = {word: i for i, word in enumerate(["[PAD]", "[MASK]", "[UNK]", *string.ascii_lowercase])}
        words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", mask_token="[MASK]")
        self.texts, self.mask = texts, DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return {name: row[0] for name, row in self.mask([{"input_ids": self.texts[index]}]).items()}


def bert(accelerator, args):
    from transformers import BertConfig, BertForMaskedLM

    def pad(items):
        padding = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        return {name: pad_sequence([item[name] for item in items], True, padding[name]) for name in padding}

    def count_masked(data):
        """What the loss is a mean over: the masked tokens of each text, (n,)."""
        return (data["labels"] != -100).sum(1)

    texts = [[3 + (i + j * (1 + i % 3)) % 26 for j in range(8 + i % 7)] for i in range(TRAIN + TEST)]
    options = {"collate_fn": pad, "loss_weights": count_masked}
    sizes = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    model = BertForMaskedLM(BertConfig(**sizes, **dropout, num_attention_heads=2))
    data = Data(MaskedTexts(texts[:TRAIN]), MaskedTexts(texts[TRAIN:]), options)
    train(accelerator, args, model, own_mean_loss, data)


# A vision transformer of timm with mixup in the loop and timm's loss for soft targets, a mean over the batch.


def timm_vit(accelerator, args):
    import timm
    from timm.loss import SoftTargetCrossEntropy

    def make_images(count):
        """Grey images (count, 1, 8, 8) of noise with a brighter quarter, and which one that is, (count,)."""
        images, labels = torch.rand(count, 1, 8, 8), torch.arange(count) % 4
        for image, label in zip(images, labels, strict=True):
            image[0].view(2, 4, 2, 4)[label // 2, :, label % 2] += 0.5
        return TensorDataset(images, labels)

    data = Data(make_images(TRAIN), make_images(TEST), {})
    all_images, all_labels = (tensor.to(accelerator.device) for tensor in data.train.tensors)
    soft_cross_entropy = SoftTargetCrossEntropy()

    def losses(model, batch):
        images, labels = batch.data
        # Partners from all images: those within a micro-batch, as timm's Mixup takes them, depend on the topology.
        partners = (batch.rand() * TRAIN).long()
        share = batch.rand(1, stream=1)  # of the partner; Beta(1, 1)
        images = images + share[:, :, None, None] * (all_images[partners] - images)
        targets = (1 - share) * F.one_hot(labels, 4) + share * F.one_hot(all_labels[partners], 4)
        loss = soft_cross_entropy(model(images), targets)
        return loss, {"loss": loss}

    def accuracy(model, batch):
        images, labels = batch.data
        return {"accuracy": model(images).argmax(1) == labels}

    sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "embed_dim": 16, "depth": 2, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=4, **sizes)
    train(accelerator, args, model, losses, data, accuracy)


# A packed LSTM that classifies sequences of different lengths.


class PackedLSTM(nn.Module):
    def __init__(self, hidden=16, num_classes=3):
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, sequences, lengths):
        packed = pack_padded_sequence(sequences, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, (last, _) = self.lstm(packed)
        return self.head(last[-1])


def packed_lstm(accelerator, args):
    def pad(items):
        """Sequences float (n, longest, 1), their lengths int64 (n,) and labels int64 (n,)."""
        sequences, labels = zip(*items, strict=True)
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        return pad_sequence(sequences, batch_first=True), lengths, torch.tensor(labels)

    def losses(model, batch):
        sequences, lengths, labels = batch.data
        loss = F.cross_entropy(model(sequences, lengths), labels, reduction="none")
        return loss, {"loss": loss}

    def accuracy(model, batch):
        sequences, lengths, labels = batch.data
        return {"accuracy": model(sequences, lengths).argmax(1) == labels}

    # Sine waves of three frequencies, float (5 to 15, 1), with their labels.
    waves = [((torch.arange(5.0 + i % 11) * (0.5 + i % 3) + i).sin()[:, None], i % 3) for i in range(TRAIN + TEST)]
    train(accelerator, args, PackedLSTM(), losses, split(waves, collate_fn=pad), accuracy)


# Faster R-CNN of torchvision: images and targets as lists, and a dict of losses that are means over the batch.


def faster_rcnn(accelerator, args):
    def make_squares(count):
        """Grey images (1, 32, 32) with one or two brighter squares, and their targets."""
        items = []
        for i in range(count):
            corners = torch.tensor([[2.0 + i % 5, 3 + i % 3], [18, 16 - i % 7]][: 1 + i % 2])
            boxes, image = torch.cat([corners, corners + 8 + i % 4], 1), torch.rand(1, 32, 32) / 2
            for left, top, right, bottom in boxes.int().tolist():
                image[:, top:bottom, left:right] += 0.5
            items.append((image, {"boxes": boxes, "labels": torch.ones(len(boxes), dtype=torch.int64)}))
        return items

    def losses(model, batch):
        named = model(*batch.data)  # scalars by name: means over the boxes that the model samples
        loss = sum(named.values())
        return loss, {"loss": loss, **named}

    def overlap(model, batch):
        images, targets = batch.data
        found = [detected["boxes"] for detected in model(images)]
        pairs = zip(found, targets, strict=True)
        overlaps = [box_iou(boxes, target["boxes"]).sum() / max(1, len(boxes)) for boxes, target in pairs]
        return {"iou": torch.stack(overlaps)}

    backbone = nn.Sequential(nn.Conv2d(1, 8, 3, 2, 1), nn.SiLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.SiLU())
    backbone.out_channels = 8
    anchors, pool = AnchorGenerator(((8, 12),), ((1.0,),)), MultiScaleRoIAlign(["0"], 3, 2)
    sizes = {"min_size": 32, "max_size": 32, "image_mean": [0.5], "image_std": [0.3]}
    sizes |= {"rpn_post_nms_top_n_train": 32, "box_detections_per_img": 5}
    data = Data(make_squares(TRAIN), make_squares(TEST), {"collate_fn": lambda items: tuple(zip(*items, strict=True))})
    model = FasterRCNN(backbone, num_classes=2, rpn_anchor_generator=anchors, box_roi_pool=pool, **sizes)
    train(accelerator, args, model, losses, data, overlap, lr=0.002)


# A variational autoencoder: the noise of its latent code is a function of the sample, on any topology.


class VAE(nn.Module):
    latent = 2

    def __init__(self, num_pixels=16, hidden=32):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(num_pixels, hidden), nn.SiLU(), nn.Linear(hidden, 2 * self.latent))
        self.decoder = nn.Sequential(nn.Linear(self.latent, hidden), nn.SiLU(), nn.Linear(hidden, num_pixels))

    def forward(self, images, noise):
        mean, log_variance = self.encoder(images).chunk(2, 1)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


def vae(accelerator, args):
    def losses(model, batch):
        """The two terms of the negative evidence bound, in nats per image, both (n,)."""
        (images,) = batch.data
        logits, mean, log_variance = model(images, batch.randn(VAE.latent))
        reconstruction = F.binary_cross_entropy_with_logits(logits, images, reduction="none").sum(1)
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
        return reconstruction + divergence, {"reconstruction_loss": reconstruction, "divergence_loss": divergence}

    images = torch.where(torch.arange(TRAIN + TEST)[:, None] * torch.arange(1, 17) % 7 < 3, 1.0, 0.0)  # stripes
    train(accelerator, args, VAE(), losses, Data(TensorDataset(images[:TRAIN]), TensorDataset(images[TRAIN:]), {}))


# L-BFGS evaluates the loss of a step several times: its closure goes through all micro-batches of the step. It has a
# loop of its own, and no test.


def lbfgs(accelerator, args):
    run = Run(accelerator, args)
    inputs = torch.linspace(-2, 2, 31)[:, None]
    train_loader = GlobalLoader(TensorDataset(inputs, (3 * inputs).sin()), len(inputs), accelerator, seed=args.seed)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe")
    model, optimizer = accelerator.prepare(model, optimizer)
    run.start(train_loader, None, total_steps=10, checkpoint={"model": model, "optimizer": optimizer})

    def losses_of(model, batch):
        inputs, targets = batch.data
        return (model(inputs) - targets).square().squeeze(1)

    def closure(batches):
        """The mean loss of the step over all processes, so that all take the same path; leaves its gradient."""
        optimizer.zero_grad()
        metrics = run.new_metrics()
        for batch in run.seeded(batches):
            with accelerator.accumulate(model):
                losses = losses_of(model, batch)
                accelerator.backward(batch.mean_loss(losses))
            metrics.add(batch, loss=losses)
        return metrics.reduce()["loss"]

    for epoch in run.epochs():
        for batches in run.steps(train_loader, epoch):  # all micro-batches of a step, in a list
            optimizer.step(functools.partial(closure, batches))
            for batch in batches:
                with torch.no_grad():
                    run.log_train(batch, loss=losses_of(model, batch))  # after the step
    run.finish()


MODELS = {
    "gpt2": gpt2,
    "gpt2_lora": gpt2_lora,
    "bert": bert,
    "timm_vit": timm_vit,
    "packed_lstm": packed_lstm,
    "faster_rcnn": faster_rcnn,
    "vae": vae,
    "lbfgs": lbfgs,
}


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--gradient_accumulation_steps", type=flags.positive_int, default=1)
    parser.add_run_flags(log_every=1)
    return parser.parse_args()


def main():
    args = parse_args()
    MODELS[args.model](launch.make_accelerator(args, cpu_threads=1), args)


if __name__ == "__main__":
    main()
