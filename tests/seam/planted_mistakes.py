"""Mistakes in planted.py, which trains through GlobalLoader and Run, and changes of it that are right.

Those that show in the same way without GlobalLoader and Run stand in prove/tests/foreign/mistakes.py alone.
"""

from typing import NamedTuple

BACKWARD = "accelerator.backward(batch.mean_loss(losses))"
BATCH_NORM = [("self.between = nn.Tanh()", "self.between = nn.BatchNorm1d(16)")]
BATCH_NORM += [("seed=args.seed)", "seed=args.seed, drop_last=True)")]
AVERAGED = [("    for epoch", "    batch_norms = BatchNorms(model, accelerator)\n    for epoch")]
AVERAGED += [("with accelerator.accumulate(model):", "with accelerator.accumulate(model), batch_norms.averaged():")]
AFTER_SCHEDULE = "                scheduler.step()\n"
FORWARD = "logits = model(points)\n                losses"  # in training
CLIP = "                if accelerator.sync_gradients:\n"
CLIP += "                    accelerator.clip_grad_norm_(model.parameters(), 0.3)\n"


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
        [(CLIP, f"{CLIP}                    next(model.parameters()).grad.mul_(1 + 1e-5 * ({OTHERS}))\n")],
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
    "BatchNorm with the statistics of rank 0": Planted(BATCH_NORM, kind="statistics"),
    "noise drawn in the loop": Planted(
        [(FORWARD, FORWARD.replace("points", "points + torch.randn_like(points)"))], kind="draws"
    ),
    "a loss that looks across the batch": Planted(
        [(FORWARD, FORWARD.replace("losses", "logits = logits - logits.mean(0)\n                losses"))],
        kind="gradient",
    ),
    "a step in each micro-batch": Planted(
        [("optimizer.step()\n", "optimizer.optimizer.step()\n"), (CLIP, "")],
        kind="zero_grad",
        flags=KINDS["accumulated"],
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
    "the end is missing": Planted([("    run.finish()\n", "")], kind="finish"),
    "a counter of one's own that is not saved": Planted(
        [
            ("    for epoch in run.epochs():", "    seen = 0\n    for epoch in run.epochs():"),
            (FORWARD, f"seen += 0.012 * (batch.micro_step == 0)\n                {FORWARD}"),
            (FORWARD, FORWARD.replace("points)", "points) * (1 + seen)")),
        ],
        kind="resume",
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
    "a model and its average, both tested": AVERAGE,
}
