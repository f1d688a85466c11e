"""A GAN on points of a ring: two models, two optimizers, and noise that belongs to the sample.

    accelerate launch --config_file accelerate_configs/cpu.yaml examples/gan.py

The numbers are the same with cpu_ddp.yaml, and after --resume.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of utils/

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.run import Run

LATENT = 4


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    add = parser.add_argument_group("training").add_argument
    add("--batch_size", type=int, default=60)
    add("--lr", type=float, default=1e-3)
    add = parser.add_argument_group("length and memory", may_change=True).add_argument
    add("--num_epochs", type=int, default=2)
    add("--gradient_accumulation_steps", type=int, default=1)
    parser.add_run_flags(log_every=1)
    return parser.parse_args()


def make_ring(count):
    angle = torch.arange(count, dtype=torch.get_default_dtype()) * 2.399963
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], dim=1))


def make_mlp(num_inputs, num_outputs):
    return nn.Sequential(nn.Linear(num_inputs, 32), nn.SiLU(), nn.Linear(32, num_outputs))


@torch.no_grad()
def evaluate(generator, loader, run):
    """How far the generated points are from the ring, on average."""
    generator.eval()
    metrics = run.new_metrics()
    for batch in run.test_batches(loader):
        radius = generator(batch.randn(LATENT)).norm(dim=1)
        metrics.add(batch, ring_error=(radius - 1).abs())
    return metrics.reduce()


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)

    train_loader = GlobalLoader(make_ring(250), args.batch_size, accelerator, seed=args.seed)
    test_loader = GlobalLoader(make_ring(61), 60, accelerator)
    total_steps = args.num_epochs * len(train_loader)

    generator, discriminator = make_mlp(LATENT, 2), make_mlp(2, 1)
    g_optimizer = torch.optim.Adam(generator.parameters(), args.lr, betas=(0.5, 0.99))
    d_optimizer = torch.optim.Adam(discriminator.parameters(), 2 * args.lr, betas=(0.5, 0.99))
    generator, discriminator, g_optimizer, d_optimizer = accelerator.prepare(
        generator, discriminator, g_optimizer, d_optimizer
    )
    checkpoint = {
        "generator": generator,
        "discriminator": discriminator,
        "g_optimizer": g_optimizer,
        "d_optimizer": d_optimizer,
    }
    run.start(train_loader, test_loader, total_steps, checkpoint=checkpoint)
    # Without DDP around it: the generator's loss goes through it, and leaves its gradients alone.
    bare_discriminator = accelerator.unwrap_model(discriminator)
    generator_parameters = list(generator.parameters())

    for epoch in run.epochs():
        generator.train()
        for batch in run.batches(train_loader, epoch):
            (real,) = batch.data
            with accelerator.accumulate(generator, discriminator):
                fake = generator(batch.randn(LATENT))
                # Both losses use the weights from before the step, so the parts of a batch
                # may come one after another.
                scores = discriminator(torch.cat([real, fake.detach()])).flatten()
                d_losses = F.softplus(-scores[: len(batch)]) + F.softplus(scores[len(batch) :])
                accelerator.backward(batch.mean_loss(d_losses))
                g_losses = F.softplus(-bare_discriminator(fake).flatten())
                accelerator.backward(batch.mean_loss(g_losses), inputs=generator_parameters)
                d_optimizer.step()
                g_optimizer.step()
                d_optimizer.zero_grad()
                g_optimizer.zero_grad()
            run.log_train(batch, d_loss=d_losses, g_loss=g_losses)
        run.log_test(evaluate(generator, test_loader, run))
    run.finish()


if __name__ == "__main__":
    main()
