"""Speed on GPUs.

    python benchmarks/gpus.py

About 5 minutes on a machine with GPUs. It writes benchmarks/gpus.json, which has every card that somebody measured, and
this section: run it, post the file, and your cards are in the table. Each speed is without the first steps.

- resnet50.py: images/s on one GPU at 224 pixels, random, in batches of 128, and a plain loop in the same precision
- transformer.py: tokens/s on one GPU, with 12 layers of 768 features and a context of 1024, in bf16 where the card has
  it; MFU is 6 N + 12 L T d operations per token (N parameters, L layers, T tokens, d features) / the card's data sheet
- dp.yaml, ddp.yaml: ms per step of resnet50.py on all GPUs, with 64 images for each
- save: seconds for which training waits for a checkpoint of ResNet-50, and the peak of GPU memory
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
import torchvision
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import common
from scripts.transformer import Transformer
from tools.doctor.data_sheets import peak_tflops

FILE = Path(__file__).with_name("gpus.json")
PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}  # of the table, and of Accelerate


def parse_args():
    parser = common.make_parser(__doc__)
    parser.add_argument("--stand_ins", action="store_true", help="try it out on the CPU, and write no file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--precision", default="no", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.stand_ins and not torch.cuda.is_available():
        parser.error("torch sees no GPU; --stand_ins tries this program out on the CPU")
    return args


def sizes(stand_ins: bool) -> argparse.Namespace:
    if stand_ins:
        return argparse.Namespace(images=4, pixels=32, steps=4, dim=32, layers=2, heads=2, context=64, sequences=4)
    return argparse.Namespace(
        images=128, pixels=224, steps=40, dim=768, layers=12, heads=12, context=1024, sequences=16
    )


def rate(lines: list[dict]) -> float:
    """Samples/s of the second half of a run."""
    speeds = [line["samples_per_s"] for line in lines if line["split"] == "train"]
    return speeds[-1] if speeds else 0.0  # only the main process has lines


def resnet50(args, batch_size: int) -> tuple[dict, float]:
    """summary.json and images/s."""
    size = sizes(args.stand_ins)
    flags = ["--synthetic", "--image_size", size.pixels, "--batch_size", batch_size, "--max_test_samples", 8]
    summary, lines = common.run_script("resnet50", *flags, "--max_steps", size.steps, "--log_every", size.steps // 2)
    return summary, rate(lines)


def plain_loop(batch_size: int, pixels: int, steps: int, untimed: int, precision: str = "no") -> float:
    """Images/s of a loop as in blog posts, with autocast and, in fp16, a scaler; the first steps are not timed."""
    device = common.device()
    model = torchvision.models.resnet50().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == "fp16")
    images = torch.randn(batch_size, 3, pixels, pixels, device=device)
    labels = torch.randint(1000, (batch_size,), device=device)
    for step in range(steps):
        if step == untimed:
            images[0, 0, 0, 0].item()  # waits for the steps before
            began = time.perf_counter()
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    loss.item()  # a GPU is done only now
    return batch_size * (steps - untimed) / (time.perf_counter() - began)


def transformer(args) -> dict:
    """Tokens/s, and TFLOP/s of the model's own products."""
    size = sizes(args.stand_ins)
    flags = ["--vocabulary", 512, "--dim", size.dim, "--layers", size.layers, "--heads", size.heads]
    flags += ["--context", size.context, "--batch_size", size.sequences, "--max_steps", size.steps]
    flags += ["--log_every", size.steps // 2, "--num_tokens", 1]
    if args.stand_ins:
        flags += ["--dataset", common.ROOT / "accelerate_configs"]
    _, lines = common.run_script("transformer", *flags)
    sequences_per_s, model = rate(lines), Transformer(512, size.dim, size.layers, size.heads)
    tflops = sequences_per_s * model.tflop_per_sequence(size.context)
    return {"tokens_per_s": sequences_per_s * size.context, "tflops": tflops}


def worker(args):
    size = sizes(args.stand_ins)
    if args.job == "plain loop":
        return plain_loop(size.images, size.pixels, size.steps, size.steps // 2, args.precision)
    if args.job == "transformer":
        return transformer(args)
    if args.job == "resnet50":
        summary, images_per_s = resnet50(args, size.images)
        return {"images_per_s": images_per_s} | {k: summary[k] for k in ("checkpoint_time_s", "peak_memory_gib")}
    batch_size = size.images // 2 * max(1, torch.accelerator.device_count())
    if args.stand_ins:
        batch_size = size.images
    _, images_per_s = resnet50(args, batch_size)  # 0 except on the main process
    return 1000 * batch_size / images_per_s if images_per_s else 0.0


def measure(args) -> dict:
    """The figures of this machine."""
    one, dp, ddp = ("cpu", "cpu", "cpu_ddp") if args.stand_ins else ("single_gpu", "dp", "ddp")
    gpus = 1 if args.stand_ins else torch.cuda.device_count()
    precisions = dict(PRECISIONS)
    if args.stand_ins:
        precisions = {"fp32": "no"}
    elif not torch.cuda.is_bf16_supported(including_emulation=False):
        del precisions["bf16"]

    def run(config: str, job: str, precision: str = "no"):
        print(f"{job}, {config}.yaml, {precision}", file=sys.stderr, flush=True)
        flags = ["--job", job, "--precision", precision]
        launch_flags = ["--mixed_precision", precision] if precision != "no" else []
        timeout_s = 3600 if args.stand_ins else 600  # a laptop may be busy
        return common.launch_workers(config, __file__, *flags, launch_flags=launch_flags, timeout_s=timeout_s)

    measured = {"resnet50": {}, "plain loop": {}}
    for name, precision in precisions.items():
        measured["resnet50"][name] = run(one, "resnet50", precision)
        measured["plain loop"][name] = run(one, "plain loop", precision)
    measured["transformer"] = run(one, "transformer", "bf16" if "bf16" in precisions else "no")
    if gpus > 1 or args.stand_ins:
        measured["ms per step"] = {"dp.yaml": run(dp, "dp or ddp"), "ddp.yaml": run(ddp, "dp or ddp")}
    card = "CPU" if args.stand_ins else torch.cuda.get_device_name(0)
    measured |= {"card": card, "gpus": gpus, "peak": peak_tflops(card), **common.machine()}
    if not args.stand_ins:
        known = json.loads(FILE.read_text()) if FILE.exists() else {}
        FILE.write_text(json.dumps(known | {f"{gpus} x {card}": measured}, indent=1) + "\n")
    return measured


def report(measured) -> list[str]:
    return [table({f"{measured['gpus']} x {measured['card']}": measured})]


def table(machines: dict[str, dict]) -> str:
    """A row for each figure of each machine."""
    columns = {"cards": "{}", "what": "{}", "figure": "{:,.3g}", "unit": "{}"}
    rows = []
    for cards, measured in machines.items():
        for name, result in measured["resnet50"].items():
            plain = measured["plain loop"][name]
            rows.append([cards, f"resnet50.py, {name}", result["images_per_s"], "images/s"])
            rows.append([cards, f"plain loop, {name}", plain, "images/s"])
        speed = measured["transformer"]
        rows.append([cards, "transformer.py", speed["tokens_per_s"], "tokens/s"])
        if measured["peak"]:
            rows.append([cards, "transformer.py, MFU", 100 * speed["tflops"] / measured["peak"], "%"])
        rows += [[cards, f"a step, {name}", ms, "ms"] for name, ms in measured.get("ms per step", {}).items()]
        first = next(iter(measured["resnet50"].values()))
        rows.append([cards, "wait for a save", first["checkpoint_time_s"], "s"])
        rows.append([cards, "peak memory", first["peak_memory_gib"], "GiB"])
    return common.table(columns, rows)


def section() -> str:
    """For RESULTS.md, which has the cards of gpus.json."""
    title, _, body = __doc__.partition("\n\n")
    machines = json.loads(FILE.read_text()) if FILE.exists() else {}
    shown = table(machines) if machines else "No card is in the table yet."
    return "\n\n".join([f"## {title.rstrip('.')}", body.strip("\n"), shown])


if __name__ == "__main__":
    common.main(parse_args(), measure, report, worker)
