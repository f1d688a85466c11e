"""Mistakes that somebody has made, each as a change of one of these programs, with the thread that tells of it."""

from typing import NamedTuple


class Mistake(NamedTuple):
    """A change of a program.

    Args:
        program: a file of this folder.
        edits: old and new text.
        kind: a section of MISTAKES.md, with _ for -; "" where it is a note, and not wrong.
        words: of what `prove` says.
        thread: where somebody has met it.
        flags: of the program.
        resume_flags: with which it resumes, if that is to be tried.
    """

    program: str
    edits: list[tuple[str, str]]
    kind: str
    words: str
    thread: str
    flags: tuple[str, ...] = ()
    resume_flags: str | None = None


HUGGING_FACE, PYTORCH = "https://github.com/huggingface", "https://github.com/pytorch"
PREPARED = "optimizer, train_dataloader, eval_dataloader, lr_scheduler"
AVERAGED_BY_HAND = """        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
"""

MISTAKES = {
    "the schedule has the length of the prepared loader": Mistake(
        "accelerate_nlp",
        [
            (
                "    lr_scheduler = get",
                "    train_dataloader = accelerator.prepare(train_dataloader)\n    lr_scheduler = get",
            )
        ],
        *("schedule", "2 times too fast", f"{HUGGING_FACE}/accelerate/issues/2926"),
    ),
    "a warm-up of a fixed number of steps": Mistake(
        "accelerate_nlp",
        [("num_warmup_steps=len(train_dataloader) // 2", "num_warmup_steps=6")],
        *("schedule", "2 times too fast", f"{HUGGING_FACE}/accelerate/issues/662"),
    ),
    "a step of the schedule per micro-batch": Mistake(
        "own_trainer",
        [
            ("                self.scheduler.step()\n", ""),
            ("            if is_last:\n", "            self.scheduler.step()\n            if is_last:\n"),
        ],
        *("", "steps 2 times per step", f"{HUGGING_FACE}/diffusers/issues/9633"),
    ),
    "the learning rate grows with the processes": Mistake(
        "timm_loop",
        [("lr=args.lr, momentum", "lr=args.lr * world_size, momentum")],
        *("", "2 times as high on 2 processes", "https://github.com/mala-project/mala/issues/422"),
    ),
    "gather in place of gather_for_metrics": Mistake(
        "accelerate_cv",
        [("accelerator.gather_for_metrics(", "accelerator.gather(")],
        *("eval_repeated", "7 of 77 samples counted twice", f"{HUGGING_FACE}/accelerate/issues/226"),
    ),
    "the accuracy of the first process": Mistake(
        "accelerate_nlp",
        [('accelerator.gather_for_metrics((predictions, batch["labels"]))', 'predictions, batch["labels"]')],
        *("eval_share", "rank 0 sees 42 of 77", "https://github.com/drprojects/superpoint_transformer/issues/165"),
    ),
    "a mean before gather_for_metrics": Mistake(
        "accelerate_accumulation",
        [("accelerator.gather_for_metrics(errors)", "accelerator.gather_for_metrics(errors.mean().repeat(1))")],
        *("eval_mean", "from the same weights", f"{HUGGING_FACE}/trl/issues/7010"),
    ),
    "clipped in each micro-batch": Mistake(
        "accelerate_accumulation",
        [
            (
                "                if accelerator.sync_gradients:\n                    accelerator.clip",
                "                accelerator.clip",
            )
        ],
        *("clip_early", "after 1 of 2 micro-batches", f"{HUGGING_FACE}/accelerate/issues/641"),
    ),
    "divided by the accumulation steps twice": Mistake(
        "accelerate_accumulation",
        [("accelerator.backward(loss)", "accelerator.backward(loss / gradient_accumulation_steps)")],
        *("divided_twice", "0.5 times what it should be", f"{HUGGING_FACE}/accelerate/issues/3533"),
    ),
    "the names of DistributedDataParallel in the file": Mistake(
        "accelerate_accumulation",
        [("accelerator.unwrap_model(model).state_dict()", "model.state_dict()")],
        *("checkpoint_prefix", "'module.'", f"{PYTORCH}/pytorch/issues/9176"),
    ),
    "a model that is not prepared": Mistake(
        "accelerate_accumulation",
        [
            (
                f"model, {PREPARED} = accelerator.prepare(\n        model, ",
                f"{PREPARED} = accelerator.prepare(\n        ",
            ),
        ],
        *("alone", "2 processes train alone", f"{HUGGING_FACE}/accelerate/issues/2393"),
    ),
    "the loss is not divided by the accumulation steps": Mistake(
        "nanogpt",
        [("loss = loss / gradient_accumulation_steps", "loss = loss")],
        *("not_divided", "4 times what it should be", "https://github.com/karpathy/nanoGPT/issues/168"),
    ),
    "all processes draw the same batches": Mistake(
        "nanogpt",
        [("seed_offset = ddp_rank", "seed_offset = 0")],
        *("same_batches", "draw the same batch", "https://github.com/karpathy/llama2.c/issues/522"),
    ),
    "no_sync also in the last micro-batch": Mistake(
        "nanogpt",
        [("nullcontext() if is_last or not ddp else", "nullcontext() if not ddp else")],
        *("not_reduced", "none of its backward passes averages", "https://github.com/modelscope/FunASR/pull/3472"),
    ),
    "no_sync is missing": Mistake(
        "own_trainer",
        [("contextlib.nullcontext() if is_last else self.model.no_sync()", "contextlib.nullcontext()")],
        *("", "averaged over processes 2 times per step", f"{PYTORCH}/pytorch/issues/43201"),
    ),
    "the mean over each micro-batch's own tokens": Mistake(
        "own_trainer",
        [
            (
                "return tokens[:-1], tokens[1:]",
                "return tokens[:-1], tokens[1:].where(torch.arange(8) <= index % 8, -100)",
            )
        ],
        *("token_weights", "a token of one micro-batch weighs", f"{HUGGING_FACE}/transformers/pull/34191"),
    ),
    "the last, smaller step divided by the usual number": Mistake(
        "own_trainer",
        [
            (
                "is_last = (number + 1) % self.args.accumulate == 0",
                "is_last = (number + 1) % self.args.accumulate == 0 or number + 1 == len(self.loader)",
            ),
            ("            if number == usable:\n                break  # no step is made of fewer micro-batches\n", ""),
        ],
        *(
            "last_step",
            "2 micro-batches, divided by 4",
            "https://github.com/Lightning-AI/pytorch-lightning/issues/19987",
        ),
        flags=("--accumulate", "4"),
    ),
    "what is left of an epoch is added to the next": Mistake(
        "own_trainer",
        [
            (
                "is_last = (number + 1) % self.args.accumulate == 0",
                "self.seen = getattr(self, 'seen', 0) + 1\n            is_last = self.seen % self.args.accumulate == 0",
            ),
            ("            if number == usable:\n                break  # no step is made of fewer micro-batches\n", ""),
        ],
        *("leftover", "micro-batches of two epochs", "https://github.com/WalkingMeatAxolotl/AnimaLoraStudio/pull/305"),
        flags=("--accumulate", "4"),
    ),
    "set_epoch is not called": Mistake(
        "ddp_series",
        [("        self.train_data.sampler.set_epoch(epoch)\n", "")],
        *("set_epoch", "each epoch has the same order", f"{PYTORCH}/pytorch/issues/31771"),
    ),
    "no DistributedSampler": Mistake(
        "ddp_series",
        [
            ("shuffle=False, sampler=DistributedSampler(dataset)", "shuffle=True"),
            ("        self.train_data.sampler.set_epoch(epoch)\n", ""),
        ],
        *("all_the_data", "each counts 2 times", "https://github.com/Parskatt/RoMa/issues/32"),
    ),
    "a sampler with another seed on each process": Mistake(
        "ddp_series",
        [("DistributedSampler(dataset)", "DistributedSampler(dataset, seed=int(os.environ['RANK']))")],
        *("samples", "are in no process's part", "https://github.com/NVlabs/LongLive/issues/71"),
    ),
    "a forward pass around DistributedDataParallel": Mistake(
        "ddp_series",
        [("output = self.model(source)", "output = self.model.module(source)")],
        *("around_ddp", "ranks 0 and 1 have different gradients", "https://github.com/moojink/openvla-oft/issues/160"),
    ),
    "zero_grad is missing": Mistake(
        "ddp_series",
        [("        self.optimizer.zero_grad()\n", "")],
        *("zero_grad", "are still there", "https://github.com/facebookresearch/nwm/issues/16"),
    ),
    "divided by the processes, which DDP does": Mistake(
        "ddp_series",
        [("loss.backward()", "(loss / int(os.environ['WORLD_SIZE'])).backward()")],
        *("factor", "0.5 times what it is on 1 process", "https://github.com/sanderwood/bgpt/issues/5"),
    ),
    "a snapshot without the optimizer": Mistake(
        "ddp_series",
        [('            "OPTIMIZER_STATE": self.optimizer.state_dict(),\n', "")],
        *("checkpoint_lacks", "not the optimizer", "https://github.com/PolymathicAI/the_well/issues/77"),
    ),
    "all processes write the snapshot": Mistake(
        "ddp_series",
        [("if self.global_rank == 0 and epoch", "if epoch")],
        *("checkpoint_race", "2 processes write snapshot.pt", "https://github.com/bytedance/ibot/issues/15"),
    ),
    "another split on each process": Mistake(
        "ddp_mnist",
        [
            ("torch.manual_seed(1)", "torch.manual_seed(1 + rank)"),
            (
                "dataset1, dataset2 = Digits(train=True, transform=random_shift), Digits(train=False)",
                "dataset1, dataset2 = torch.utils.data.random_split(Digits(train=True), [600, 300])",
            ),
        ],
        *(
            "split",
            "of the evaluation on rank 0 are trained on",
            "https://github.com/Lightning-AI/pytorch-lightning/issues/7728",
        ),
    ),
    "an augmentation with a generator of its own": Mistake(
        "ddp_mnist",
        [
            ("def random_shift", "GENERATOR = torch.Generator()\n\n\ndef random_shift"),
            ("torch.randint(-1, 2, ())", "torch.randint(-3, 4, (), generator=GENERATOR)"),
            ("num_workers=1", "num_workers=0"),
        ],
        *("items", "are not among those of 1 process", f"{PYTORCH}/pytorch/issues/5059"),
    ),
    "a test that is not summed over processes": Mistake(
        "ddp_mnist",
        [("    dist.all_reduce(totals)\n", "")],
        *("eval_share", "nothing adds up", "https://github.com/NVIDIA/apex/pull/22"),
    ),
    "a test whose sampler repeats samples": Mistake(
        "ddp_mnist",
        [
            (
                "DataLoader(share, batch_size=args.batch_size)",
                "DataLoader(dataset2, batch_size=args.batch_size, sampler=DistributedSampler(dataset2, shuffle=False))",
            )
        ],
        *("eval_repeated", "1 of 77 samples counted twice", f"{PYTORCH}/pytorch/issues/25162"),
    ),
    "a mean of means of batches": Mistake(
        "ddp_mnist",
        [
            ('F.nll_loss(output, target, reduction="sum")', "F.nll_loss(output, target)"),
            ("{test_loss / count:.4f}", "{test_loss / len(test_loader) / dist.get_world_size():.4f}"),
        ],
        *("eval_mean", "from the same weights", "https://github.com/allenai/allennlp/issues/4347"),
    ),
    "other weights on each process": Mistake(
        "timm_loop",
        [
            ("    model = DistributedDataParallel(model, broadcast_buffers=False)\n", ""),
            ("ModelEma(model.module", "ModelEma(model"),
            ("update(model.module)", "update(model)"),
            ("        loss.backward()\n", AVERAGED_BY_HAND),
        ],
        *("initial_weights", "begin with different weights", "https://github.com/facebookresearch/detr/issues/544"),
    ),
    "a collective call on rank 0 alone": Mistake(
        "timm_loop",
        [
            ("        metrics = validate(model, ", "        metrics = rank == 0 and validate(model, "),
            ("        ema_metrics =", "        ema_metrics = rank == 0 and"),
        ],
        *("hangs", "rank 0 calls all_reduce, and rank 1 does not", "https://github.com/horovod/horovod/issues/600"),
    ),
    "the schedule is not restored": Mistake(
        "own_trainer",
        [
            ('        self.scheduler.load_state_dict(state["scheduler"])\n', ""),
            ('        self.optimizer.load_state_dict(state["optimizer"])\n', ""),
        ],
        *("resume", "state of the optimizer is not restored", "https://github.com/lightly-ai/lightly-train/pull/301"),
        resume_flags="--resume",
    ),
    "the epoch begins anew when resuming": Mistake(
        "own_trainer",
        [('state["batches_done"]\n', "0\n")],
        *("resume", "were trained on before the checkpoint", f"{HUGGING_FACE}/accelerate/issues/4195"),
        resume_flags="--resume",
    ),
}
