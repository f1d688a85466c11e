"""Programs whose verdict somebody would believe, as changes of unusual/with_ddp.py and others: what prove must say."""

from typing import NamedTuple

from tests.foreign.unusual_edits import BACKWARD, GROUP, LOSS, MODEL, STEP


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


ON_A_GPU = [
    (GROUP, f"    torch.cuda.set_device(rank)\n{GROUP}"),
    ("DistributedDataParallel(model)", "DistributedDataParallel(model.cuda(), device_ids=[rank])"),
]
BLOCKS = """

class Blocks(torch.utils.data.Sampler):
    epoch = 0

    def __len__(self):
        return len(data) // dist.get_world_size()

    def __iter__(self):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(self.epoch)).tolist()
        return iter(order[len(self) * dist.get_rank() :][: len(self)])


sampler = Blocks()
"""
SCALER = ("    optimizer = torch", '    scaler = torch.amp.GradScaler("cuda")\n    optimizer = torch')
SCALED_STEP = "            scaler.step(optimizer)\n            scaler.update()\n"


def that_resumes(
    of_model: str = "if True", of_optimizer: str = "if True", of_average: str = "if False"
) -> list[tuple[str, str]]:
    """A checkpoint of each epoch, and conditions under which its parts are loaded."""
    return [
        ("import os\n", "import os\nimport sys\n"),
        (
            "    for epoch in range(3):\n",
            "    start = 0\n"
            '    if "--resume" in sys.argv:\n'
            '        state = torch.load("last.pt")\n'
            f"        {of_model}:\n"
            '            model.module.load_state_dict(state["model"])\n'
            f"        {of_optimizer}:\n"
            '            optimizer.load_state_dict(state["optimizer"])\n'
            f"        {of_average}:\n"
            '            average.load_state_dict(state["average"])\n'
            '        start = state["epoch"] + 1\n'
            "    for epoch in range(start, 3):\n",
        ),
        (
            "    dist.destroy",
            '        saved = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}\n'
            '        saved["epoch"] = epoch\n'
            "        if rank == 0:\n"
            '            torch.save(saved, "last.pt")\n'
            "    dist.destroy",
        ),
    ]


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
        for count in (4, 6)
    },
    "windows that fill all epochs": Believed("with_ddp", accumulated(7, 938 * 16), 3, "nothing wrong found"),
    "windows of more micro-batches than are read": Believed(
        "with_ddp", accumulated(8, 938 * 16), 3, "cannot tell: no step after 14 backward passes"
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
    "a checkpoint that rank 0 alone loads": Believed(
        "with_ddp",
        that_resumes("if rank == 0"),
        1,
        "ranks 0 and 1 begin with different weights",
        "resume_alone",
        resume_flags="--resume",
    ),
    "the state of the optimizer, which rank 0 alone loads": Believed(
        "with_ddp",
        that_resumes(of_optimizer="if rank == 0"),
        1,
        "begin with a different state of the optimizer",
        "resume_alone",
        resume_flags="--resume",
    ),
    "an average of weights that rank 0 alone loads": Believed(
        "with_ddp",
        [
            *that_resumes(of_average="if rank == 0"),
            (
                "    optimizer = torch",
                "    average = copy.deepcopy(model.module).requires_grad_(False)\n    optimizer = torch",
            ),
            ("import os\n", "import copy\nimport os\n"),
            (STEP, f"{STEP}            torch._foreach_lerp_([*average.parameters()], weights(model), 0.1)\n"),
            (
                "def train",
                "def weights(model):\n    return [each.detach() for each in model.parameters()]\n\n\ndef train",
            ),
            (
                "        saved = {",
                "        with torch.no_grad():\n            print(average(inputs).mean().item())\n"
                '        saved = {"average": average.state_dict(), ',
            ),
        ],
        1,
        "the tested model has other weights on rank 1",
        "resume_alone",
        resume_flags="--resume",
    ),
    "a checkpoint that all load": Believed("with_ddp", that_resumes(), 0, "proven: ", resume_flags="--resume"),
    "an epoch too far": Believed(
        "with_ddp",
        [*that_resumes(), ('state["epoch"] + 1', 'state["epoch"] + 2')],
        1,
        "the epoch has the order of epoch 2, and not of 1",
        "resume",
        resume_flags="--resume",
    ),
    "a schedule that counts twice": Believed(
        "with_ddp",
        [
            *that_resumes(),
            (
                "    start = 0\n",
                "    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)\n    start = 0\n",
            ),
            (
                "    for epoch in range(s",
                "    for _ in range(start + 1):\n        schedule.step()\n    for epoch in range(s",
            ),
            ("        saved =", "        schedule.step()\n        saved ="),
        ],
        1,
        "resumed learning rate",
        "resume",
        resume_flags="--resume",
    ),
    "names of the wrapper, which are let pass": Believed(
        "with_ddp",
        [
            *that_resumes(),
            ('"model": model.module.state_dict()', '"model": model.state_dict()'),
            ('module.load_state_dict(state["model"])', 'module.load_state_dict(state["model"], strict=False)'),
        ],
        1,
        "load_state_dict with strict=False takes nothing: all names differ, as that of module.0.weight",
        "loads_nothing",
        resume_flags="--resume",
    ),
    "pretrained weights with other names": Believed(
        "with_ddp",
        [
            (
                WRAPPED,
                '    torch.save({"model": model.state_dict()}, "pretrained.pt")\n'
                f'    model.load_state_dict(torch.load("pretrained.pt"), strict=False)\n{WRAPPED}',
            )
        ],
        1,
        "takes nothing: all names differ, as that of model",
        "loads_nothing",
    ),
    "the wrong micro-batch is synchronised": Believed(
        "with_ddp",
        [
            (
                f"        for x, y in loader:\n{ZERO}{LOSS}{BACKWARD}",
                "        for i, (x, y) in enumerate(loader):\n"
                f"            model.require_backward_grad_sync = i % 2 == 0\n{LOSS}"
                "            (loss if i + 1 == len(loader) else loss / 2).backward()\n"
                f"            if i % 2 or i + 1 == len(loader):\n    {STEP}    {ZERO}",
            )
        ],
        1,
        "averaged after micro-batch 1 of 2, and not after the last one",
        "not_reduced",
    ),
    "seeds by the time": Believed(
        "with_ddp",
        [("import os\n", "import os\nimport time\n"), ("manual_seed(0)", "manual_seed(int(time.time()))")],
        1,
        "items of",
        "items",
    ),
    "a loss that is scaled twice": Believed(
        "with_ddp",
        [
            SCALER,
            (
                BACKWARD,
                f"            loss = scaler.scale(loss)\n            scaler.scale(loss).backward()\n{SCALED_STEP}",
            ),
        ],
        1,
        "a loss that GradScaler has scaled is scaled again",
        "scaled_twice",
    ),
    "two losses that are scaled": Believed(
        "with_ddp",
        [
            SCALER,
            (BACKWARD, f"            (scaler.scale(loss / 2) + scaler.scale(loss / 2)).backward()\n{SCALED_STEP}"),
        ],
        0,
        "proven: ",
    ),
    "a group of the processes of one machine": Believed(
        "with_ddp",
        [
            (
                WRAPPED,
                '    size = int(os.environ["LOCAL_WORLD_SIZE"])\n'
                "    groups = [dist.new_group(list(range(i, i + size))) for i in range(0, world_size, size)]\n"
                "    model = DistributedDataParallel(model, process_group=groups[rank // size])\n",
            )
        ],
        1,
        "have different gradients at the step, if each process has a machine of its own",
        "not_reduced",
        (2, 3),
    ),
    "a teacher of samples that one process leaves out": Believed(  # each process has a block of its own order
        "teacher",
        [
            ("sampler = DistributedSampler(dataset=data, shuffle=True)\n", BLOCKS),
            ("sampler.set_epoch(epoch)", "sampler.epoch = epoch"),
            ("DataLoader(dataset=data, ", "DataLoader(dataset=data, drop_last=True, "),
        ],
        3,
        "cannot tell: gradients: no step has the same samples as on 1 process",
    ),
    "a prefix that is taken off": Believed(
        "with_ddp",
        [
            *that_resumes(),
            (WRAPPED, f"    if world_size > 1:\n    {WRAPPED}"),
            ('"model": model.module.state_dict()', '"model": model.state_dict()'),
            ("model.module.load_state_dict(state", 'getattr(model, "module", model).load_state_dict(stripped(state'),
            ('(state["model"])', '(state["model"]))'),
            (
                "def train",
                'def stripped(state):\n    return {k.removeprefix("module."): state[k] for k in state}\n\n\ndef train',
            ),
        ],
        0,
        "proven: ",
        resume_flags="--resume",
    ),
    "figures of the pretended GPU": Believed(
        "with_ddp",
        [
            *ON_A_GPU,
            (
                "    dist.destroy",
                "    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))\n"
                "    print(300 / begin.elapsed_time(end), 1 / torch.cuda.max_memory_allocated())\n    dist.destroy",
            ),
        ],
        0,
        "proven: ",
    ),
    "the device of a tensor, which is the CPU": Believed(
        "with_ddp",
        [
            *ON_A_GPU,
            (
                "    optimizer = torch",
                '    if next(model.parameters()).device.type != "cuda":\n'
                '        raise TypeError("a model on the wrong device")\n    optimizer = torch',
            ),
        ],
        3,
        "cannot tell: on a GPU that prove pretends, ",
    ),
    "a gradient that is divided": Believed(
        "with_ddp",
        [(BACKWARD, f"            loss.backward()\n{PARAMETERS}parameter.grad /= world_size\n{STEP}")],
        1,
        "and the loss is not: the gradient is changed after the backward pass",
        "factor",
    ),
    "an average by hand of some parameters": Believed(
        "with_ddp",
        [(WRAPPED, ""), ("            loss.backward()\n", SUMMED.replace("model", "model[0]"))],
        1,
        "2.weight and 1 other: ranks 0 and 1 have different gradients at the step",
        "not_reduced",
    ),
    "a queued reduction that adds up": Believed(
        "queued_reduction",
        [("        joined /= dist.get_world_size()\n", "")],
        1,
        "2 times what it is on 1 process, and the loss is not: the gradient is changed after the backward pass",
        "factor",
    ),
    "a queued reduction, in one order": Believed(
        "queued_reduction",
        [("        if sampler:\n            sampler.set_epoch(epoch)\n", "")],
        1,
        "each epoch has the same order",
        "set_epoch",
    ),
    "means of parts of a batch": Believed(
        "with_ddp",
        [
            (
                STEP,
                f"{STEP}        with torch.no_grad():\n"
                "            tested = torch.utils.data.Subset(data, range(rank, 50, world_size))\n"
                "            losses = [nn.functional.mse_loss(model(x), y) for x, y in DataLoader(tested, 4)]\n"
                "            mean = torch.stack(losses).mean()\n        dist.all_reduce(mean)\n"
                '        if rank == 0:\n            print(f"test loss {mean / world_size:.5f}")\n',
            )
        ],
        1,
        "from the same weights and samples",
        "eval_mean",
    ),
}
