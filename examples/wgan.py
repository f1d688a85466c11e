"""A Wasserstein GAN on points of a ring: the critic trains in every step, the generator in every fifth.

    accelerate launch --config_file accelerate_configs/cpu.yaml examples/wgan.py

The numbers are the same with cpu_ddp.yaml, and after --resume.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of utils/

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.run import Run

CRITIC_STEPS = 5
CLIP = 0.05  # of the critic's weights, as in M. Arjovsky et al., https://arxiv.org/abs/1701.07875
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

    generator, critic = make_mlp(LATENT, 2), make_mlp(2, 1)
    g_optimizer = torch.optim.RMSprop(generator.parameters(), args.lr)
    c_optimizer = torch.optim.RMSprop(critic.parameters(), args.lr)
    generator, critic, g_optimizer, c_optimizer = accelerator.prepare(generator, critic, g_optimizer, c_optimizer)
    checkpoint = {"generator": generator, "critic": critic, "g_optimizer": g_optimizer, "c_optimizer": c_optimizer}
    run.start(train_loader, test_loader, total_steps, checkpoint=checkpoint)
    bare_critic, bare_generator = accelerator.unwrap_model(critic), accelerator.unwrap_model(generator)
    generator_parameters = list(generator.parameters())

    for epoch in run.epochs():
        generator.train()
        for batch in run.batches(train_loader, epoch):
            (real,) = batch.data
            trains_generator = run.step % CRITIC_STEPS == CRITIC_STEPS - 1
            with accelerator.accumulate(generator, critic):
                with torch.no_grad():
                    fake = bare_generator(batch.randn(LATENT))
                real_scores, fake_scores = critic(torch.cat([real, fake])).flatten().chunk(2)
                c_losses = fake_scores - real_scores
                accelerator.backward(batch.mean_loss(c_losses))
                if trains_generator:  # its forward pass follows the critic's backward pass
                    scores = bare_critic(generator(batch.randn(LATENT, stream=1))).flatten()
                    accelerator.backward(batch.mean_loss(-scores), inputs=generator_parameters)
                    g_optimizer.step()
                    g_optimizer.zero_grad()
                c_optimizer.step()
                c_optimizer.zero_grad()
                if accelerator.sync_gradients:
                    with torch.no_grad():
                        for parameter in critic.parameters():
                            parameter.clamp_(-CLIP, CLIP)
            run.log_train(batch, c_loss=c_losses)
        run.log_test(evaluate(generator, test_loader, run))
    run.finish()


if __name__ == "__main__":
    main()
