"""Programs in an unusual form, as changes of unusual/with_accelerate.py and unusual/with_ddp.py: old and new text."""

MODEL = "nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))"
LOSS = "            loss = nn.functional.mse_loss(model(x), y)\n"
GROUP = '    dist.init_process_group("gloo")\n'
RUNS = 'if __name__ == "__main__":\n    '
ITEMS = """class Items(TensorDataset):
    pass


def main"""
STREAM = """class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(90):
            point = torch.randn(3, generator=generator)
            yield point, point.sum(0, keepdim=True)


def main"""
IN_BF16 = """            with torch.autocast(device.type, torch.bfloat16):
                loss = nn.functional.mse_loss(model(x.to(device)).float(), y.to(device))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
"""
STARTED = [  # a process for each GPU, as in PyTorch's tutorial on several GPUs
    ("import torch.distributed as dist\n", "import torch.distributed as dist\nimport torch.multiprocessing as mp\n"),
    (
        GROUP,
        '    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="1")  # of somebody else\n'
        '    dist.init_process_group("nccl", rank=rank, world_size=world_size)\n',
    ),
    ("DistributedSampler(data)", "DistributedSampler(data, world_size, rank)"),
]
BY_GPUS = f"""{RUNS}world_size = torch.cuda.device_count()
    mp.spawn(train, args=(world_size,), nprocs=world_size)
    os.rename("model.pt", "final.pt")  # by the process that has started the others, alone
"""
BY_FLAG = f"""{RUNS}parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=2)
    world_size = parser.parse_args().gpus
    with mp.Manager() as manager:  # a process that is no rank
        assert manager.list([1])[0] == 1
    mp.spawn(train, args=(world_size,), nprocs=world_size)
"""
CALL = f'{RUNS}train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))\n'

WITH_ACCELERATE = {
    "compiled": [(f"= {MODEL}", f"= torch.compile({MODEL})")],
    "mixed_precision": [  # as Accelerate and as torch.autocast do it
        ("Accelerator()", 'Accelerator(mixed_precision="bf16")'),
        (
            LOSS,
            '            with torch.autocast("cpu", torch.bfloat16):\n    '
            + LOSS.replace("model(x)", "model(x).float()"),
        ),
    ],
    "notebook": [
        ("import Accelerator", "import Accelerator, notebook_launcher"),
        (f"{RUNS}main()", "notebook_launcher(main, num_processes=2)"),
    ],
    "spawned_workers": [
        ("shuffle=True", 'shuffle=True, num_workers=2, multiprocessing_context="spawn"'),
        ("= TensorDataset", "= Items"),
        ("def main", ITEMS),
    ],
    "streams": [  # read on one process, for all
        ("TensorDataset(points, points.sum(1, keepdim=True))", "Stream()"),
        ("TensorDataset", "IterableDataset"),
        (", shuffle=True", ""),
        ("def main", STREAM),
    ],
    "joins": [
        ("import Accelerator", "import Accelerator, DataLoaderConfiguration"),
        ("Accelerator()", "Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))"),
        ("    for _ in range(3):\n", "    for _ in range(3):\n      with accelerator.join_uneven_inputs([model]):\n"),
    ],
}
WITH_DDP = {
    "autocast": [  # mixed precision on whatever there is, one GPU for each process
        (GROUP, GROUP.replace('"gloo"', "")),
        (
            "    torch.manual_seed",
            '    device = torch.device("cuda", rank) if torch.cuda.is_available() else '
            'torch.device("cpu")\n    scaler = torch.amp.GradScaler(device.type)\n    torch.manual_seed',
        ),
        ("DistributedDataParallel(model)", "DistributedDataParallel(model.to(device))"),
        (f"{LOSS}            loss.backward()\n            optimizer.step()\n", IN_BF16),
    ],
    "spawns": [*STARTED, (CALL, BY_GPUS)],
    "starts_ranks": [*STARTED, (CALL, BY_FLAG), ("import os\n", "import argparse\nimport os\n")],
    "written_for_cuda": [
        (GROUP, '    torch.cuda.set_device(rank)\n    dist.init_process_group(backend="nccl")\n'),
        ("sampler=sampler)", "sampler=sampler, pin_memory=True)"),
        ("DistributedDataParallel(model)", "DistributedDataParallel(model.cuda(), device_ids=[rank])"),
        ("model(x), y", 'model(x.to(rank)), y.to(f"cuda:{rank}", non_blocking=True)'),
        (
            "    dist.destroy",
            '    dist.all_reduce(torch.zeros(1, device="cuda"))\n    torch.cuda.synchronize()\n    dist.destroy',
        ),
    ],
    "fully_sharded": [
        ("from torch.nn.parallel import DistributedDataParallel", "from torch.distributed.fsdp import fully_shard"),
        ("model = DistributedDataParallel(model)", "fully_shard(model[0])\n    fully_shard(model)"),
        (
            "            optimizer.step()\n",
            "            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)\n            optimizer.step()\n",
        ),
    ],
}
