"""A variational autoencoder: the noise of its latent code is a function of the sample, on any topology."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.run import Run

LATENT = 2


class VAE(nn.Module):
    def __init__(self, num_pixels=16, hidden=32):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(num_pixels, hidden), nn.SiLU(), nn.Linear(hidden, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, hidden), nn.SiLU(), nn.Linear(hidden, num_pixels))

    def forward(self, images, noise):
        mean, log_variance = self.encoder(images).chunk(2, 1)
        return self.decoder(mean + noise * (log_variance / 2).exp()), mean, log_variance


def losses_of(model, batch):
    """The two terms of the negative evidence bound, in nats per image, both (n,)."""
    (images,) = batch.data
    logits, mean, log_variance = model(images, batch.randn(LATENT))
    reconstruction = F.binary_cross_entropy_with_logits(logits, images, reduction="none").sum(1)
    return reconstruction, 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)


def main():
    parser = flags.ArgumentParser(__doc__)
    parser.add_argument("--gradient_accumulation_steps", type=flags.positive_int, default=1)
    parser.add_run_flags(log_every=1)
    args = parser.parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    images = torch.where(torch.arange(42)[:, None] * torch.arange(1, 17) % 7 < 3, 1.0, 0.0)  # stripes
    train_loader = GlobalLoader(TensorDataset(images[:29]), 7, accelerator, seed=args.seed)
    test_loader = GlobalLoader(TensorDataset(images[29:]), 6, accelerator)

    model = VAE()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    run.start(train_loader, test_loader, 2 * len(train_loader), checkpoint={"model": model, "optimizer": optimizer})

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):
            with accelerator.accumulate(model):
                reconstruction, divergence = losses_of(model, batch)
                accelerator.backward(batch.mean_loss(reconstruction + divergence))
                optimizer.step()
                optimizer.zero_grad()
            run.log_train(batch, reconstruction_loss=reconstruction, divergence_loss=divergence)
        model.eval()
        metrics = run.new_metrics()
        with torch.no_grad():
            for batch in run.test_batches(test_loader):
                reconstruction, divergence = losses_of(model, batch)
                metrics.add(batch, reconstruction_loss=reconstruction, divergence_loss=divergence)
        run.log_test(metrics.reduce())
    run.finish()


if __name__ == "__main__":
    main()
