"""Trains on data on the disk, and appends each sample that it reads to a file: epoch, step, place, digest."""

import os
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from utils import flags, launch
from utils.data.tar_files import TarFiles
from utils.data.text import load_tokens
from utils.fingerprint import digest
from utils.loader import GlobalLoader
from utils.run import Run


def numbers_of(sample):
    return torch.frombuffer(bytearray(sample["bin"]), dtype=torch.uint8).float()


def load(kind, folder):
    """Tokens of a text, samples of tar files, or rows of a parquet file."""
    cache_dir = f"{folder}/cache"
    if kind == "tokens":
        return load_tokens(f"{folder}/text", None, 300, 8, cache_dir)[0]
    if kind == "tar":
        return TarFiles(sorted(Path(folder).glob("*.tar")), numbers_of, cache_dir=cache_dir)
    import datasets

    rows = datasets.load_dataset("parquet", data_files=f"{folder}/rows.parquet", cache_dir=cache_dir)
    return rows["train"].with_format("torch")


def main():
    parser = flags.ArgumentParser(__doc__)
    parser.add_argument("--data", choices=("tokens", "tar", "parquet"))
    parser.add_argument("--folder")
    parser.add_argument("--num_epochs", type=int, default=2)
    group = parser.add_argument_group("launch", may_change=True)
    group.add_argument("--num_workers", type=int, default=0)
    group.add_argument("--launch", type=int, default=0)
    group.add_argument("--die_after", type=int, default=0, help="kill -9 in this step")
    parser.add_run_flags(log_every=5)
    args = parser.parse_args()
    accelerator = launch.make_accelerator(args, cpu_threads=1)
    run = Run(accelerator, args)
    options = {"seed": args.seed, "num_workers": args.num_workers}
    loader = GlobalLoader(load(args.data, args.folder), 6, accelerator, **options)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    model, optimizer = accelerator.prepare(model, optimizer)
    checkpoint = {"model": model, "optimizer": optimizer}
    run.start(loader, None, args.num_epochs * len(loader), checkpoint=checkpoint)
    with open(f"{args.output_dir}/samples_{args.launch}_{accelerator.process_index}.txt", "a") as log:
        for epoch in run.epochs():
            for batch in run.batches(loader, epoch):
                data = batch.data["x"] if args.data == "parquet" else batch.data
                inputs = data[0] if args.data == "tokens" else data
                with accelerator.accumulate(model):
                    accelerator.backward(batch.mean_loss(model(inputs.float()).squeeze(1)))
                    optimizer.step()
                    optimizer.zero_grad()
                for place, index in enumerate(batch.counted(batch.indices).tolist()):
                    log.write(f"{epoch} {run.step} {batch.slot} {place} {index} {digest(inputs[place])}\n")
                log.flush()
                if args.die_after and run.step == args.die_after:
                    os.kill(os.getpid(), 9)
    run.finish()


if __name__ == "__main__":
    main()
