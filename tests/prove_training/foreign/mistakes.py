"""Mistakes that somebody has made, each as a change of one of these programs, with the thread that tells of it."""

from typing import NamedTuple


class Mistake(NamedTuple):
    """A change of a program.

    Args:
        program: a file of this folder or of unusual/.
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
SAMPLER = "shuffle=False, sampler=DistributedSampler(dataset)"
SET_EPOCH = ("        self.train_data.sampler.set_epoch(epoch)\n", "")
ITEMS = """    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.data[index]
"""
ALL_ITEMS = """    def __iter__(self):
        return iter(self.data[:96])
"""
TWO_HEADS = """class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(20, 1)
        self.other = torch.nn.Linear(20, 1)

    def forward(self, x):
        return super().forward(x) + (self.other(x) if len(x) % 5 else 0)


def prepare_dataloader"""
BATCHES = """class Batches:
    def __init__(self, rank, world_size):
        order = torch.randperm(96, generator=torch.Generator().manual_seed(rank)).tolist()
        self.batches = [order[i : i + 8] for i in range(0, 96, 8)][rank::world_size]

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def prepare_dataloader"""
GATHERED = """    parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features)
    parts[dist.get_rank()] = features
    return torch.cat(parts)
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
        *("eval_repeated", "7 samples counted twice", f"{HUGGING_FACE}/accelerate/issues/226"),
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
        [("            if number == usable:\n                break  # no step is made of fewer micro-batches\n", "")],
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
    "a stream that is not split": Mistake(
        "ddp_series",
        [
            (ITEMS, ALL_ITEMS),
            SET_EPOCH,
            ("DataLoader, Dataset", "DataLoader, IterableDataset as Dataset"),
            (" | Steps: {len(self.train_data)}", ""),
            (SAMPLER, "shuffle=False"),
        ],
        *("stream", "trains on the same samples", f"{HUGGING_FACE}/datasets/issues/5360"),
    ),
    "a batch sampler with another seed on each process": Mistake(
        "ddp_series",
        [
            ("def prepare_dataloader", BATCHES),
            SET_EPOCH,
            (
                "batch_size=batch_size, " + SAMPLER,
                "batch_sampler=Batches(int(os.environ['RANK']), int(os.environ['WORLD_SIZE']))",
            ),
        ],
        *("samples", "samples of an epoch count twice", "https://github.com/openspeech-team/openspeech/issues/149"),
    ),
    "other numbers of batches": Mistake(
        "ddp_series",
        [
            SET_EPOCH,
            (SAMPLER, "shuffle=False"),
            ("DataLoader(dataset", "DataLoader(list(dataset.data[: 77 - 9 * int(os.environ['RANK'])])"),
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
    "an optimizer with a copy of the model": Mistake(
        "ddp_series",
        [("SGD(model.parameters()", "SGD(__import__('copy').deepcopy(model).parameters()")],
        *(
            "untrained",
            "no parameter of the optimizer has a gradient",
            "https://github.com/skorch-dev/skorch/issues/317",
        ),
    ),
    "zero_grad at the beginning of accumulate": Mistake(
        "accelerate_accumulation",
        [
            ("                optimizer.zero_grad()\n", ""),
            ("accumulate(model):\n", "accumulate(model):\n                optimizer.zero_grad()\n"),
        ],
        *("zeroed", "after 1 of 2 micro-batches", "https://github.com/starVLA/starVLA/issues/395"),
    ),
    "a step after the first micro-batch": Mistake(
        "own_trainer",
        [("is_last = (number + 1) % self.args", "is_last = number % self.args")],
        *("first_step", "the first step has 1 micro-batch", "https://github.com/rasbt/LLMs-from-scratch/issues/299"),
    ),
    "a schedule on rank 0 alone": Mistake(
        "own_trainer",
        [("self.scheduler.step()", "self.rank or self.scheduler.step()")],
        *("schedule_alone", "0.0095 on rank 0 and of 0.01 on rank 1", "https://github.com/rwth-i6/returnn/issues/1493"),
    ),
    "the batches are skipped in each epoch": Mistake(
        "own_trainer",
        [("        self.batches_done = 0\n\n", "\n")],
        *("resume", "of the next epoch are skipped", f"{HUGGING_FACE}/accelerate/issues/1451"),
        flags=("--save_every", "1"),
        resume_flags="--resume",
    ),
    "more samples per step on more processes": Mistake(
        "nanogpt",
        [("    gradient_accumulation_steps //= ddp_world_size\n", "")],
        *("", "a step has 48 samples on 2 processes and 24 on 1", "https://github.com/Lightning-AI/litgpt/issues/496"),
    ),
    "clipped before unscale_": Mistake(
        "amp_loop",
        [("            scaler.unscale_(optimizer)\n", "")],
        *("clip_scaled", "still multiplied by GradScaler", f"{PYTORCH}/examples/issues/1196"),
    ),
    "no train() after the test": Mistake(
        "amp_loop",
        [("    model.train()\n", "")],
        *("train_mode", "trains in evaluation mode", f"{PYTORCH}/tutorials/issues/1624"),
    ),
    "a plateau of the local loss": Mistake(
        "amp_loop",
        [("lr_scheduler.step(loss)", "lr_scheduler.step(loss + rank)")],
        *("plateau", "ReduceLROnPlateau gets", "https://github.com/lucidrains/DALLE-pytorch/issues/268"),
    ),
    "an average on rank 0 alone": Mistake(
        "amp_loop",
        [("            model_ema.update", "            dist.get_rank() or model_ema.update")],
        *("eval_weights", "other weights on rank 1", "https://github.com/lucidrains/ema-pytorch/issues/9"),
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
    "a head that the optimizer does not have": Mistake(
        "amp_loop",
        [("    scaler = torch", "    model[2] = nn.Linear(216, 2)\n    scaler = torch")],
        *("", "2.weight and 1 other: a gradient, and in no optimizer", "https://github.com/zjunlp/HVPNeT/issues/5"),
    ),
    "tensors of unequal shapes in gather": Mistake(
        "accelerate_nlp",
        [("seen += len(references)", "seen += len(references)\n            accelerator.gather(batch['input_ids'])")],
        *("shapes", "calls gather with a tensor of 6x", f"{HUGGING_FACE}/accelerate/issues/167"),
    ),
    "a test that drops the last batch": Mistake(
        "accelerate_accumulation",
        [("DataLoader(test, ", "DataLoader(test, drop_last=True, ")],
        *("", "drop_last leaves out", "https://github.com/thuml/Autoformer/issues/104"),
    ),
    "save_state on the main process": Mistake(
        "accelerate_cv",
        [("        accelerator.save_state", "        accelerator.is_main_process and accelerator.save_state")],
        *("", "rank 0 alone calls save_state", f"{HUGGING_FACE}/accelerate/issues/1171"),
    ),
    "the same noise on all processes": Mistake(
        "unusual/diffusion",
        [("manual_seed(accelerator.process_index)", "manual_seed(0)")],
        *("same_noise", "draws the same numbers", "https://github.com/Robbyant/lingbot-vla-v2/issues/41"),
    ),
    "a gather without a gradient": Mistake(
        "unusual/contrastive",
        [
            (
                "    return torch.cat(all_gather(features))\n",
                GATHERED,
            )
        ],
        *("gather", "no gradient goes through all_gather", "https://github.com/kohjingyu/fromage/issues/33"),
    ),
}
