"""Parameters with a gradient in some micro-batches or steps only or never, a complex one, and an idle model.

Which micro-batch or step it is decides, so that runs with --virtual_processes must have the same bits on any number of
processes.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import flags, launch
from utils.loader import GlobalLoader
from utils.run import Run

WORDS = 11


def parse_args():
    parser = flags.ArgumentParser(__doc__)
    add = parser.add_argument_group("training").add_argument
    add("--complex", action="store_true", help="a complex parameter")
    add(
        "--idle",
        type=int,
        default=2,
        help="micro-batch without the second model, not a process's last; -1: none",
    )
    add("--batch_size", type=int, default=24)
    add = parser.add_argument_group("length and memory", may_change=True).add_argument
    add("--gradient_accumulation_steps", type=int, default=1)
    parser.add_run_flags(log_every=1)
    return parser.parse_args()


class Net(nn.Module):
    """Two outputs for a list of words; odd micro-batches use more parameters than even ones."""

    def __init__(self, is_complex):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, 2)
        self.rare = nn.Linear(8, 2)
        self.of_odd_steps = nn.Parameter(torch.ones(8))
        self.frozen = nn.Embedding(WORDS, 1000).requires_grad_(False)  # large enough for FSDP to shard it on its own
        self.unmoved = nn.ParameterList([torch.ones(2) for _ in range(3)])
        self.unused = nn.Linear(32, 32)
        self.phase = nn.Parameter(torch.ones(8, dtype=torch.complex64)) if is_complex else None

    def forward(self, words, is_odd, step):
        x = (self.embed(words) + self.frozen(words)[..., :8]).tanh().sum(1)
        if step % 2:
            x = x * self.of_odd_steps
        if self.phase is not None:
            x = (x * self.phase).real
        # With a gradient of -0.0: one in even and one in odd micro-batches, and one in all.
        zero = -0.0 * (self.unmoved[is_odd].sum() + self.unmoved[2].sum())
        if is_odd:
            return self.head(x) + self.rare(x).sin(), zero
        return self.head(x), zero


def main():
    args = parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1, find_unused_parameters=True)
    run = Run(accelerator, args)

    words = torch.randint(WORDS, (60, 5), generator=torch.Generator().manual_seed(0))
    loader = GlobalLoader(TensorDataset(words, words.sum(1) % 2), args.batch_size, accelerator, seed=args.seed)

    state = {"model": Net(args.complex)}
    if args.idle >= 0:
        state["idle"] = nn.Linear(5, 2)
    models = [*state]
    for name in models:
        # A step without a gradient would change the weights that are not used.
        groups = [{"params": state[name].parameters()}]
        if name == "model":
            unused = [*state[name].unused.parameters()]
            rest = [parameter for parameter in state[name].parameters() if not any(parameter is p for p in unused)]
            groups = [{"params": rest}, {"params": unused, "weight_decay": 0.1}]
        optimizer = torch.optim.SGD(groups, 0.1, momentum=0.9)
        state[name], state[f"{name}_optimizer"] = accelerator.prepare(state[name], optimizer)
    run.start(loader, None, 6, checkpoint=state)

    for epoch in run.epochs():
        for batch in run.batches(loader, epoch):
            words, labels = batch.data
            with accelerator.accumulate(*(state[name] for name in models)):
                logits, zero = state["model"](words, batch.slot % 2 == 1, run.step)
                if "idle" in state and batch.slot != args.idle:
                    logits = logits + state["idle"](words / WORDS)
                losses = nn.functional.cross_entropy(logits, labels, reduction="none") + zero
                accelerator.backward(batch.mean_loss(losses))
                for name in models:
                    state[f"{name}_optimizer"].step()
                    state[f"{name}_optimizer"].zero_grad()
            run.log_train(batch, loss=losses)
    run.finish()


if __name__ == "__main__":
    main()
