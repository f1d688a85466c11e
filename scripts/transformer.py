"""A small Llama, trained from scratch on the source code of Python's standard library, or on your text.

    accelerate launch --config_file accelerate_configs/cpu.yaml scripts/transformer.py
    accelerate launch --config_file accelerate_configs/ddp.yaml --mixed_precision bf16 scripts/transformer.py \
        --dataset roneneldan/TinyStories --vocabulary 8192 --dim 768 --layers 12 --context 1024 --batch_size 256
    python scripts/transformer.py --output_dir runs/mine --prompt "def read(file):"

1.80 bits per byte on the test files after 1000 steps; gzip needs 2.11, xz 1.92. 137 s of CPU time with one
thread on a Xeon with AVX-512; Python 3.11, torch 2.15, accelerate 1.15, tokenizers 0.23.

Sources: Llama, H. Touvron et al., https://arxiv.org/abs/2302.13971; rotary positions, J. Su et al.,
https://arxiv.org/abs/2104.09864; tied embeddings, O. Press and L. Wolf, https://arxiv.org/abs/1608.05859.
"""

import json
import math
import sys
from pathlib import Path

import torch
import torch.utils.checkpoint
from safetensors.torch import load_file
from torch import distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the folder of utils/

from utils import atomic_files, launch
from utils.console import printable, stop
from utils.data.text import EOS, count_targets, load_tokenizer, load_tokens
from utils.flags import ArgumentParser, at_least, fraction, non_negative_float, non_negative_int, positive_int
from utils.loader import GlobalLoader
from utils.parallel import fsdp
from utils.pretrained import load_pretrained
from utils.run import Run

TEST_BATCH_SIZE = 64
WARMUP = 0.05  # of all steps


def parse_args():
    parser = ArgumentParser(__doc__)

    data = parser.add_argument_group("data")
    data.add_argument("--dataset", default="stdlib", help="Hub id, or folder of text, JSON lines, parquet or tokens")
    data.add_argument("--text_column", metavar="NAME", help="of rows and JSON lines (default: `text`, or the only one)")
    types = "uint8", "uint16", "int32", "uint32", "int64"
    data.add_argument("--token_dtype", choices=types, help="of train.bin and val.bin (default: by the tokenizer)")
    data.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json to use (default: learn one from --dataset)")
    data.add_argument("--cache_dir", metavar="FOLDER", help="for the tokens (default: in Hugging Face's cache)")
    data.add_argument("--max_test_samples", type=non_negative_int, default=0, help="test on N sequences; 0: all")

    model = parser.add_argument_group("model")
    model.add_argument("--vocabulary", type=at_least(257), default=1024, help="tokens of a learned tokenizer")
    model.add_argument("--context", type=positive_int, default=128, help="context length, in tokens")
    model.add_argument("--dim", type=positive_int, default=128, help="features per token")
    model.add_argument("--layers", type=positive_int, default=4, help="blocks of attention and MLP")
    model.add_argument("--heads", type=positive_int, default=4, help="attention heads")
    model.add_argument("--dropout", type=fraction, default=0.0, help="dropout probability")
    model.add_argument("--separate_documents", action="store_true", help="attention does not cross documents: slower")
    model.add_argument("--pretrained", metavar="FILE", help="initial weights, such as a run's model.safetensors")

    train = parser.add_argument_group("training")
    train.add_argument("--batch_size", type=positive_int, default=8, help="sequences per step, over all processes")
    train.add_argument("--lr", type=non_negative_float, default=3e-3, help="peak learning rate: warm-up, then a cosine")
    train.add_argument("--weight_decay", type=non_negative_float, default=0.1, help="weight decay of matrices (AdamW)")
    train.add_argument("--max_grad_norm", type=non_negative_float, default=1.0, help="clip the gradient norm; 0: off")

    steps = parser.add_argument_group("length and memory", may_change=True)  # when resuming
    steps.add_argument("--max_steps", type=positive_int, default=1000, help="optimizer steps")
    steps.add_argument("--gradient_accumulation_steps", type=positive_int, default=1, help="micro-batches per step")
    steps.add_argument("--checkpoint_activations", action="store_true", help="recompute them: less memory")
    steps.add_argument("--compile", action="store_true", help="torch.compile the model")

    sampling = parser.add_argument_group("sampling", may_change=True)
    sampling.add_argument("--prompt", help="continue PROMPT with the model in --output_dir, without training")
    sampling.add_argument("--num_tokens", type=positive_int, default=200, help="maximum number of new tokens")
    sampling.add_argument("--temperature", type=non_negative_float, default=0.7, help="sampling temperature; 0: greedy")

    parser.add_run_flags(log_every=50)
    args = parser.parse_args()
    if args.dim % (2 * args.heads):
        parser.error(f"--dim {args.dim} must be a multiple of 2 x --heads {args.heads}, for the rotary positions")
    if args.pretrained and not args.tokenizer:
        parser.error("--pretrained needs --tokenizer: the tokenizer.json that the weights were trained with")
    return args


def rotate(x, cos, sin):
    """Rotary position embedding: rotate x (N, heads, T, D) by the angles whose cos and sin are given, (T, D / 2)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).type_as(x)


def document_mask(tokens, eos, x):
    """Added to attention scores, (N, 1, T, T): 0 for earlier tokens of the same document, which starts with eos."""
    document = (tokens == eos).cumsum(1)[:, None]
    same = (document[..., :, None] == document[..., None, :]).tril()
    device = x.device.type  # in the dtype of the attention, so that no layer converts it again
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    return torch.zeros_like(same, dtype=dtype).masked_fill(~same, -math.inf)


class Block(nn.Module):
    """Pre-norm attention, then a pre-norm SwiGLU MLP, each with a residual connection."""

    def __init__(self, dim: int, heads: int, dropout: float):
        super().__init__()
        hidden = 32 * max(1, round(dim * 8 / 3 / 32))  # as many weights as an ungated MLP with 4 * dim hidden features
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x, rotation, mask, kv_cache=None):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, *rotation), rotate(k, *rotation)  # (N, heads, T, dim / heads)
        if kv_cache is not None:
            if kv_cache:
                k, v = torch.cat([kv_cache[0], k], dim=2), torch.cat([kv_cache[1], v], dim=2)
            kv_cache[:] = k, v
        dropout = self.dropout.p if self.training else 0.0
        is_causal = mask is None and q.shape[2] > 1  # without a mask, GPUs use their flash kernel
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal)
        x = x + self.dropout(self.out(y.transpose(1, 2).flatten(2)))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.dropout(self.down(F.silu(gate) * up))


class TiedEmbedding(nn.Embedding):
    """Input embedding and output projection with one weight. Both use `forward`, in which FSDP gathers the weight."""

    def forward(self, x):
        return F.linear(x, self.weight) if x.is_floating_point() else super().forward(x)


class Transformer(nn.Module):
    def __init__(self, vocabulary: int, dim: int, layers: int, heads: int, dropout: float = 0.0, *, eos: int = 0):
        """eos: the token before and after each document. Attention crosses it, unless separate_documents is set."""
        super().__init__()
        self.rotary_pairs, self.eos, self.separate_documents = dim // heads // 2, eos, False
        self.checkpoint_activations = False
        self.embed = TiedEmbedding(vocabulary, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.layers = layers
        for name, parameter in self.named_parameters():
            self.initialize(name, parameter)

    def initialize(self, name: str, parameter: torch.Tensor) -> None:
        """Draw the first numbers of a parameter."""
        if parameter.ndim == 1:
            return nn.init.ones_(parameter)
        is_residual = name.endswith(("out.weight", "down.weight"))  # 2 * layers outputs are added to x
        nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * self.layers) if is_residual else 0.02)

    def tflop_per_sequence(self, context: int) -> float:
        """Operations of a training step, forward and backward: PaLM, https://arxiv.org/abs/2204.02311, appendix B."""
        parameters = sum(parameter.numel() for parameter in self.parameters())
        return context * (6 * parameters + 12 * self.layers * context * self.embed.embedding_dim) / 1e12

    def forward(self, tokens, targets=None, kv_cache=None):
        """Logits (N, T, vocabulary) of tokens (N, T); with targets (N, T), the mean loss of each sequence, (N,).

        Args:
            targets: the next tokens; cross_entropy's ignore_index (-100) where there is none.
            kv_cache: a list per block, empty before the first call; later calls take one token each.
        """
        x = self.embed(tokens.long())
        start = kv_cache[0][0].shape[2] if kv_cache and kv_cache[0] else 0
        mask = document_mask(tokens, self.eos, x) if self.separate_documents and not start else None
        # Attention depends only on differences of positions, so these need not restart with each document.
        positions = torch.arange(start, start + tokens.shape[1], device=x.device)
        angles = positions[:, None] * 10000 ** (-torch.arange(self.rotary_pairs, device=x.device) / self.rotary_pairs)
        rotation = angles.cos(), angles.sin()
        for number, block in enumerate(self.blocks):
            if self.checkpoint_activations and self.training:
                x = torch.utils.checkpoint.checkpoint(block, x, rotation, mask, use_reentrant=False)
            else:
                x = block(x, rotation, mask, kv_cache[number] if kv_cache else None)
        logits = self.embed(self.norm(x))
        if targets is None:
            return logits
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten().long(), reduction="none").view(targets.shape)
        return losses.sum(1) / count_targets([tokens, targets]).clamp(min=1)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # do not recompile for every length
def generate(model, tokens: list[int], num_tokens: int, context: int, temperature: float, seed: int) -> list[int]:
    """EOS, `tokens`, and up to num_tokens sampled tokens, until EOS. Collective with FSDP."""
    device, generator = model.embed.weight.device, torch.Generator().manual_seed(seed)
    tokens = [model.eos, *tokens]
    inputs, kv_cache = tokens[-context:], [[] for _ in model.blocks]
    for _ in range(num_tokens):
        logits = model(torch.tensor([inputs], device=device), kv_cache=kv_cache)[0, -1].cpu().double()
        token = logits.argmax()
        if temperature:
            token = torch.multinomial(((logits - logits.max()) / temperature).softmax(0), 1, generator=generator)
        if isinstance(model, FSDPModule):  # a rank that stopped at an EOS of its own would leave the others waiting
            token = token.to(device)
            dist.broadcast(token, 0)
        tokens.append(int(token))
        if tokens[-1] == model.eos:
            break
        inputs = tokens[-1:]
        if kv_cache[0][0].shape[2] == context:  # full: continue from the last half of the context
            inputs, kv_cache = tokens[-max(context // 2, 1) :], [[] for _ in model.blocks]
    return tokens


def continue_prompt(args) -> None:
    """Print --prompt and its continuation by the model in --output_dir, in plain PyTorch."""
    folder = Path(args.output_dir or "--output_dir")
    try:
        trained = json.loads((folder / "run.json").read_text())["arguments"]
        dim, layers, heads, context = (trained[name] for name in ("dim", "layers", "heads", "context"))
        tokenizer = load_tokenizer(folder / "tokenizer.json")
        model = Transformer(tokenizer.get_vocab_size(), dim, layers, heads, eos=tokenizer.token_to_id(EOS)).eval()
        model.load_state_dict(load_file(folder / "model.safetensors"))
    except Exception as error:  # no such file, a damaged one, a run of a different script, ...
        stop(f"--prompt needs --output_dir with a finished run of this script; {folder} cannot be read: {error!r:.200}")
    prompt = args.prompt.encode(errors="surrogateescape").decode(errors="replace")  # as documents are read
    tokens = tokenizer.encode(prompt, add_special_tokens=False).ids
    print(printable(tokenizer.decode(generate(model, tokens, args.num_tokens, context, args.temperature, args.seed))))


@torch.no_grad()
def evaluate(model, loader, run) -> dict:
    """Loss and bits per byte over the whole test text; each token counts once."""
    model.eval()
    metrics = run.new_metrics()
    for batch in run.test_batches(loader):
        losses = model(*batch.data)
        bits = loader.dataset.bits_per_byte(losses)
        metrics.add(batch, weights=batch.weights, loss=losses, **bits)  # means over tokens
    return metrics.reduce()


def lr_factor(step: int, total_steps: int) -> float:
    """Learning rate of a step / highest learning rate: linear warm-up, then a cosine."""
    return min((step + 1) / (WARMUP * total_steps + 1), 0.5 + 0.5 * math.cos(math.pi * step / total_steps))


def main():
    args = parse_args()
    if args.prompt is not None:
        return continue_prompt(args)
    accelerator = launch.make_accelerator(args)
    run = Run(accelerator, args)

    # Tokenized once, into files of the cache, which are read sequence by sequence.
    sizes = args.vocabulary, args.context
    data = load_tokens(args.dataset, args.tokenizer, *sizes, args.cache_dir, args.text_column, args.token_dtype)
    train_data, test_data, tokenizer = data
    # Each sequence is weighted by its number of targets, summed over the whole step before the first backward pass.
    options = {"loss_weights": count_targets}
    train_loader = GlobalLoader(train_data, args.batch_size, accelerator, seed=args.seed, **options)
    test_loader = GlobalLoader(test_data, TEST_BATCH_SIZE, accelerator, max_samples=args.max_test_samples, **options)

    vocabulary, eos = tokenizer.get_vocab_size(), tokenizer.token_to_id(EOS)
    sizes = vocabulary, args.dim, args.layers, args.heads, args.dropout
    model = fsdp.build(accelerator, lambda: Transformer(*sizes, eos=eos), args.seed)
    model.separate_documents = args.separate_documents
    model.checkpoint_activations = args.checkpoint_activations
    if args.pretrained and not run.folder.has_checkpoint:
        load_pretrained(model, args.pretrained)
    if args.compile:
        model.compile()
    run.speeds = {"tokens/s": args.context}
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
        atomic_files.write_atomically(run.folder.path / "tokenizer.json", lambda path: tokenizer.save(str(path)))

    for epoch in run.epochs():
        model.train()
        for batch in run.batches(train_loader, epoch):  # logs, saves and stops between steps: do not `break`
            tokens, targets = batch.data
            with accelerator.accumulate(model):
                losses = model(tokens, targets)  # (N,): the mean over the targets of each sequence
                accelerator.backward(batch.mean_loss(losses))  # the mean over all targets of the step
                if args.max_grad_norm and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            bits = train_data.bits_per_byte(losses)
            run.log_train(batch, weights=batch.weights, loss=losses, **bits)  # means over tokens
        result = evaluate(model, test_loader, run)
        bare = accelerator.unwrap_model(model)
        sample = tokenizer.decode(generate(bare, [], args.num_tokens, args.context, args.temperature, args.seed))
        accelerator.print(printable(f"sample:\n{sample}"))
        run.log_test(result | {"sample": sample})
    run.finish()


if __name__ == "__main__":
    main()
