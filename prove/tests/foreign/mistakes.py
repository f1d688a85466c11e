"""Mistakes that somebody has made, each as a change of one of these programs, with the thread that tells of it.

They fail, hang, or are notes; those that nobody notices are in silent_bugs/.
"""

from typing import NamedTuple


class Mistake(NamedTuple):
    """A change of a program.

    Args:
        program: a file of this folder or of unusual/.
        edits: old and new text.
        kind: a section of MISTAKES.md, with _ for -; "" where it is a note, and not wrong.
        words: of what `prove` says.
        thread: where somebody has met it.
    """

    program: str
    edits: list[tuple[str, str]]
    kind: str
    words: str
    thread: str


HUGGING_FACE, PYTORCH = "https://github.com/huggingface", "https://github.com/pytorch"
SAMPLER = "shuffle=False, sampler=DistributedSampler(dataset)"
SET_EPOCH = ("        self.train_data.sampler.set_epoch(epoch)\n", "")
TWO_HEADS = """class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(20, 1)
        self.other = torch.nn.Linear(20, 1)

    def forward(self, x):
        return super().forward(x) + (self.other(x) if len(x) != 2 else 0)


def prepare_dataloader"""

MISTAKES = {
    "no_sync is missing": Mistake(
        "own_trainer",
        [("contextlib.nullcontext() if is_last else self.model.no_sync()", "contextlib.nullcontext()")],
        *("", "averaged over processes 2 times per step", f"{PYTORCH}/pytorch/issues/43201"),
    ),
    "all processes write the snapshot": Mistake(
        "ddp_series",
        [("if self.global_rank == 0 and epoch", "if epoch")],
        *("checkpoint_race", "2 processes write snapshot.pt", "https://github.com/bytedance/ibot/issues/15"),
    ),
    "a collective call on rank 0 alone": Mistake(
        "timm_loop",
        [
            ("        metrics = validate(model, ", "        metrics = rank == 0 and validate(model, "),
            ("        ema_metrics =", "        ema_metrics = rank == 0 and"),
        ],
        *("hangs", "rank 0 calls all_reduce, and rank 1 does not", "https://github.com/horovod/horovod/issues/600"),
    ),
    "other numbers of batches": Mistake(
        "ddp_series",
        [
            SET_EPOCH,
            (SAMPLER, "shuffle=False"),
            ("DataLoader(dataset", "DataLoader(list(dataset.data[: 75 - 9 * int(os.environ['RANK'])])"),
        ],
        *("uneven", "batches on rank 1, and more on rank 0", f"{PYTORCH}/pytorch/issues/38174"),
    ),
    "a parameter that some batches do not use": Mistake(
        "ddp_series",
        [("def prepare_dataloader", TWO_HEADS), ("torch.nn.Linear(20, 1)\n    optimizer", "Model()\n    optimizer")],
        *(
            "unused",
            "other.weight and 1 other: no gradient",
            "https://github.com/Megvii-BaseDetection/YOLOX/issues/885",
        ),
    ),
    "more samples per step on more processes": Mistake(
        "nanogpt",
        [("    gradient_accumulation_steps //= ddp_world_size\n", "")],
        *("", "a step has 48 samples on 2 processes and 24 on 1", "https://github.com/Lightning-AI/litgpt/issues/496"),
    ),
    "one process stops early": Mistake(
        "amp_loop",
        [("if stopping.should_stop(loss)", "if rank == 0 or stopping.should_stop(loss)")],
        *(
            "stops_alone",
            "rank 0 has ended after 6 steps, and rank 1 waits in the backward pass of amp_loop.py:",
            "https://github.com/Lightning-AI/pytorch-lightning/issues/379",
        ),
    ),
    "tensors of unequal shapes in gather": Mistake(
        "accelerate_nlp",
        [("seen += len(references)", "seen += len(references)\n            accelerator.gather(batch['input_ids'])")],
        *("shapes", "calls gather with a tensor of 12x", f"{HUGGING_FACE}/accelerate/issues/167"),
    ),
    "save_state on the main process": Mistake(
        "accelerate_cv",
        [("        accelerator.save_state", "        accelerator.is_main_process and accelerator.save_state")],
        *("", "rank 0 alone calls save_state", f"{HUGGING_FACE}/accelerate/issues/1171"),
    ),
}
