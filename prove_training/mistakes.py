"""The mistakes that `stages` names in any script, and what to do about them; MISTAKES.md says more."""

from pathlib import Path

PAGE = Path(__file__).with_name("MISTAKES.md")

# By the section of the page, with _ for -; what to do about it.
ADVICE = {
    "alone": "wrap the model in DistributedDataParallel, or pass it to accelerator.prepare",
    "around_ddp": "call the wrapped model in training, and not model.module",
    "not_reduced": "some gradients are not averaged: every backward pass before a step must run with the gradient sync "
    "on, through the wrapped model",
    "all_the_data": "give DataLoader a DistributedSampler, or pass the loader to accelerator.prepare",
    "samples": "the parts of the processes must be disjoint, and together all of the data: use DistributedSampler",
    "stream": "an IterableDataset must give each process its own part: every world_size-th item from rank on, or "
    "datasets.distributed.split_dataset_by_node",
    "local_rank": "divide the data by RANK and WORLD_SIZE (dist.get_rank(), dist.get_world_size()): LOCAL_RANK and "
    "torch.cuda.device_count() are those of one machine",
    "split": "give random_split a generator with a fixed seed: each process makes a split of its own",
    "items": "the data are made, split or augmented by random numbers that each process draws for itself, or by hash() "
    "of a string, which is another number in each process: seed them, or use hashlib",
    "set_epoch": "call sampler.set_epoch(epoch) before each epoch",
    "same_order": "seed the generator of the shuffle once, and not in each epoch",
    "same_batches": "seed each process differently where it draws its own batches, as seed + rank",
    "same_noise": "seed each process differently before the loop: seed + rank, or set_seed(seed, device_specific=True)",
    "uneven": "give all processes the same number of batches: DistributedSampler, drop_last, or model.join()",
    "initial_weights": "seed all processes alike before the model is made, or wrap it in DistributedDataParallel",
    "zero_grad": "call optimizer.zero_grad() after each step",
    "zeroed": "call optimizer.zero_grad() after optimizer.step(), and not between a backward pass and the step",
    "untrained": "give the optimizer the parameters of the model that is called, and a loss that depends on them",
    "first_step": "test (number + 1) % accumulation == 0, or number % accumulation == accumulation - 1",
    "leftover": "make a step of the micro-batches that are left at the end of an epoch, or set the gradients to zero",
    "not_divided": "divide the loss by the number of micro-batches of a step",
    "divided_twice": "accelerator.backward divides by gradient_accumulation_steps already: pass it the loss itself",
    "last_step": "divide by the number of micro-batches that the step has, and not by the usual one",
    "mean_of_means": "pass losses with one value per sample to batch.mean_loss(losses)",
    "steps": "make one step of the optimizer per step of the loader: inside accelerator.accumulate(model)",
    "draws": "random numbers belong to a sample: batch.rand and batch.randn give the same on any number of processes",
    "statistics": "average them: with batch_norms.averaged() of utils/parallel/batch_norm.py, or use SyncBatchNorm",
    "eval_mode": "call model.eval() before the test, and model.train() after it",
    "train_mode": "call model.train() at the beginning of each epoch, or after each test",
    "eval_weights": "change the weights that are tested, such as an average, on all processes alike",
    "finish": "call run.finish() at the end of the script, on all processes",
    "token_weights": "divide the sum of the losses by the number of tokens of the whole step, on all processes",
    "factor": "DistributedDataParallel averages over processes: the loss must be the mean over this process's samples",
    "gradient": "something changes the gradient in each micro-batch or process, or the loss depends on how the batch "
    "is cut",
    "gather": "use all_gather or all_reduce of torch.distributed.nn.functional, through which gradients go",
    "clip_scaled": "call scaler.unscale_(optimizer) before the gradients are clipped, for each optimizer",
    "clip_nothing": "pass model.parameters() anew, or a list of it: a generator can be read once",
    "clip_early": "clip once, after the last backward pass of a step (with Accelerate: if accelerator.sync_gradients), "
    "when the gradients are averaged",
    "clipped": "clip all gradients alike, after they are averaged",
    "schedule": "count the schedule in steps of the optimizer, on any number of processes (a scheduler that Accelerate "
    "has prepared steps once for each process)",
    "schedule_alone": "step the schedule on all processes: not inside `if rank == 0`",
    "plateau": "average the metric over all processes before scheduler.step(metric)",
    "weights": "the weights are changed by something that only this process has seen",
    "unused": "a parameter is used on some processes only: find_unused_parameters=True, or use it everywhere",
    "eval_repeated": "give each process its own part, as Subset(data, range(rank, len(data), world_size)), or pass "
    "a row for each sample to accelerator.gather_for_metrics, in each batch",
    "eval_share": "add up sums and counts over all processes (all_reduce, gather_for_metrics) before the division",
    "eval_mean": "add up sums and counts, and divide once at the end: a mean of means weighs unequal batches alike",
    "eval_factor": "divide the sum of all processes by the number of all samples; a mean is not divided again",
    "eval_extreme": "add sums and counts up with ReduceOp.SUM, and divide once",
    "checkpoint_prefix": "save accelerator.unwrap_model(model).state_dict(), or model.module.state_dict()",
    "checkpoint_lacks": "save the state_dict() of the optimizer and of the schedule too",
    "checkpoint_race": "save on one process: if accelerator.is_main_process, or rank == 0",
    "resume": "restore the optimizer, the schedule, the epoch, and the place in the data",
    "fails": "see what it says",
    "stops_alone": "decide together when to stop: add the decisions up with all_reduce, or broadcast the one of rank 0",
    "shapes": "gather tensors of one shape: accelerator.pad_across_processes, or gather_for_metrics, or gather_object",
    "hangs": "each process must make the same collective calls: look for one inside `if rank == 0`, such as "
    "a forward pass of DistributedDataParallel",
}

# The same where the script does not write the loop itself.
ADVICE_IN = {
    "Trainer": {
        "factor": "a model that ignores num_items_in_batch returns a mean, which Trainer multiplies by the number of "
        "processes: TrainingArguments(average_tokens_across_devices=False)",
        "same_noise": "call torch.manual_seed(seed + rank) in on_train_begin: TrainingArguments(seed) seeds all alike",
        "schedule": "leave the schedule to TrainingArguments(lr_scheduler_type, warmup_steps), which count steps",
        "resume": "trainer.train(resume_from_checkpoint=True), without TrainingArguments(ignore_data_skip=True)",
    },
    "Lightning": {
        "all_the_data": "leave Trainer(use_distributed_sampler=True), or give DataLoader a DistributedSampler",
        "eval_share": "self.log(name, value, sync_dist=True), or a torchmetrics metric",
        "eval_repeated": "test on one process: Trainer(devices=1), as Lightning's documentation says",
        "unused": 'Trainer(strategy="ddp_find_unused_parameters_true"), or use the parameter everywhere',
        "plateau": "self.log(name, value, sync_dist=True) for the metric that the schedule monitors",
        "stops_alone": "self.log(name, value, sync_dist=True) for the metric that EarlyStopping monitors",
    },
}


def advice(kind: str, framework: str = "") -> str:
    """A sentence.

    Args:
        framework: "Trainer" of transformers, "Lightning", or "".
    """
    return ADVICE_IN.get(framework, {}).get(kind, ADVICE[kind])


def correction(kind: str) -> list[str]:
    """The wrong lines of an example, and the right ones, as a diff."""
    section = PAGE.read_text().partition(f"\n## {kind.replace('_', '-')}\n")[2].partition("\n## ")[0]
    return section.partition("```diff\n")[2].partition("```")[0].splitlines()
