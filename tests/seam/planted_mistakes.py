"""Mistakes in planted.py, which trains through GlobalLoader and Run, and changes of it that are right.

Those that show in the same way without GlobalLoader and Run stand in prove/tests/foreign/mistakes.py alone.
"""

from typing import NamedTuple

BACKWARD = "accelerator.backward(batch.mean_loss(losses))"
BATCH_NORM = [("self.between = nn.Tanh()", "self.between = nn.BatchNorm1d(16)")]
BATCH_NORM += [("seed=args.seed)", "seed=args.seed, drop_last=True)")]
AVERAGED = [("    for epoch", "    batch_norms = BatchNorms(model, accelerator)\n    for epoch")]
AVERAGED += [("with accelerator.accumulate(model):", "with accelerator.accumulate(model), batch_norms.averaged():")]
TRAIN_FORWARD = "logits = model(points)\n                losses"
AFTER_SCHEDULE = "                scheduler.step()\n"
TWO_GROUPS = [
    (
        "SGD(model.parameters(), args.lr",
        'SGD([{"params": model.body.parameters()}, {"params": model.head.parameters(), "lr": args.lr * factor}]'
        ", args.lr",
    )
]
RANK_2 = "accelerator.process_index == 2"


class Planted(NamedTuple):
    """Edits of the program, and the section of MISTAKES.md that is named, with _ for -."""

    edits: list[tuple[str, str]]
    kind: str
    flags: tuple[str, ...] = ()
    words: str = ""  # of the verdict
    processes: int = 2

    def of_program(self) -> dict:
        """The arguments of test_seam.program."""
        return {"edits": self.edits, "flags": self.flags, "processes": (self.processes,)}


KINDS = {"accumulated": ("--gradient_accumulation_steps", "2"), "virtual": ("--virtual_processes", "6")}
OTHERS = "accelerator.num_processes > 1"
# What only a run of this project tells: bits, samples without a DataLoader, and each test result.
FOR_THE_SEAM = {
    "a gradient with an error of a hundred thousandth": Planted(
        [
            (
                "                if accelerator.sync_gradients:\n",
                "                if accelerator.sync_gradients:\n"
                f"                    next(model.parameters()).grad.mul_(1 + 1e-5 * ({OTHERS}))\n",
            )
        ],
        kind="float_sums",
        flags=KINDS["virtual"],
        words="other bits than on 1 process, by up to 1.0e-05 of its value",
    ),
    "a sample twice": Planted(
        [
            ("0.1 * noise", "0 * noise"),  # a sample is known by its content
            ("seed=args.seed)", "seed=args.seed, order=twice)"),
            (
                "    train_loader =",
                "    def twice(epoch):\n"
                "        items = torch.randperm(75)  # as many as prove reads\n"
                f"        items = torch.cat([items, items[: 1 * ({OTHERS})]])\n"
                "        return items\n\n"
                "    train_loader =",
            ),
        ],
        kind="samples",
        words="twice",
    ),
    "a metric counted twice": Planted(
        [("metrics.add(batch, loss=losses)", "metrics.add(batch, loss=losses * (1 + run.accelerator.process_index))")],
        kind="eval_mean",
        words="instead of",
    ),
}


MISTAKES = {
    "the mean of the micro-batch": Planted([(BACKWARD, "accelerator.backward(losses.mean())")], kind="mean_of_means"),
    "spectral_norm, which counts each forward pass": Planted(
        [("self.body = nn.Linear(4, 16)", "self.body = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 16))")],
        kind="gradient",
    ),
    "BatchNorm with the statistics of rank 0": Planted(BATCH_NORM, kind="statistics"),
    "noise drawn in the loop": Planted(
        [
            (
                "logits = model(points)\n                losses",
                "logits = model(points + torch.randn_like(points))\n                losses",
            )
        ],
        kind="draws",
    ),
    "a number of Python's in the loop": Planted(
        [
            ("import sys\n", "import random\nimport sys\n"),
            (
                "logits = model(points)\n                losses",
                "logits = model(points + random.random())\n                losses",
            ),
        ],
        kind="draws",
    ),
    "a loss that looks across the batch": Planted(
        [
            (
                "logits = model(points)\n                losses",
                "logits = model(points)\n                logits = logits - logits.mean(0)\n                losses",
            )
        ],
        kind="gradient",
    ),
    "rank 0 counts twice": Planted(
        [(BACKWARD, "accelerator.backward(batch.mean_loss(losses) * (2 - min(accelerator.process_index, 1)))")],
        kind="token_weights",
    ),
    "a step in each micro-batch": Planted(
        [
            ("optimizer.step()\n", "optimizer.optimizer.step()\n"),
            (
                "                if accelerator.sync_gradients:\n"
                "                    accelerator.clip_grad_norm_(model.parameters(), 0.3)\n",
                "",
            ),
        ],
        kind="zero_grad",
        flags=("--gradient_accumulation_steps", "2"),
    ),
    "weights clamped by what this process saw": Planted(
        [
            (
                "                scheduler.step()\n",
                "                scheduler.step()\n"
                "                for parameter in model.parameters():\n"
                "                    parameter.data.mul_(1 - 0.01 * len(batch))\n",
            )
        ],
        kind="weights",
    ),
    "a test in training mode": Planted(
        [
            ("self.between = nn.Tanh()", "self.between = nn.Sequential(nn.Tanh(), nn.Dropout(0.5))"),
            ("    model.eval()\n", ""),
            ("        model.train()\n", "        model.eval()\n"),
            ("run.log_test(eval", "run.log_test(model.train() and eval"),
        ],
        kind="eval_mode",
    ),
    "a copy of the model is saved": Planted(
        [
            ("import sys\n", "import copy\nimport sys\n"),
            ('state = {"model": model,', 'state = {"model": copy.deepcopy(model),'),
        ],
        kind="resume",
    ),
    "rank 0 changes the weights at the end": Planted(
        [
            (
                "    run.finish()",
                "    if accelerator.is_main_process:\n"
                "        accelerator.unwrap_model(model).head.bias.data[2] += 1e-6\n"
                "    run.finish()",
            )
        ],
        kind="weights",
    ),
    "the end is missing": Planted(
        [("    run.finish()\n", "")],
        kind="finish",
    ),
    "a counter of one's own that is not saved": Planted(
        [
            ("    for epoch in run.epochs():", "    seen = 0\n    for epoch in run.epochs():"),
            (
                '                losses = F.cross_entropy(logits, labels, reduction="none")\n                acc',
                "                seen += 0.012 * (batch.micro_step == 0)\n"
                "                losses = F.cross_entropy(logits * (1 + seen), labels, "
                'reduction="none")\n                acc',
            ),
        ],
        kind="resume",
    ),
    "a learning rate of the second group on rank 2": Planted(
        [*TWO_GROUPS, ("    model = Net()", f"    model = Net()\n    factor = 1 + ({RANK_2})")],
        kind="schedule_alone",
        processes=3,
    ),
    "a gradient of the second group on rank 2": Planted(
        [
            *TWO_GROUPS,
            ("    model = Net()", "    model = Net()\n    factor = 1"),
            (
                "                optimizer.step()\n",
                f"                if {RANK_2}:\n"
                "                    accelerator.unwrap_model(model).head.bias.grad *= 1.001\n"
                "                optimizer.step()\n",
            ),
        ],
        kind="clipped",
        processes=3,
    ),
    "the optimizer's state scaled by what this process saw": Planted(
        [
            (
                AFTER_SCHEDULE,
                AFTER_SCHEDULE
                + "                for state in optimizer.state.values():\n"
                + '                    state["momentum_buffer"].mul_(1 - 0.001 * len(batch))\n',
            )
        ],
        kind="weights",
    ),
    "a test result of rank 2": Planted(
        [
            (
                "    return metrics.reduce()",
                "    result = metrics.reduce()\n"
                '    result["loss"] += run.accelerator.process_index // 2\n'
                "    return result",
            )
        ],
        kind="eval_mean",
        processes=3,
    ),
}
AVERAGE = [
    ("    model = Net()", "    model = Net()\n    average = torch.optim.swa_utils.AveragedModel(model)"),
    ('{"model": model,', '{"model": model, "average": average,'),
    (
        AFTER_SCHEDULE,
        AFTER_SCHEDULE
        + "                if accelerator.sync_gradients:\n"
        + "                    average.update_parameters(accelerator.unwrap_model(model))\n",
    ),
    (
        "        run.log_test(evaluate(model, test_loader, run))",
        '        of_average = {"average_loss": evaluate(average, test_loader, run)["loss"]}\n'
        "        run.log_test(evaluate(model, test_loader, run) | of_average)",
    ),
]
CORRECT = {
    "dropout": [("self.between = nn.Tanh()", "self.between = nn.Sequential(nn.Tanh(), nn.Dropout(0.3))")],
    "BatchNorm, averaged": BATCH_NORM + AVERAGED,
    "ReLU": [("nn.Tanh()", "nn.ReLU()")],
    "a model and its average, both tested": AVERAGE,
}
