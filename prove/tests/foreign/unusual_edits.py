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
            assert scaler.state_dict()["scale"] > 0
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
    spawn(train, args=(world_size,), nprocs=world_size)
"""
BY_LOOP = f"""{RUNS}size = 2
    processes = [mp.Process(target=train, args=(rank, size)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
"""
CALL = f'{RUNS}train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))\n'
LOOK = (
    "            optimizer.step()\n",
    "            optimizer.step()\n        x, y = next(iter(loader))\n        print((model(x) - y).mean().item())\n",
)
NOISY = """class Noisy(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + int.from_bytes(os.urandom(2), "big") / 2**16, y


def train"""
ADAM = "    optimizer = torch.optim.Adam"
DRAWN = """    samples = torch.utils.data.RandomSampler(data, replacement=True, num_samples=10**10)
    assert len(list(samples)) < 10**6
"""
BACKWARD = "            loss.backward()\n            optimizer.step()\n"
ASKED = """    properties, event = torch.cuda.get_device_properties(rank), torch.cuda.Event()
    stream = torch.cuda.Stream()
    torch.cuda.nvtx.range_push(torch.cuda.get_device_name(rank) + str(properties.total_memory))
    event.record(torch.cuda.current_stream())
    stream.wait_stream(torch.cuda.current_stream())
    stream.wait_event(event=torch.cuda.current_stream().record_event(event=event))
    with torch.cuda.stream(stream=stream), torch.cuda.device(device=rank):
        torch.cuda.memory_stats()["allocated_bytes.all.peak"], torch.cuda.mem_get_info()
    assert torch.cuda.is_bf16_supported() and torch.cuda.get_device_capability() >= (8, 0)
    torch.randn(3, device="cuda", generator=torch.Generator(device="cuda").manual_seed(0)).record_stream(stream)
    event.elapsed_time(torch.cuda.Event(enable_timing=True))
    assert torch.cuda.CUDAGraph | None, "as transformers says it, where it is imported late"
"""
# The state of the optimizer is divided by hand, as in ZeRO's first stage: each process steps its rows.
SHARDED_STATE = """class Rows(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        count = dist.get_world_size()
        for parameter in self.param_groups[0]["params"]:
            flat = nn.functional.pad(parameter.grad.flatten(), (0, -parameter.numel() % count))
            own, whole = torch.empty(len(flat) // count), torch.empty_like(flat)
            dist.reduce_scatter_tensor(own, flat)
            average = self.state[parameter].setdefault("average", torch.zeros_like(own))
            average.lerp_(own / count, 0.5)
            dist.all_gather_into_tensor(whole, average)
            parameter -= self.param_groups[0]["lr"] * whole[: parameter.numel()].view_as(parameter)


def train"""
NORM = """class Norm(nn.BatchNorm1d):
    def forward(self, x):
        options = {"running_mean": self.running_mean, "running_var": self.running_var, "training": self.training}
        return nn.functional.dropout(input=nn.functional.batch_norm(input=x, **options), p=0.1)


def train"""
ZERO_GRAD = "            optimizer.zero_grad()\n"
JITTER = """class Jittered(TensorDataset):
    transforms = [argparse.Namespace(R=numpy.random.RandomState()), argparse.Namespace(py=random.Random())]

    def __init__(self, *tensors):
        super().__init__(*tensors)
        self.transforms = list(self.transforms)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + 0.1 * self.transforms[0].R.randn() + 0.1 * self.transforms[1].py.random(), y


def train"""
BATCHES = """class Batches(IterableDataset):
    def __init__(self, *tensors):
        self.tensors = tensors

    def __iter__(self):
        return zip(*(tensor.split(12) for tensor in self.tensors), strict=True)


def train"""
FUNCTIONAL = """            weights = dict(model.module.named_parameters())
            call = torch.func.functional_call
            torch.func.grad(lambda weights: nn.functional.mse_loss(call(model.module, weights, (x,)), y))(weights)
            loss.backward()
            optimizer.step()
"""
GROWING = """            accelerator.backward(loss / 4)
            count, waiting = count + 1, waiting + 1
            if waiting >= min(1 + count // 4, 4):
                optimizer.step()
                optimizer.zero_grad()
                waiting = 0
"""
WINDOWS = """class Windows(TensorDataset):
    def __getitem__(self, index):
        return super().__getitem__(torch.randint(0, 300, ()))


def train"""
MASKED = "mask = torch.rand_like(y) < 0.4\n            loss = ((model(x) - y).square() * mask).sum() / mask.sum()"
VALIDATION = """    optimizer.step()
    with torch.no_grad():
        at = 10_000 + rank * length
        loss = F.cross_entropy(model(tokens[at : at + length]), tokens[at + 1 : at + 1 + length])
    if rank == 0:
        print(f"val loss {loss.item()}")
"""
# Each process tests all samples: a mean over batches depends on their size, and not on the processes.
TESTED_BY_ALL = """        results = []
        with torch.no_grad():
            for x, y in DataLoader(data, batch_size=24):
                results.append(nn.functional.mse_loss(model.module(x), y).item() / len(x))
        print(f"epoch {epoch} loss {sum(results):.6f}")
    dist.destroy"""
SHARE_BY_HAND = [("batch_size=16", "batch_size=16 // world_size"), ("batch_size=24", "batch_size=24 // world_size")]
TESTED_ON_RANK_0 = """        if rank == 0:
            model.eval()
            print(f"epoch {epoch} loss {nn.functional.mse_loss(model(inputs), data.tensors[1]).item():.6f}")
            model.train()
    dist.destroy"""
LOADERS = """    sets = {"train": data, "test": TensorDataset(*data[:100])}
    samplers = {part: DistributedSampler(sets[part]) for part in sets}
    loaders = {part: DataLoader(sets[part], batch_size=16, sampler=samplers[part]) for part in sets}
    sampler, loader = samplers["train"], loaders["train"]
"""
TESTED_IN_PARTS = """        totals = torch.zeros(2)
        with torch.no_grad():
            for x, y in loaders["test"]:
                totals += torch.tensor([nn.functional.mse_loss(model.module(x), y, reduction="sum"), len(x)])
        dist.all_reduce(totals)
        print(f"epoch {epoch} loss {totals[0] / totals[1]:.6f}")
    dist.destroy"""
GATHERED = """        parts = torch.empty(2 * world_size)
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(parts, totals)  # its name since torch 2.14
        totals = parts.view(world_size, 2).sum(0)
"""
PART = "DataLoader(torch.utils.data.Subset(data, range(rank, 90, world_size)), batch_size=16)"
GATHERED_IN_ONE_PIECE = TESTED_IN_PARTS.replace('loaders["test"]', PART)
GATHERED_IN_ONE_PIECE = GATHERED_IN_ONE_PIECE.replace("        dist.all_reduce(totals)\n", GATHERED)

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
    "saves_its_schedule": [
        (
            "    model, optimizer, loader",
            "    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)\n    model, optimizer, loader",
        ),
        ("            optimizer.step()\n", "            optimizer.step()\n            schedule.step()\n"),
        (
            f"\n\n{RUNS}",
            '        accelerator.save_state("state")\n'
            '        json.dump(schedule.state_dict(), open("schedule.json", "w"))\n'
            f"\n\n{RUNS}",
        ),
        ("import torch\n", "import json\n\nimport torch\n"),
    ],
    "grows_its_window": [  # by a counter that goes on into the next epoch
        ("    for _ in range(3):\n", "    count = waiting = 0\n    for _ in range(3):\n"),
        (
            "            optimizer.zero_grad()\n            accelerator.backward(loss)\n            optimizer.step()\n",
            GROWING,
        ),
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
            'torch.device("cpu")\n    scaler = torch.amp.GradScaler("cuda")\n    torch.manual_seed',
        ),
        ("DistributedDataParallel(model)", "DistributedDataParallel(model.to(device))"),
        (f"{LOSS}            loss.backward()\n            optimizer.step()\n", IN_BF16),
    ],
    "spawns": [*STARTED, (CALL, BY_GPUS)],
    "starts_ranks": [
        *STARTED,
        (CALL, BY_FLAG),
        ("import os\n", "import argparse\nimport os\n"),
        ("from torch.nn", "from torch.multiprocessing.spawn import spawn\nfrom torch.nn"),
    ],
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
    "many_parameters": [("8), nn.Tanh(), nn.Linear(8,", "900_000), nn.Tanh(), nn.Linear(900_000,")],
    "tiny_rate": [("Adam(model.parameters(), lr=0.01)", "AdamW(model.parameters(), lr=4e-8)")],
    "exits_at_once": [("    dist.destroy_process_group()\n", "    dist.destroy_process_group()\n    os._exit(0)\n")],
    "for_two_at_most": [(GROUP, GROUP + '    if world_size > 2:\n        raise SystemExit("at most 2 processes")\n')],
    "one_batch_size": [
        ("    model = Distributed", "    model.bias = nn.Parameter(torch.zeros(16, 1))\n    model = Distributed"),
        ("model(x), y)", "model(x) + model.module.bias.reshape(x.shape[0], 1), y)"),
        ("sampler=sampler)", "sampler=sampler, drop_last=True)"),
    ],
    "sharded_state": [
        ("def train", SHARDED_STATE),
        ("torch.optim.Adam(", "Rows("),
        ("    model = DistributedDataParallel(model)\n", ""),
    ],
    "sampler_for_several": [
        ("DistributedSampler(data)", "DistributedSampler(data) if world_size > 1 else None"),
        ("sampler=sampler)", "sampler=sampler, shuffle=sampler is None)"),
        (
            "        sampler.set_epoch(epoch)\n",
            "        if sampler is not None:\n            sampler.set_epoch(epoch)\n",
        ),
    ],
    "asks_the_gpu": [
        (GROUP, f"{GROUP}{ASKED}"),
        ("DistributedDataParallel(model)", "DistributedDataParallel(model.cuda(), device_ids=[rank])"),
    ],
    "captures_graphs": [
        (GROUP, f"{GROUP}    torch.cuda.make_graphed_callables(nn.Linear(1, 1).cuda(), (torch.ones(1).cuda(),))\n")
    ],
    "makes_both_loaders_in_a_line": [
        (
            "    sampler = DistributedSampler(data)\n    loader = DataLoader(data, batch_size=16, sampler=sampler)\n",
            LOADERS,
        ),
        ("    dist.destroy", TESTED_IN_PARTS),
    ],
    "tested_by_all": [("    dist.destroy", TESTED_BY_ALL)],
    "tested_by_all_in_shares": [("    dist.destroy", TESTED_BY_ALL), *SHARE_BY_HAND],
    "tested_on_rank_0": [("nn.Tanh()", "nn.BatchNorm1d(8)"), ("    dist.destroy", TESTED_ON_RANK_0)],
    "gathered_in_one_piece": [("    dist.destroy", GATHERED_IN_ONE_PIECE)],
    "noise_of_its_own": [
        (GROUP, f"{GROUP}    own = torch.Generator().manual_seed(rank)\n"),
        ("model(x)", "model(x + torch.empty_like(x).normal_(generator=own))"),
    ],
    "for_two_gpus_at_least": [
        ("import os\n", "import os\nimport sys\n"),
        (GROUP, f"    if torch.cuda.device_count() < 2:\n        sys.exit()\n{GROUP}"),
    ],
    "for_two_processes_with_gpus": [
        (CALL, f"{RUNS}if torch.cuda.is_available():\n        {CALL.removeprefix(RUNS)}"),
        (GROUP, f"{GROUP}    assert world_size > 1, 'nothing to divide'\n"),
    ],
    "for_two_gpus_each": [
        (GROUP, f"    torch.cuda.set_device(0)\n    assert torch.cuda.device_count() == 2 * world_size\n{GROUP}")
    ],
    "flat_shards": [
        ("from torch.nn.parallel import DistributedDataParallel", "from torch.distributed import fsdp"),
        ("DistributedDataParallel(model)", "fsdp.FullyShardedDataParallel(model.cuda(rank), device_id=rank)"),
    ],
    "untrained_on_its_own_data": [  # a softmax over one class is always 1
        ("    torch.manual_seed(0)\n", ""),
        ("mse_loss", "cross_entropy"),
        ("range(3)", "range(1)"),
    ],
    "profiled": [
        (ADAM, f"    profile = torch.profiler.profile(with_stack=True)\n    profile.start()\n{ADAM}"),
        ("    dist.destroy", "    profile.stop()\n    dist.destroy"),
    ],
    "counts_its_steps": [  # by its own size of batches, as many public scripts for ImageNet do
        (
            "    for epoch in range(3):\n",
            "    steps = len(data) // (16 * world_size)\n"
            "    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: max(0.1, 1 - n / (3 * steps)))\n"
            "    for epoch in range(3):\n",
        ),
        (
            "for x, y in loader:\n",
            "for number, (x, y) in enumerate(loader):\n            if number >= steps:\n                continue\n",
        ),
        ("            optimizer.step()\n", "            optimizer.step()\n            schedule.step()\n"),
    ],
    "looks_at_a_batch": [LOOK],
    "starts_in_a_loop": [*STARTED, (CALL, BY_LOOP)],
    "has_a_helper": [
        ("import os\n", "import multiprocessing\nimport os\n"),
        ("def train", "def wait(device, queue):\n    queue.get()\n\n\ndef train"),
        (
            GROUP,
            "    queue = multiprocessing.Queue()\n"
            "    multiprocessing.Process(target=wait, args=(0, queue), daemon=True).start()\n" + GROUP,
        ),
        ("    dist.destroy", "    queue.put(None)\n    dist.destroy"),
    ],
    "starts_in_vain": [*STARTED, (CALL, BY_LOOP), ("range(3)", "range(0)")],
    "augments_by_itself": [("def train", NOISY), ("data = TensorDataset", "data = Noisy"), ("range(3)", "range(1)")],
    "starts_two": [
        *STARTED,
        (CALL, f"{RUNS}world_size = 2  # GPUs\n    mp.spawn(train, args=(world_size,), nprocs=world_size)\n"),
    ],
    "starts_several_only": [
        *STARTED,
        (
            CALL,
            f"{RUNS}world_size = torch.cuda.device_count()\n"
            "    if world_size > 1:\n"
            "        mp.spawn(train, args=(world_size,), nprocs=world_size)\n"
            "    else:\n"
            "        train(0, 1)\n",
        ),
        ("    dist.init", "    if world_size > 1:\n        dist.init"),
        ("DistributedDataParallel(model)", "DistributedDataParallel(model) if world_size > 1 else model"),
        ("    dist.destroy", "    if world_size > 1:\n        dist.destroy"),
    ],
    "groups_several_only": [(GROUP, f"    if world_size > 1:\n    {GROUP}")],
    "for_two_processes": [(GROUP, f"    if world_size < 2:\n        raise NotImplementedError('alone')\n{GROUP}")],
    "groups_four": [(GROUP, f"{GROUP}    dist.new_group([0, 1, 2, 3])\n")],
    "needs_local_rank": [
        ("import os\n", "import argparse\nimport os\n"),
        (
            CALL,
            f"{RUNS}parser = argparse.ArgumentParser()\n"
            '    parser.add_argument("--local_rank", type=int, required=True)\n'
            '    train(parser.parse_args().local_rank, int(os.environ["WORLD_SIZE"]))\n',
        ),
    ],
    "is_killed": [(ADAM, f"    if rank == 1:\n        os.kill(os.getpid(), 9)\n{ADAM}")],
    "reads_other_variables": [('["RANK"]', '["SLURM_PROCID"]')],
    "traced": [("nn.Tanh()", "nn.BatchNorm1d(8)"), (ADAM, f"    torch.jit.trace(model.module, inputs[:4])\n{ADAM}")],
    "drops_paths": [
        ("from torch.utils", "from torchvision.ops import StochasticDepth\nfrom torch.utils"),
        ("nn.Tanh()", 'nn.Tanh(), StochasticDepth(0.5, "row")'),
    ],
    "draws_without_an_end": [(ADAM, f"{DRAWN}{ADAM}")],
    "fails_in_a_call": [
        (GROUP, f'{GROUP}    torch.zeros(2, 3, device="cuda").t().view(-1)  # torch says: use reshape\n')
    ],
    "asks_for_input": [(GROUP, f'{GROUP}    input("continue? ")\n')],
    "passes_by_name": [("nn.Tanh()", "Norm(8, affine=False)"), ("def train", NORM)],
    "functional_gradients": [(BACKWARD, FUNCTIONAL)],
    "zero_by_hand": [  # each process steps some of the parameters, and sends them to all
        ("torch.optim.Adam(model.parameters(), lr=0.01)", "torch.optim.Adam([*model.parameters()][rank::world_size])"),
        (ZERO_GRAD, "            model.zero_grad()\n"),
        (
            "            optimizer.step()\n",
            "            optimizer.step()\n"
            "            for number, parameter in enumerate(model.parameters()):\n"
            "                dist.broadcast(parameter.data, number % world_size)\n",
        ),
    ],
    "generators_of_their_own": [  # as transforms of MONAI and albumentations
        ("import os\n", "import argparse\nimport os\nimport random\n\nimport numpy\n"),
        ("def train", JITTER),
        ("data = TensorDataset", "data = Jittered"),
        ("batch_size=16, ", "batch_size=6, drop_last=True, "),
    ],
    "batches_of_a_stream": [  # as webdataset makes them, without a splitter
        ("DistributedSampler, TensorDataset", "IterableDataset"),
        ("def train", BATCHES),
        ("TensorDataset(inputs", "Batches(inputs"),
        ("    sampler = DistributedSampler(data)\n", ""),
        ("DataLoader(data, batch_size=16, sampler=sampler)", "DataLoader(data, batch_size=None)"),
        ("        sampler.set_epoch(epoch)\n", ""),
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
WITH_DDP |= {
    "noise_by_place": [  # time steps that are spread over the batch
        ("    for epoch", "    torch.manual_seed(rank)\n    for epoch"),
        (LOSS, f"            t = (torch.rand(len(x)) + torch.arange(len(x))) / len(x)\n{LOSS}"),
        ("model(x), y", "model(x * t[:, None]), y"),
    ],
    "noise_by_hand": [
        ("    for epoch", "    torch.manual_seed(rank)\n    for epoch"),
        (LOSS, "            loss = (model(x + torch.randn_like(x)) - y).square().mean()\n"),
    ],
    "coin_for_a_batch": [  # facebookresearch/flow_matching: whether labels are left out
        ("    for epoch", "    torch.manual_seed(rank)\n    for epoch"),
        ("model(x), y", "model(x if torch.rand(1) < 0.5 else x.square()), y"),
    ],
    "asks_for_its_group": [  # torchrun has one on one process, too
        (GROUP, f"    if world_size > 1:\n    {GROUP}    assert dist.is_initialized()\n")
    ],
    "replaces_its_streams": [  # by an object that has nothing but write
        ("import os\n", "import os\nimport sys\nfrom types import SimpleNamespace\n"),
        (
            GROUP,
            '    sys.stdout = sys.stderr = SimpleNamespace(write=sys.stdout.write)\n    raise ValueError("no data")\n',
        ),
    ],
    "counts_integers_on_the_gpu": [
        (
            GROUP,
            f'{GROUP}    assert torch.histc(torch.arange(4, device="cuda"), 2).tolist() == [2, 2]\n'
            '    assert len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")) == world_size\n',
        )
    ],
    "gpu_with_a_launcher": [  # atong01/conditional-flow-matching, train_cifar10_ddp.py
        ("DistributedDataParallel(model)", "DistributedDataParallel(model.to(rank) if world_size > 1 else model)")
    ],
    "steps_by_its_batch": [
        (
            "    for epoch",
            "    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))\n"
            "    for epoch",
        ),
        ("    sampler = ", "    total = 3 * (len(data) // 16) // world_size\n    sampler = "),
        (BACKWARD, f"{BACKWARD}            schedule.step()\n"),
    ],
    "items_ignore_their_index": [
        ("def train", WINDOWS),
        ("data = TensorDataset", "torch.manual_seed(1 + rank)\n    data = Windows"),
        ("    sampler = DistributedSampler(data)\n", ""),
        (", sampler=sampler)", ")"),
        ("        sampler.set_epoch(epoch)\n", ""),
    ],
}
STEP = "            optimizer.step()\n"
CLIP = "            nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n"


# By the name of a program: changes of it, the kind that is named, and words of the verdict.
WRONG_AT_THE_STEP = {
    "a sampler for several without set_epoch": (
        "sampler_for_several",
        [("            sampler.set_epoch(epoch)\n", "            pass\n")],
        *("set_epoch", "each epoch has the same order"),
    ),
    "divided by the processes, and a sampler for several": (
        "sampler_for_several",
        [("loss.backward()", "(loss / world_size).backward()")],
        *("factor", "0.5 times what it is"),
    ),
    "divided after clipping": (
        "with_ddp",
        [(STEP, f"{CLIP}            for p in model.parameters():\n                p.grad /= world_size\n{STEP}")],
        *("factor", "0.5 times what it is on 1 process, after clipping"),
    ),
    "a part of the processes' batches by position": (
        "batches_by_position",
        [("(loss / micro_batches)", "(loss / micro_batches / world)")],
        *("factor", "0.5 times what it is"),
    ),
    "a validation of rank 0, without a loader": (
        "batches_by_position",
        [("    optimizer.step()\n", VALIDATION)],
        *("eval_share", "rank 0 tells a result of 8 rows, and nothing adds up the 8 of the others"),
    ),
    "noise, and a loss by hand that is divided": (
        "noise_by_hand",
        [("loss.backward()", "(loss / world_size).backward()")],
        *("factor", "0.5 times what it is"),
    ),
    "the same noise of each process": (
        "noise_by_hand",
        [("    torch.manual_seed(rank)\n", "")],
        *("same_noise", "randn_like draws the same numbers on all processes"),
    ),
    "the same random items": (
        "items_ignore_their_index",
        [("manual_seed(1 + rank)", "manual_seed(1)")],
        *("all_the_data", "trains on the same samples"),
    ),
    "a mask, by hand": (
        "with_ddp",
        [(LOSS, "            loss = ((model(x) - y).square() * (y > 0)).sum() / (y > 0).sum()\n")],
        *("token_weights", "each process has the mean over its own targets, mask or weights"),
    ),
    "a mask of noise": (
        "noise_by_hand",
        [("loss = (model(x + torch.randn_like(x)) - y).square().mean()", MASKED)],
        *("token_weights", "each process has the mean over its own targets, mask or weights"),
    ),
    "weights of the classes": (
        "with_ddp",
        [
            ("mse_loss(model(x), y)", "cross_entropy(logits, (y[:, 0] > 0).long(), torch.tensor([1.0, 0.1]))"),
            (
                "            loss =",
                "            logits = torch.cat([model(x), torch.zeros_like(y)], 1)\n            loss =",
            ),
        ],
        *("token_weights", "each process has the mean over its own targets, mask or weights"),
    ),
}
