"""The language model: its numbers are those of transformers' Llama, and of a plain loop over whole documents."""

import itertools
import json
import math
import os
import re

import pytest
import run_many
import run_reader
import torch
from documents import load_text
from fakes import fake_accelerator
from plain_loop import assert_same_as_plain, batches_of
from run_reader import lines, losses
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F

from scripts.transformer import Transformer, generate
from tests.docs.pages import blocks, guide
from utils.console import printable
from utils.data.text import learn_tokenizer, load_tokenizer
from utils.parallel import fsdp

EOS = 0  # of a learned tokenizer
# 23 documents in 43 sequences, of which the last has 4 targets; an epoch has 4 steps, the last of 7 sequences.
MODEL = ["--vocabulary", 290, "--context", 64, "--dim", 16, "--layers", 2, "--heads", 2]
FLAGS = [*MODEL, "--batch_size", 12, "--max_steps", 10, "--num_tokens", 5, "--log_every", 1]
WEIGHT_DECAY, LR = 0.5, 5e-3


@pytest.fixture
def train(texts, tmp_path, home):
    """Runs the script's main in this process; returns the run's folder."""

    def train(name, *flags):
        words = ["--dataset", texts, *FLAGS, "--output_dir", tmp_path / name, *flags]
        assert run_many.run("transformer", words) is None
        return tmp_path / name

    return train


def test_a_test_of_some_sequences_counts_their_tokens_alone(train):
    (of_all,) = lines(train("all", "--max_steps", 1), "test")
    (of_one,) = lines(train("one", "--max_steps", 1, "--max_test_samples", 1), "test")
    assert of_all["samples"] > of_one["samples"] == 1


def test_a_log_line_has_tokens_per_second(train, capsys):
    numbers = json.loads((train("run", "--max_steps", 1) / "metrics.jsonl").read_text().splitlines()[0])
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("train")]
    tokens = re.search(r"([\d,.]+) tokens/s", line)[1].replace(",", "")
    assert float(tokens) == pytest.approx(64 * numbers["samples_per_s"], rel=0.01, abs=0.5)


def small_model(dtype=torch.float64, **options):
    torch.manual_seed(0)
    return Transformer(**({"vocabulary": 300, "dim": 16, "layers": 2, "heads": 2} | options)).to(dtype)


def test_the_operations_of_a_sequence_are_six_per_token_and_weight_and_those_of_attention():
    model = small_model(vocabulary=290)
    # 290 x 16 embeddings, 2 blocks of 4 x 16 x 16 + 3 x 16 x 32, 5 norms.
    weights = 290 * 16 + 2 * (4 * 16 * 16 + 3 * 16 * 32) + 5 * 16
    assert model.tflop_per_sequence(64) == pytest.approx(64 * (6 * weights + 12 * 2 * 64 * 16) / 1e12, rel=0.1)


def lively_model(**options):
    """With weights so large that each token before counts: a new model's logits hardly depend on them."""
    model = small_model(**options).eval()
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def logits_of(model, tokens):
    """Of a document, or a part of one: (T,) to (T, vocabulary). test_logits_equal_llamas has the arithmetic."""
    return model(tokens[None])[0]


def parts_of_documents(sequence):
    """Cut the tokens of a sequence, with the one after it, where documents begin: lists of two tokens or more."""
    parts = [[]]
    for token in sequence:
        if token == EOS:
            parts[-1].append(EOS)
            parts.append([])
        parts[-1].append(token)
    return [part for part in parts if len(part) > 1]


def nats(model, sequence):
    """The loss of each target of a sequence, each part of a document for itself."""
    parts = map(torch.tensor, parts_of_documents(sequence))
    losses = [F.cross_entropy(logits_of(model, part[:-1]), part[1:], reduction="none") for part in parts]
    return torch.cat(losses)


def packed_by_hand(texts, tokenizer, context):
    """The sequences of token ids, each with the token after it; the last one is short."""
    stream = [EOS]
    for text in texts:
        stream += [*tokenizer.encode(text).ids, EOS]
    return [stream[start : start + context + 1] for start in range(0, len(stream) - 1, context)]


def test_ten_steps_equal_a_plain_loop_over_documents(train, texts, float64):
    """Each part of a document for itself; the mean over all tokens of a step; matrices decay, norms do not."""
    accumulation = ["--gradient_accumulation_steps", 5, "--max_grad_norm", 0.5]
    options = ["--separate_documents", "--weight_decay", WEIGHT_DECAY, "--lr", LR]
    folder = train("run", "--float64", "--seed", 7, *accumulation, *options)
    train_texts, test_texts = load_text(str(texts))
    tokenizer = learn_tokenizer(train_texts, 290)
    packed = packed_by_hand(train_texts, tokenizer, 64)
    assert len(packed[-1]) < 60

    model = fsdp.build(fake_accelerator(), lambda: Transformer(vocabulary=290, dim=16, layers=2, heads=2), 7)
    groups = [
        {"params": [p for name, p in model.named_parameters() if "norm" not in name], "weight_decay": WEIGHT_DECAY},
        {"params": [p for name, p in model.named_parameters() if "norm" in name], "weight_decay": 0},
    ]
    optimizer = torch.optim.AdamW(groups, LR, betas=(0.9, 0.95))
    factors = [min((step + 1) / 1.5, (1 + math.cos(math.pi * step / 10)) / 2) for step in range(11)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factors.__getitem__)
    expected, norms = [], []

    def mean_losses():
        for _, batch in itertools.islice(batches_of(len(packed), 12, seed=7, epochs=3), 10):
            loss = torch.cat([nats(model, packed[row]) for row in batch.tolist()]).mean()
            expected.append(loss.item())
            yield loss

    def clip():
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())

    assert_same_as_plain(folder, model, mean_losses(), optimizer, schedule, clip, rtol=1e-9, atol=1e-12)
    assert max(norms) > 0.5  # clipped
    assert losses(folder) == pytest.approx(expected, rel=1e-12)

    with torch.no_grad():
        test_nats = torch.cat([nats(model, sequence) for sequence in packed_by_hand(test_texts, tokenizer, 64)])
    summary = run_reader.summary(folder)
    assert summary["test_loss"] == pytest.approx(test_nats.mean().item(), rel=1e-9)
    bits = test_nats.sum().item() / math.log(2) / len("".join(test_texts).encode())
    assert summary["test_bits_per_byte"] == pytest.approx(bits, rel=1e-9)
    assert load_tokenizer(folder / "tokenizer.json").to_str() == tokenizer.to_str()


@pytest.mark.others("transformers")
def test_logits_equal_llamas():
    import transformers

    ours = small_model(dim=32, layers=3, heads=4)
    for norm in [module for module in ours.modules() if isinstance(module, torch.nn.RMSNorm)]:
        torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=ours.blocks[0].down.in_features,
        num_hidden_layers=3,
        num_attention_heads=4,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        rope_theta=10000.0,
    )
    theirs = transformers.LlamaForCausalLM(config).double().eval()
    state = {"model.embed_tokens.weight": ours.embed.weight, "lm_head.weight": ours.embed.weight}
    state["model.norm.weight"] = ours.norm.weight
    for number, block in enumerate(ours.blocks):
        q, k, v = block.qkv.weight.chunk(3)
        gate, up = block.gate_up.weight.chunk(2)
        parts = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": block.out}
        parts |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": block.down}
        parts |= {"input_layernorm": block.norm1, "post_attention_layernorm": block.norm2}
        for name, part in parts.items():
            state[f"model.layers.{number}.{name}.weight"] = getattr(part, "weight", part)
    theirs.load_state_dict(state)
    tokens = torch.randint(1, 300, (3, 50))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("prompt_length", [9, 15, 20])
def test_a_token_generated_with_a_cache_is_the_one_of_the_whole_text(temperature, prompt_length, float64):
    """Also where the prompt fills the context, and where a new cache begins with the last half of a full one."""
    model = lively_model()
    prompt = torch.randint(1, 300, (prompt_length,)).tolist()
    generated = generate(model, prompt, num_tokens=40, context=16, temperature=temperature, seed=3)
    generator = torch.Generator().manual_seed(3)
    tokens = [EOS, *prompt]
    window = tokens[-16:]
    with torch.no_grad():
        while len(tokens) < len(generated):
            logits = logits_of(model, torch.tensor(window))[-1]
            token = int(logits.argmax())
            if temperature:
                token = int(torch.multinomial(logits.softmax(0), 1, generator=generator))
            tokens.append(token)
            window = [*window, token] if len(window) < 16 else tokens[-8:]
    assert tokens == generated
    assert len(generated) == 1 + prompt_length + 40 or generated[-1] == EOS


def test_generation_ends_with_the_document():
    model = small_model().eval()
    with torch.no_grad():
        model.embed.weight.zero_()
        model.embed.weight[EOS] = 1  # the largest logit, whatever the token before it
    assert generate(model, [5, 6], num_tokens=9, context=8, temperature=0, seed=0)[3:] == [EOS]


def test_a_rank_that_samples_a_different_token_goes_on_with_rank_0s(monkeypatch):
    """Under FSDP each call of the model is collective: a rank that stopped alone would leave the others waiting."""
    model = lively_model()
    model.__class__ = type("ShardedTransformer", (FSDPModule, Transformer), {})  # as fully_shard does
    of_rank_0 = [7, 8, EOS]

    def broadcast(tensor, source):
        assert source == 0
        tensor.fill_(of_rank_0[len(tokens_sent)])
        tokens_sent.append(tensor.item())

    tokens_sent = []
    monkeypatch.setattr("torch.distributed.broadcast", broadcast)
    assert generate(model, [5, 6], num_tokens=9, context=8, temperature=1.0, seed=0) == [EOS, 5, 6, 7, 8, EOS]


@pytest.mark.parametrize("eos", [EOS, 7])
def test_attention_stays_in_a_document_if_asked_to(eos, float64):
    model = lively_model(eos=eos)
    tokens = torch.randint(10, 300, (2, 40))
    tokens[0, [0, 7, 8, 25]] = eos
    tokens[1, [13, 39]] = eos
    with torch.no_grad():
        starts = [row.tensor_split((row == eos).nonzero().flatten()) for row in tokens]
        expected = torch.stack([torch.cat([logits_of(model, part) for part in row if len(part)]) for row in starts])
        model.separate_documents = True
        torch.testing.assert_close(model(tokens), expected, rtol=1e-12, atol=1e-12)


def test_attention_has_no_mask_or_one_for_all_layers_in_the_type_of_the_queries(monkeypatch):
    """Flash kernels of GPUs take no mask; the other ones would convert it in each layer."""
    calls, attention = [], F.scaled_dot_product_attention

    def record(*tensors, attn_mask, is_causal, dropout_p):
        calls.append((attn_mask, is_causal, tensors[0].dtype))
        return attention(*tensors, attn_mask=attn_mask, is_causal=is_causal, dropout_p=dropout_p)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    model, tokens = small_model(torch.float32), torch.tensor([[EOS, 5, 6, EOS, 7]])
    model(tokens)
    model.separate_documents = True
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens)
    assert calls[:2] == [(None, True, torch.float32)] * 2
    (mask, is_causal, of_query), (again, *_) = calls[2:]
    assert mask is again
    assert (mask.dtype, of_query, is_causal) == (torch.bfloat16, torch.bfloat16, False)


def test_the_program_in_the_guide_continues_a_prompt_as_the_script_does(train, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    train("runs/mine", "--dim", 128, "--layers", 4, "--heads", 4, "--context", 128, "--max_steps", 2)
    capsys.readouterr()
    words = ["--output_dir", "runs/mine", "--prompt", "import ", "--num_tokens", 50, "--temperature", 0]
    assert run_many.run("transformer", words) is None
    by_script = capsys.readouterr().out
    exec(blocks(guide("transformer"), "python")[0], {})
    assert capsys.readouterr().out == by_script


def test_activation_checkpointing_changes_no_bit_also_with_dropout(train):
    flags = ["--dropout", 0.2, "--max_steps", 4]
    whole, twice = train("whole", *flags), train("twice", *flags, "--checkpoint_activations")
    assert lines(whole) == lines(twice)
    assert run_reader.sha256(whole / "model.safetensors") == run_reader.sha256(twice / "model.safetensors")


def test_dropout_drops_attention_and_features_in_training_alone():
    model = small_model(dropout=0.5)
    tokens = torch.randint(1, 300, (2, 12))
    torch.testing.assert_close(model.eval()(tokens), model(tokens), rtol=0, atol=0)
    assert not torch.equal(model.train()(tokens), model(tokens))
    for block in model.blocks:
        block.dropout = torch.nn.Identity()
        block.dropout.p = 0.5  # of attention alone
    assert not torch.equal(model(tokens), model(tokens))


def test_any_bytes_are_a_prompt_and_only_printable_text_is_shown_and_a_damaged_run_is_an_error(train, capsys):
    folder = train("run", "--max_steps", 1, "--num_tokens", 200, "--temperature", 9)
    sample = run_reader.summary(folder)["test_sample"]
    assert printable(sample) != sample
    flags = ["--output_dir", folder, "--num_tokens", 20, "--temperature", 1e-320]  # in float32 this is 0
    assert run_many.run("transformer", [*flags, "--prompt", "\x1b[2J" + os.fsdecode(b"\xff")]) is None
    shown = capsys.readouterr().out
    assert printable(sample) in shown
    assert printable(shown) == shown
    (folder / "run.json").write_text('{"arguments": {}}')
    assert run_many.run("transformer", ["--output_dir", folder, "--prompt", "a"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_training_goes_on_from_the_weights_and_the_tokenizer_of_another_run(train):
    first = train("first", "--max_steps", 3)
    pretrained = ["--pretrained", first / "model.safetensors", "--tokenizer", first / "tokenizer.json"]
    second = train("second", "--max_steps", 1, "--lr", 0, *pretrained)
    assert lines(second, "test")[0]["loss"] == lines(first, "test")[0]["loss"]
    # The checkpoint has all weights, so a resume does not need the file.
    (first / "model.safetensors").unlink()
    (second / "summary.json").unlink()
    train("second", "--max_steps", 1, "--lr", 0, *pretrained, "--resume")
    assert lines(second, "test")[0]["loss"] == lines(first, "test")[0]["loss"]
