"""Models as users bring them, sharded: after three steps their weights are those of a copy that is whole.

    accelerate launch --config_file accelerate_configs/cpu_fsdp.yaml --fsdp_min_num_params 100 \
        tests/programs/sharded_models.py gpt encoder

Each process also trains the copy, on the micro-batches of all processes. Writes differences.json: by model, the
largest difference of a weight, relative to the largest weight of its tensor, and what is gathered on its own.
"""

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils.launch import make_accelerator

STEPS, SAMPLES = 3, 3  # of a training, of a micro-batch
VOCABULARY, LENGTH, DIM = 20, 7, 16


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x + x.cumsum(1)))))


class GPT(nn.Module):
    """Blocks in a plain list, the first of which comes twice, a tied head, and a parameter that nothing uses."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, DIM), nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight
        self.temperature, self.unused = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(3))

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x)
        return self.lm_head(x) * self.temperature


class Encoder(nn.Module):
    """torch's own layers. Its attention uses weights of a module that it does not call."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, ids):
        return self.head(self.encoder(self.embed(ids)))


def lora():
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_embd": DIM, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    gpt2 = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))
    return get_peft_model(gpt2, LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))


# By name.
MODELS = {"gpt": GPT, "encoder": Encoder, "lora": lora}


def make_batch():
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH)), torch.randint(VOCABULARY, (SAMPLES, LENGTH))


def mean_loss(model, inputs, labels):
    logits = model(inputs)
    return F.cross_entropy(getattr(logits, "logits", logits).flatten(0, -2), labels.flatten())


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01, eps=1e-4)


def train(accelerator, model, optimizer, whole, whole_optimizer) -> tuple[float, list[str]]:
    """The largest relative difference between the sharded model and the copy, and the units of the former."""
    for _ in range(STEPS):
        batches = [make_batch() for _ in range(accelerator.num_processes)]
        accelerator.backward(mean_loss(model, *batches[accelerator.process_index]))
        for batch in batches:
            (mean_loss(whole, *batch) / len(batches)).backward()
        for each in (optimizer, whole_optimizer):
            each.step()
            each.zero_grad()
    model.eval()
    with torch.no_grad():
        mean_loss(model, *make_batch())
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters()), "a parameter is still gathered"
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    differences = [((ours.full_tensor() - theirs).abs().max() / theirs.abs().max()).item() for ours, theirs in pairs]
    return max(differences), [path for path, module in model.named_modules() if isinstance(module, FSDPModule)]


def main():
    torch.set_default_dtype(torch.float64)
    accelerator = make_accelerator(SimpleNamespace(output_dir="run"), cpu_threads=1)
    models = [MODELS[name]() for name in sys.argv[1:]]
    copies = [copy.deepcopy(model) for model in models]
    optimizers = [adamw(model) for model in models]
    prepared, count = accelerator.prepare(*models, *optimizers), len(models)
    columns = prepared[:count], prepared[count:], copies, map(adamw, copies)
    found = {name: train(accelerator, *row) for name, *row in zip(sys.argv[1:], *columns, strict=True)}
    if accelerator.is_main_process:
        Path("differences.json").write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main()
