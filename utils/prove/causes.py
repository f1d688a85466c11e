"""The likely cause of each kind of difference, in a sentence, and where CAUSES.md says more."""

PAGE = "/".join([*__package__.split("."), "CAUSES.md"])

# The section of the page, with _ for -; what to look for. {detail}: what `cause` is given.
SENTENCES = {
    "samples": "the script does not take its batches from run.batches, or changes them",
    "items": "the item is drawn from a generator of its own; draw from torch's, Python's or NumPy's global generator",
    "batch_norm": "{detail} looks at all samples of a micro-batch",
    "dropout": "{detail} draws its numbers for a micro-batch; use batch.rand",
    "across_samples": "the value of a sample depends on which samples share its micro-batch, or on a random number "
    "that is drawn in the loop; use batch.rand or batch.randn",
    "not_reduced": "these parameters are not averaged over the processes: they were not passed to "
    "accelerator.prepare, or the model was called around its DDP wrapper",
    "factor": "the sum of the losses is divided, or multiplied, once too often by the number of processes, of "
    "accumulation steps or of samples; use batch.mean_loss",
    "tail": "the last, smaller step of an epoch is divided by the wrong number, or is a mean of means; use "
    "batch.mean_loss",
    "nan": "the mean over no sample, or the loss of a stand-in, which counts nothing: use batch.mean_loss",
    "gradients": "a gradient is changed before it is complete (clipped or scaled in each micro-batch), or the loss "
    "depends on the parts of the batch",
    "at_step": "the gradient is clipped or scaled by a number of this process or micro-batch",
    "unused": "a parameter is used on some processes or in some micro-batches only",
    "optimizer_calls": "the optimizer steps in every micro-batch, or twice: use accelerator.accumulate and the "
    "optimizer that prepare returned",
    "schedule": "the schedule steps once per process or once per micro-batch, or the learning rate is computed from "
    "the number of processes",
    "schedule_not_saved": "the schedule is not in the checkpoint: pass it to run.start",
    "weights": "the weights are changed by something else than the optimizer's step on the averaged gradient (an "
    "average of weights, a clamp, weight decay by hand)",
    "optimizer": "the optimizer's state is changed by something else than its step",
    "statistics": "the BatchNorm statistics of rank 0 alone; use BatchNorms",
    "not_restored": "something that decides the numbers is not in the checkpoint: pass it to run.start by name",
    "test_samples": "the test does not take each batch of run.test_batches once",
    "test_values": "the model looks across samples in the test: is it in evaluation mode?",
    "mean_of_means": "the result of the test is a mean of means, or of one process alone; use run.new_metrics",
    "checkpoint": "the weights change after the last step, or run.start got another model than the one that is "
    "trained, or run.finish() is missing",
    "rounding": "rounding grows over the steps, and exceeds the tolerance {detail}: no mistake",
    "fails": "see what it says; with --keep FOLDER the logs are kept",
    "other_course": "the script makes another number of steps or tests, or counts other metrics, on another topology",
}


def cause(kind: str, detail=None) -> str:
    """A sentence, and the section of the page that says more."""
    return f"{SENTENCES[kind].format(detail=detail)} ({PAGE}#{kind.replace('_', '-')})"
