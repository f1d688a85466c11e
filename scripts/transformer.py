"""A language model, a small Llama, trained from scratch on the sources of Python's standard library or on your text.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/transformer.py
    accelerate launch --config_file accelerate_configs/ddp.yaml --mixed_precision bf16 scripts/transformer.py \
        --dataset roneneldan/TinyStories --vocabulary 8192 --dim 768 --layers 12 --context 1024 --batch_size 256
    python scripts/transformer.py --output_dir runs/mine --prompt "def read(file):"

1.81 bits per byte of the test files after 1000 steps; gzip needs 2.11, xz 1.92, an order-3 model 1.97. 58 s, 46 s of
them training, on two cores of a Xeon with AVX-512; Python 3.11, torch 2.15, accelerate 1.15.

Sources: Llama, H. Touvron et al., https://arxiv.org/abs/2302.13971; rotary positions, J. Su et al.,
https://arxiv.org/abs/2104.09864; tied embeddings, O. Press and L. Wolf, https://arxiv.org/abs/1608.05859.
"""

import math
import sys
from pathlib import Path

import torch
import torch.utils.checkpoint
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

# Finds utils from any folder, without an install.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from utils import launch
from utils.atomic_files import read_entry
from utils.console import stop
from utils.datasets.text import STDLIB, PackedText, bits_per_byte_of_others, count_targets, load_text
from utils.datasets.tokens import END, BytePairs, load_tokenizer
from utils.extras.pretrained import load_pretrained
from utils.flags import ArgumentParser, at_least, fraction, non_negative_float, positive_int
from utils.loader import GlobalLoader
from utils.run import Run

TEST_BATCH_SIZE = 64
WARMUP = 0.05  # of all steps


def parse_args():
    parser = ArgumentParser(__doc__)

    add = parser.add_argument_group("data").add_argument
    add("--dataset", default=STDLIB, help="Hub id, or folder of text or parquet files")
    add("--tokenizer", metavar="FILE", help="tokenizer.json of a run or of a model on the Hub (default: learn one)")

    # resume_invariant: a resumed run must have the same values.
    add = parser.add_argument_group("model and training", resume_invariant=True).add_argument
    add("--vocabulary", type=at_least(256), default=1024, help="tokens to learn: bytes, and pairs of tokens")
    add("--context", type=positive_int, default=128, help="tokens per line; attention goes no further back")
    add("--dim", type=positive_int, default=128, help="features per token")
    add("--layers", type=positive_int, default=4, help="blocks of attention and MLP")
    add("--heads", type=positive_int, default=4, help="attention heads")
    add("--dropout", type=fraction, default=0.0, help="dropout probability")
    add("--pretrained", metavar="FILE", help="weights to start from, such as a run's model.safetensors")
    add("--batch_size", type=positive_int, default=8, help="lines per optimizer step, over all processes")
    add("--lr", type=non_negative_float, default=3e-3, help="highest learning rate: warm-up, then a cosine")
    add("--weight_decay", type=non_negative_float, default=0.1, help="weight decay of AdamW, of matrices only")
    add("--max_grad_norm", type=non_negative_float, default=1.0, help="clip the norm of a step's gradient; 0: off")

    add = parser.add_argument_group("length and memory").add_argument
    add("--max_steps", type=positive_int, default=1000, help="optimizer steps; tests after each epoch and at the end")
    add("--gradient_accumulation_steps", type=positive_int, default=1, help="micro-batches per step, on each process")
    add("--checkpoint_activations", action="store_true", help="keep less for the backward pass, compute it twice")
    add("--compile", action="store_true", help="torch.compile the model")

    add = parser.add_argument_group("writing").add_argument
    add("--prompt", metavar="TEXT", help="do not train: continue TEXT with the model of the run in --output_dir")
    add("--num_tokens", type=positive_int, default=200, help="tokens to write, at most")
    add("--temperature", type=non_negative_float, default=0.7, help="of what is written; 0: the most likely tokens")

    parser.add_run_flags(log_every=50)
    args = parser.parse_args()
    if args.dim % (2 * args.heads):
        parser.error(f"--dim {args.dim} must be a multiple of 2 x --heads {args.heads}: rotary positions turn pairs")
    return args


def rotate(x, cos, sin):
    """Rotary positions: turn pairs of the features (N, heads, T, 2 * D) by the angle of their position, (T, D)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).type_as(x)


class Block(nn.Module):
    """Attention, then an MLP with a gate (SwiGLU). Each reads normalised features, and adds to them."""

    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        hidden = 32 * round(dim * 8 / 3 / 32)  # as many weights as an MLP of 4 * dim without a gate
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x, rotation, mask, cache=None):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, *rotation), rotate(k, *rotation)  # (N, heads, T, dim / heads)
        if cache is not None:  # of earlier tokens, in writing
            cache.append((k, v))
            k, v = (torch.cat(parts, dim=2) for parts in zip(*cache, strict=True))
        dropout = self.dropout.p if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.dropout(self.down(F.silu(gate) * up))


class Blocks(nn.ModuleList):
    """Blocks one after the other. With a `forward`, unlike a plain ModuleList, so that FSDP can shard it."""

    checkpoint_activations = False

    def forward(self, x, rotation, mask, caches=None):
        for number, block in enumerate(self):
            if self.checkpoint_activations and self.training:
                x = torch.utils.checkpoint.checkpoint(block, x, rotation, mask, use_reentrant=False)
            else:
                x = block(x, rotation, mask, caches[number] if caches else None)
        return x


class TiedEmbedding(nn.Embedding):
    """One matrix, to make features of tokens, and logits of features. In `forward`, where FSDP gathers it."""

    def forward(self, x):
        return F.linear(x, self.weight) if x.is_floating_point() else super().forward(x)


class Transformer(nn.Module):
    def __init__(self, vocabulary: int, dim: int, layers: int, heads: int, dropout: float = 0.0):
        super().__init__()
        self.pairs = dim // heads // 2
        self.embed = TiedEmbedding(vocabulary, dim)
        self.blocks = Blocks(Block(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_added = name.endswith(("out.weight", "down.weight"))  # 2 * layers sums keep the size of x
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if is_added else 0.02)

    def forward(self, tokens, targets=None, caches=None):
        """Logits (N, T, vocabulary) of tokens (N, T); with targets (N, T), the mean loss of each line, (N,).

        Args:
            targets: the next tokens; -100 where a line is only filled up.
            caches: in writing, a list for each block. After the first call, a call has one more token.
        """
        tokens = tokens.long()
        x = self.embed(tokens)
        start, mask = 0, None
        if caches and caches[0]:
            start = sum(k.shape[2] for k, _ in caches[0])
        else:  # a token sees those before it, back to the END that its document begins with
            document = (tokens == END).cumsum(1)[:, None]
            seen = (document[..., :, None] == document[..., None, :]).tril()
            mask = torch.zeros_like(seen, dtype=x.dtype).masked_fill_(~seen, -math.inf)
        # Only differences of positions count: they need not begin again with a document.
        positions = torch.arange(start, start + tokens.shape[1], device=x.device)
        angles = positions[:, None] * 10000 ** (-torch.arange(self.pairs, device=x.device) / self.pairs)
        x = self.blocks(x, (angles.cos(), angles.sin()), mask, caches)
        logits = self.embed(self.norm(x))
        if targets is None:
            return logits
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten().long(), reduction="none").view(targets.shape)
        return losses.sum(1) / (targets != -100).sum(1).clamp(min=1)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # not compiled again for each length
def write(model, tokens: list[int], num_tokens: int, context: int, temperature: float, seed: int) -> list[int]:
    """A document that begins with `tokens`, and goes on with up to num_tokens of the model's. Collective with FSDP."""
    device, generator = model.embed.weight.device, torch.Generator().manual_seed(seed)
    tokens, length = [END, *tokens], context
    for _ in range(num_tokens):
        new = tokens[-1:]  # keys and values of those before it are in the caches
        if length == context:  # full: begin again, as a line does in the middle of a document
            caches, length, new = [[] for _ in model.blocks], 0, tokens[-max(context // 2, 1) :]
        logits = model(torch.tensor([new], device=device), caches=caches)[0, -1].float().cpu()
        length += len(new)
        token = logits.argmax()
        if temperature:
            token = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        tokens.append(int(token))
        if tokens[-1] == END:
            break
    return tokens


def continue_prompt(args) -> None:
    """Print --prompt, and what the model in --output_dir writes after it. In plain PyTorch."""
    folder = Path(args.output_dir or "--output_dir")
    trained = read_entry(folder / "run.json", "arguments", dict)
    if trained is None or not (folder / "model.safetensors").is_file():
        stop(f"--prompt needs the model of a finished run: {folder} has none")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    model = Transformer(tokenizer.vocabulary, trained["dim"], trained["layers"], trained["heads"]).eval()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    tokens = tokenizer.encode(args.prompt.encode()).tolist()
    print(tokenizer.decode(write(model, tokens, args.num_tokens, trained["context"], args.temperature, args.seed)))


@torch.no_grad()
def evaluate(model, loader, run) -> dict:
    """Loss and bits per byte of the whole test text; each token counts once."""
    model.eval()
    metrics = run.new_metrics()
    for batch in run.test_batches(loader):
        losses = model(*batch.data)
        metrics.add(batch, loss=losses, bits_per_byte=loader.dataset.bits_per_byte(losses))
    return metrics.reduce()


def lr_factor(step: int, total_steps: int) -> float:
    """Learning rate of a step over the highest one: it rises, then falls along a cosine."""
    return min((step + 1) / (WARMUP * total_steps + 1), 0.5 + 0.5 * math.cos(math.pi * step / total_steps))


def main():
    args = parse_args()
    if args.prompt is not None:
        return continue_prompt(args)
    accelerator = launch.make_accelerator(args)
    run = Run(accelerator, args)

    train_texts, test_texts = load_text(args.dataset)
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else BytePairs.learn(train_texts, args.vocabulary)
    train_data, test_data = (PackedText(texts, tokenizer, args.context) for texts in (train_texts, test_texts))
    # A line counts by its tokens. The loader sums them over the whole step, before its first backward pass.
    train_loader = GlobalLoader(train_data, args.batch_size, accelerator, seed=args.seed, loss_weights=count_targets)
    test_loader = GlobalLoader(test_data, TEST_BATCH_SIZE, accelerator, loss_weights=count_targets)

    model = Transformer(tokenizer.vocabulary, args.dim, args.layers, args.heads, args.dropout)
    model.blocks.checkpoint_activations = args.checkpoint_activations
    if args.pretrained:
        load_pretrained(model, args.pretrained)
    if args.compile:
        model.compile()
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, args.lr, betas=(0.9, 0.95), fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, args.max_steps))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    # With --resume, this loads the newest checkpoint.
    checkpoint = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    run.start(train_loader, test_loader, args.max_steps, checkpoint=checkpoint)
    if accelerator.is_main_process:
        tokenizer.save(run.folder.path / "tokenizer.json")
    others = bits_per_byte_of_others(train_texts, test_texts)
    accelerator.print("bits per byte of the test:", *(f"{name} {bits:.3f}" for name, bits in others.items()))
    run.add_to_summary(bits_per_byte_of_others=others)

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):  # logs, saves and stops between steps: do not `break`
            tokens, targets = batch.data
            with accelerator.accumulate(model):
                losses = model(tokens, targets)  # one per line: the mean over its tokens
                accelerator.backward(batch.mean_loss(losses))  # the mean over all tokens of the step
                if args.max_grad_norm and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            run.log_train(batch, loss=losses, bits_per_byte=train_data.bits_per_byte(losses))
        result = evaluate(model, test_loader, run)
        bare = accelerator.unwrap_model(model)
        sample = tokenizer.decode(write(bare, [], args.num_tokens, args.context, args.temperature, args.seed))
        accelerator.print(f"the model writes:\n{sample}")
        run.log_test(result | {"sample": sample})
    run.finish()


if __name__ == "__main__":
    main()
