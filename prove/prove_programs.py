"""Judges example programs of other projects with prove_training, and compares with their verdicts so far.

    python prove_programs.py --repositories ~/repositories                   # all that are there
    python prove_programs.py --repositories ~/repositories run_glue nanoGPT      # those with these words

Nothing is fetched. The folder holds clones, under the names that `git clone` gives them: accelerate, diffusers,
examples (of PyTorch), nanoGPT, pytorch-image-models, transformers, trl and vision. What is not there is skipped. The
programs need their libraries: transformers, timm, trl, diffusers and schedulefree.

The programs run unchanged, in a temporary folder with stand-ins for what they would download: models of two layers with
random weights and a tokenizer of 15 words, random sentences, images and tokens, and two metrics.
what_prove_found.md says what was found.
"""

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROVE = Path(__file__).resolve().parent / "prove_training"
KINDS = {0: "proven", 1: "wrong", 2: "fails", 3: "cannot tell"}
HF, FEATURE = "transformers/examples/pytorch", "accelerate/examples/by_feature"
PAIRS = "--model_name_or_path bert-base-cased --train_file pairs_train.csv --validation_file pairs_test.csv"
TEXT = "--model_name_or_path gpt2 --train_file text_train.txt --validation_file text_test.txt --block_size 32"
PICTURES = "--model_name_or_path vit --dataset_name pictures --label_column_name label --ignore_mismatched_sizes"
TRAINER = "--do_train --do_eval --eval_strategy epoch --num_train_epochs 2 --logging_steps 1 --use_cpu --output_dir out"
TRL = "--model_name_or_path llama --num_train_epochs 2 --max_length 32 --logging_steps 1 --use_cpu --bf16 False"
SMALL = "--epochs 2 --batch-size 16"
NANOGPT = (
    "REPOSITORIES/nanoGPT/config/train_shakespeare_char.py --device=cpu --backend=gloo --compile=False --dropout=0.0 "
    "--n_layer=2 --n_head=2 --n_embd=32 --block_size=16 --batch_size=4 --gradient_accumulation_steps=6 --max_iters=12 "
    "--lr_decay_iters=12 --eval_iters=2 --eval_interval=5 --log_interval=1"
)
UNCONDITIONAL = (
    "--train_data_dir pictures --resolution 32 --model_config_name_or_path unet --train_batch_size 4 --num_epochs 2 "
    "--lr_warmup_steps 4 --ddpm_num_inference_steps 2 --eval_batch_size 2 --output_dir out"
)
TIMM = (
    "pictures --train-split train --val-split val --model resnet10t --img-size 32 --num-classes 5 --warmup-epochs 0 "
    f"--device cpu --workers 1 {SMALL}"
)
VISION = (
    f"--data-path pictures --model resnet18 --device cpu {SMALL} --workers 0 --output-dir out --val-resize-size 32 "
    "--val-crop-size 32 --train-crop-size 32"
)
WORDS = ["the", "a", "cat", "dog", "bird", "tree", "sees", "likes", "finds", "big", "small", "old", "new", "in", "on"]
METRIC = """
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        features = datasets.Features({name: datasets.Value("int64") for name in ("predictions", "references")})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references, **options):
        equal = [one == other for one, other in zip(predictions, references, strict=True)]
        return {"accuracy": sum(equal) / len(equal)}
"""
PROGRAMS = [  # a script, its flags, and its verdict
    ("accelerate/examples/nlp_example.py", "--cpu", "wrong"),
    ("accelerate/examples/complete_nlp_example.py", "--cpu --checkpointing_steps epoch", "wrong"),
    (f"{FEATURE}/gradient_accumulation.py", "--cpu --gradient_accumulation_steps 2", "wrong"),
    (f"{FEATURE}/automatic_gradient_accumulation.py", "--cpu", "wrong"),
    (f"{FEATURE}/checkpointing.py", "--cpu --checkpointing_steps epoch", "wrong"),
    (f"{FEATURE}/multi_process_metrics.py", "--cpu", "wrong"),
    (f"{FEATURE}/memory.py", "--cpu", "wrong"),
    (f"{FEATURE}/local_sgd.py", "--cpu --local_sgd_steps 2", "cannot tell"),
    (f"{FEATURE}/schedule_free.py", "--cpu", "proven"),
    (f"{HF}/text-classification/run_glue.py", f"{PAIRS} {TRAINER}", "wrong"),
    (f"{HF}/text-classification/run_glue_no_trainer.py", f"{PAIRS} --num_train_epochs 2", "proven"),
    (f"{HF}/text-classification/run_glue_no_trainer.py", f"{PAIRS} --gradient_accumulation_steps 2", "wrong"),
    (f"{HF}/language-modeling/run_clm.py", f"{TEXT} {TRAINER}", "wrong"),
    (f"{HF}/language-modeling/run_clm_no_trainer.py", f"{TEXT} --num_train_epochs 2", "wrong"),
    (f"{HF}/image-classification/run_image_classification_no_trainer.py", f"{PICTURES} --num_train_epochs 2", "proven"),
    ("trl/trl/scripts/sft.py", f"{TRL} --dataset_name messages --output_dir out", "proven"),
    ("trl/trl/scripts/dpo.py", f"{TRL} --dataset_name preferences --output_dir out", "proven"),
    ("trl/trl/scripts/reward.py", f"{TRL} --dataset_name preferences --output_dir out", "proven"),
    ("diffusers/examples/unconditional_image_generation/train_unconditional.py", UNCONDITIONAL, "wrong"),
    ("pytorch-image-models/train.py", TIMM, "wrong"),
    ("vision/references/classification/train.py", VISION, "wrong"),
    ("examples/imagenet/main.py", f"pictures {SMALL} --workers 0 --dist-backend gloo --dist-url env://", "wrong"),
    ("examples/distributed/ddp-tutorial-series/multigpu_torchrun.py", "2 1", "wrong"),
    ("examples/dcgan/main.py", "--dataset fake --niter 2 --ngf 8 --ndf 8 --workers 0", "cannot tell"),
    ("nanoGPT/train.py", NANOGPT, "nothing wrong found"),
]


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count)) + " ."


def make_models() -> None:
    """A tiny model with random weights and a tokenizer, under the name that the programs ask for."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    inner = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.train_from_iterator([*WORDS, "."], trainers.WordLevelTrainer(special_tokens=special))
    inner.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, model_max_length=64, eos_token="[SEP]", **dict(zip(names, special, strict=True))
    )
    tokenizer.chat_template = "{% for each in messages %}{{ each['content'] }}{{ eos_token }}{% endfor %}"
    tokens = {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    gpt = {"n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    for folder, model in (
        ("bert-base-cased", transformers.BertForMaskedLM(transformers.BertConfig(**tokens, **size))),
        ("gpt2", transformers.GPT2LMHeadModel(transformers.GPT2Config(**tokens, **gpt))),
        ("llama", transformers.LlamaForCausalLM(transformers.LlamaConfig(**tokens, **size))),
        ("vit", transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=8, **size))),
    ):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained("vit")
    blocks = {"down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2, "sample_size": 32}
    unet = {"_class_name": "UNet2DModel", "block_out_channels": [8, 16], "norm_num_groups": 4, "layers_per_block": 1}
    Path("unet").mkdir()
    Path("unet", "config.json").write_text(json.dumps(unet | blocks))


def make_data() -> None:
    """Random sentences, images and tokens, where the programs look for them."""
    import numpy as np
    from PIL import Image

    draw, pixels = random.Random(0), np.random.default_rng(0)
    for name in ("nyu-mll/glue/mrpc", "messages/data", "preferences/data", "data/shakespeare_char"):
        Path(name).mkdir(parents=True)
    splits = "".join(f"\n  - split: {split}\n    path: mrpc/{split}.json" for split in ("train", "validation", "test"))
    Path("nyu-mll/glue/README.md").write_text(f"---\nconfigs:\n- config_name: mrpc\n  data_files:{splits}\n---\n")
    for split, count in (("train", 400), ("validation", 100), ("test", 100)):
        pairs = [{"sentence1": words(draw, 6), "sentence2": words(draw, draw.randint(4, 12))} for _ in range(count)]
        labels = [draw.randint(0, 1) for _ in range(count)]
        rows = [pair | {"label": label, "idx": at} for at, (pair, label) in enumerate(zip(pairs, labels, strict=True))]
        Path(f"nyu-mll/glue/mrpc/{split}.json").write_text("\n".join(map(json.dumps, rows)))
        lines = [f"{row['sentence1']},{row['sentence2']},{row['label']}" for row in rows]
        Path(f"pairs_{split}.csv").write_text("\n".join(["sentence1,sentence2,label", *lines]))
        Path(f"text_{split}.txt").write_text("\n".join(words(draw, 30) for _ in range(count)))
        chats = [[{"role": role, "content": words(draw, 8)} for role in ("user", "assistant")] for _ in range(count)]
        choices = [{name: words(draw, 6) for name in ("prompt", "chosen", "rejected")} for _ in range(count)]
        for name, made in (("messages", [{"messages": chat} for chat in chats]), ("preferences", choices)):
            Path(name, "data", f"{split}.jsonl").write_text("\n".join(map(json.dumps, made)))
    for split, count in (("train", 24), ("val", 8)):
        for label in ("bird", "cat", "dog", "house", "tree"):
            Path("pictures", split, label).mkdir(parents=True)
            for number in range(count + (label == "bird")):
                image = Image.fromarray(pixels.integers(0, 256, (32, 32, 3), dtype=np.uint8))
                image.save(Path("pictures", split, label, f"{number}.png"))
    for split in ("train", "val"):
        pixels.integers(0, 64, 10000, dtype=np.uint16).tofile(f"data/shakespeare_char/{split}.bin")
    for name in ("glue", "accuracy"):
        Path(name).mkdir()
        Path(name, f"{name}.py").write_text(METRIC)


def judge(repositories: Path, script: str, flags: str) -> tuple[str, float]:
    """The last line that prove says, and the seconds of processor time."""
    command = [sys.executable, PROVE, "--timeout_s", "300", repositories / script]
    command += flags.replace("REPOSITORIES", str(repositories)).split()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = (done.stdout.strip() or done.stderr.strip() or "nothing").splitlines()[-1]
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return said if done.returncode in KINDS else f"crash: {said}", seconds


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repositories", type=Path, required=True, metavar="FOLDER", help="holds the clones")
    parser.add_argument("words", nargs="*", metavar="WORD", help="only programs with one of these in their path")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    repositories = args.repositories.resolve()
    chosen = [each for each in PROGRAMS if not args.words or any(word in each[0] for word in args.words)]
    with tempfile.TemporaryDirectory(prefix="programs_") as folder:
        os.chdir(folder)
        if any((repositories / script).is_file() for script, _, _ in chosen):
            make_models()
            make_data()
        if (repositories / "nanoGPT").is_dir():
            shutil.copy(repositories / "nanoGPT" / "configurator.py", ".")  # it is opened in the working directory
        for script, flags, expected in chosen:
            if not (repositories / script).is_file():
                print(f"{'not there':<21}{script}", flush=True)
                continue
            said, seconds = judge(repositories, script, flags)
            verdict = said.partition(":")[0].partition(";")[0]
            changed = "" if verdict == expected else f" (so far: {expected})"
            print(f"{verdict:<21}{script}{changed}, {seconds:.0f} s of processor time\n{'':<21}{said}", flush=True)


if __name__ == "__main__":
    main()
