"""The mistakes that `stages.py` names in any script: what is wrong, what to do, and where MISTAKES.md says more."""

PAGE = "guides/MISTAKES.md"  # of the repository

# By the section of the page, with _ for -; what to do about it.
ADVICE = {
    "alone": "wrap the model in DistributedDataParallel, or pass it to accelerator.prepare",
    "around_ddp": "call the wrapped model in training, and not model.module",
    "not_reduced": "some gradients are not averaged: every backward pass before a step must run with the gradient sync "
    "on, through the wrapped model",
    "all_the_data": "give DataLoader a DistributedSampler, or pass the loader to accelerator.prepare",
    "samples": "the parts of the processes must be disjoint, and together all of the data: use DistributedSampler",
    "split": "give random_split a generator with a fixed seed: each process makes a split of its own",
    "items": "the data are made, split or augmented by random numbers that each process draws for itself: seed them",
    "set_epoch": "call sampler.set_epoch(epoch) before each epoch",
    "same_order": "seed the generator of the shuffle once, and not in each epoch",
    "same_batches": "seed each process differently where it draws its own batches, as seed + rank",
    "initial_weights": "seed all processes alike before the model is made, or wrap it in DistributedDataParallel",
    "zero_grad": "call optimizer.zero_grad() after each step",
    "leftover": "make a step of the micro-batches that are left at the end of an epoch, or set the gradients to zero",
    "not_divided": "divide the loss by the number of micro-batches of a step",
    "divided_twice": "accelerator.backward divides by gradient_accumulation_steps already: pass it the loss itself",
    "last_step": "divide by the number of micro-batches that the step has, and not by the usual one",
    "mean_of_means": "pass losses with one value per sample to batch.mean_loss(losses)",
    "steps": "make one step of the optimizer per step of the loader: inside accelerator.accumulate(model)",
    "draws": "random numbers belong to a sample: batch.rand and batch.randn give the same on any number of processes",
    "statistics": "average them: with batch_norms.averaged() of utils/parallel/batch_norm.py, or use SyncBatchNorm",
    "eval_mode": "call model.eval() before the test, and model.train() after it",
    "finish": "call run.finish() at the end of the script, on all processes",
    "token_weights": "divide the sum of the losses by the number of tokens of the whole step, on all processes",
    "factor": "DistributedDataParallel averages over processes: the loss must be the mean over this process's samples",
    "gradient": "something changes the gradient in each micro-batch or process, or the loss depends on how the batch "
    "is cut",
    "clip_early": "clip once, after the last backward pass of a step: if accelerator.sync_gradients",
    "clipped": "clip all gradients alike, after they are averaged",
    "schedule": "count the schedule in steps of the optimizer: a prepared scheduler of Accelerate steps once for each "
    "process",
    "weights": "the weights are changed by something that only this process has seen",
    "unused": "a parameter is used on some processes only: find_unused_parameters=True, or use it everywhere",
    "eval_repeated": "use accelerator.gather_for_metrics, or leave out the samples that fill the last batch",
    "eval_share": "add up sums and counts over all processes (all_reduce, gather_for_metrics) before the division",
    "eval_mean": "add up sums and counts, and divide once at the end: a mean of means weighs unequal batches alike",
    "checkpoint_prefix": "save accelerator.unwrap_model(model).state_dict(), or model.module.state_dict()",
    "checkpoint_lacks": "save the state_dict() of the optimizer and of the schedule too",
    "checkpoint_race": "save on one process: if accelerator.is_main_process, or rank == 0",
    "resume": "restore the optimizer, the schedule, the epoch, and the place in the data",
    "fails": "see what it says",
    "hangs": "each process must make the same collective calls: look for one inside `if rank == 0`",
}


def advice(kind: str) -> str:
    """A sentence, and the section of the page that says more."""
    return f"{ADVICE[kind]} ({PAGE}#{kind.replace('_', '-')})"
