"""Programs whose verdict somebody would believe, as changes of unusual/with_ddp.py and others: what prove must say."""

from typing import NamedTuple

from tests.prove_training.foreign.unusual_edits import BACKWARD, GROUP, LOSS, MODEL, STEP


class Believed(NamedTuple):
    """A program, and the verdict on it.

    Args:
        program: a file of this folder, or of unusual/.
        edits: old and new text.
        code: the exit code.
        words: of the verdict.
        kind: the section of MISTAKES.md that is named first, with _ for -; "" where nothing is wrong.
        processes: to compare with.
        resume_flags: with which it resumes.
    """

    program: str
    edits: list[tuple[str, str]]
    code: int
    words: str
    kind: str = ""
    processes: tuple[int, ...] = (2,)
    resume_flags: str | None = None


WRAPPED = "    model = DistributedDataParallel(model)\n"
SAMPLER = "    sampler = DistributedSampler(data)\n    loader = DataLoader(data, batch_size=16, sampler=sampler)\n"
SET_EPOCH = "        sampler.set_epoch(epoch)\n"
ZERO = "            optimizer.zero_grad()\n"
LOOP = f"        for x, y in loader:\n{ZERO}{LOSS}{BACKWARD}"
PARAMETERS = "            for parameter in model.parameters():\n                "
OWN_SUM = "    for parameter in model.parameters():\n        dist.all_reduce(parameter.grad)\n"
SUMMED = f"            loss.backward()\n{PARAMETERS}dist.all_reduce(parameter.grad)\n"


def accumulated(count: int, length: int) -> list[tuple[str, str]]:
    """The loop of most posts: a step after each `count` micro-batches, whatever is left at the end of an epoch."""
    loop = (
        f"        for i, (x, y) in enumerate(loader):\n{LOSS}            (loss / {count}).backward()\n"
        f"            if (i + 1) % {count} == 0:\n    {STEP}    {ZERO}"
    )
    return [("randn(300, 4)", f"randn({length}, 4)"), (LOOP, loop)]


BELIEVED = {
    **{
        f"the rest of an epoch in windows of {count}": Believed(
            "with_ddp", accumulated(count, 938 * 16), 1, "has micro-batches of two epochs", "leftover"
        )
        for count in (4, 5, 6)
    },
    "windows that fill all epochs": Believed("with_ddp", accumulated(7, 938 * 16), 3, "nothing wrong found"),
    "windows of more micro-batches than are read": Believed(
        "with_ddp",
        accumulated(8, 938 * 16),
        3,
        "cannot tell: no step after 14 backward passes",
    ),
    "disjoint parts of unequal size": Believed(
        "with_ddp",
        [
            (
                SAMPLER,
                "    parts = [(0, 200), (200, 300)] if world_size == 2 else [(0, 300)]\n"
                "    loader = DataLoader(TensorDataset(*data[slice(*parts[rank])]), batch_size=16 // world_size)\n",
            ),
            (SET_EPOCH, "        torch.manual_seed(epoch)\n"),
        ],
        3,
        "nothing wrong found; not compared: samples, gradients and steps; the same averaged gradients",
    ),
    "a sum that is not divided": Believed(
        "with_ddp",
        [(WRAPPED, ""), ("            loss.backward()\n", SUMMED)],
        1,
        "added up, and not divided by 2",
        "summed",
    ),
    "a sum of own batches that is not divided": Believed(
        "generated_data",
        [("DistributedDataParallel(nn.Linear(3, 1))", "nn.Linear(3, 1)"), (".backward()\n", f".backward()\n{OWN_SUM}")],
        1,
        "not divided by 2",
        "summed",
    ),
    "an average by hand of own batches": Believed(
        "generated_data",
        [
            ("DistributedDataParallel(nn.Linear(3, 1))", "nn.Linear(3, 1)"),
            (".backward()\n", f".backward()\n{OWN_SUM}        parameter.grad /= dist.get_world_size()\n"),
        ],
        3,
        "nothing wrong found; not compared: samples and gradients; the same averaged gradients",
    ),
    "DataParallel that is prepared": Believed(
        "with_accelerate", [(f"= {MODEL}", f"= nn.DataParallel({MODEL})")], 1, "nn.DataParallel gives", "data_parallel"
    ),
    "DataParallel alone": Believed(
        "plain",
        [("    optimizer = ".strip(), "model = nn.DataParallel(model)\noptimizer = ")],
        3,
        "cannot tell: nn.DataParallel (plain.py:10) trains on one process with all its GPUs, and knows no others. To "
        "change first: take nn.DataParallel out",
    ),
    "a model over several devices": Believed(
        "plain",
        [
            (
                "model = nn.Linear(6, 1)",
                'model = nn.Sequential(nn.Linear(6, 6).to("cuda:0"), nn.Linear(6, 1).to("cuda:1"))',
            ),
            ("model(x), y", 'model(x.to("cuda:0")), y.to("cuda:1")'),
        ],
        3,
        "cannot tell: the layers of its model are on several devices (plain.py:14)",
    ),
    "a mistake on one process": Believed(
        "plain", [("        optimizer.zero_grad()\n", "")], 1, "the gradients of the step before", "zero_grad"
    ),
    "no optimizer": Believed(
        "plain",
        [
            ("optimizer = torch.optim.SGD(model.parameters(), lr=0.05)\n", ""),
            ("        optimizer.zero_grad()\n", ""),
            ("        optimizer.step()\n", ""),
            ("range(3)", "range(10**9)"),
        ],
        3,
        "cannot tell: 10 backward passes, and no optimizer of torch.optim",
    ),
    "a model that is only called": Believed(
        "plain",
        [
            ("optimizer = torch.optim.SGD(model.parameters(), lr=0.05)\n", "torch.set_grad_enabled(False)\n"),
            ("        optimizer.zero_grad()\n", ""),
            ("        optimizer.step()\n", ""),
            ("        loss.backward()\n", ""),
            ("range(3)", "range(10**9)"),
        ],
        3,
        "cannot tell: the script has no optimizer: it calls a model, and trains none",
    ),
    "as many processes as the machine has GPUs": Believed(
        "with_ddp",
        [(GROUP, '    dist.init_process_group("gloo", rank=rank, world_size=torch.cuda.device_count())\n')],
        1,
        "asks for 1 process",
        "local_rank",
        (2, 3),
    ),
    "a batch size that is no int": Believed(
        "with_ddp",
        [("batch_size=16", "batch_size=16 / world_size")],
        2,
        "fails: on one process, with_ddp.py:18: ValueError: batch_size should be a positive integer",
    ),
    "an average by hand of some parameters": Believed(
        "with_ddp",
        [(WRAPPED, ""), ("            loss.backward()\n", SUMMED.replace("model", "model[0]"))],
        1,
        "2.weight and 1 other: ranks 0 and 1 have different gradients at the step",
        "not_reduced",
    ),
}
