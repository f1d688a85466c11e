"""--virtual_processes: the same bits on any number of processes."""

import contextlib
import functools
import hashlib
import itertools
import math
from types import SimpleNamespace

import pytest
import run_reader
import safetensors.torch
import torch
import torch.distributed as dist
from conftest import needs_torch
from fakes import fake_accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from utils.failures.errors import explain
from utils.layout import Layout
from utils.parallel import virtual_processes as vp
from utils.parallel.virtual_processes import Node, partial_sums, tree_push, tree_total


def tree_sum(leaves, add=torch.Tensor.add_):
    nodes = []
    for number, leaf in enumerate(leaves):
        tree_push(nodes, Node(number, 1, leaf.clone() if torch.is_tensor(leaf) else leaf), add)
    return tree_total(nodes, add)


@pytest.mark.parametrize(
    ("number", "tree"),
    [
        (6, "(((0 + 1) + (2 + 3)) + (4 + 5))"),
        (7, "(((0 + 1) + (2 + 3)) + ((4 + 5) + 6))"),
        (8, "(((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)))"),
    ],
)
def test_sums_are_in_the_order_of_the_tree(number, tree):
    assert tree_sum(map(str, range(number)), "({} + {})".format) == tree


@pytest.mark.parametrize("number", [8, 16, 64])
def test_a_power_of_two_of_processes_sends_one_sum_each(number):
    for world_size in (1, 2, 4, 8):
        slots = [Layout(world_size, rank, virtual_processes=number).slots() for rank in range(world_size)]
        assert [*itertools.chain(*slots)] == [*range(number)]
        assert [len(partial_sums(own)) for own in slots] == [1] * world_size


class OneRank(SimpleNamespace):
    """What GradientSum, TreeSum and ShardSum use of an Accelerator: one process of several."""

    def __init__(self, rank, world_size, number, kind="NO", **more):
        super().__init__(**vars(fake_accelerator(world_size, rank, kind=kind, virtual_processes=number, **more)))
        self.gradient_accumulation_steps, self.step = len(self.layout.slots()), 0

    @property
    def sync_gradients(self):
        return self.step % self.gradient_accumulation_steps == 0


@pytest.fixture
def tree_threads(threads, monkeypatch):
    """`threads` with the collectives that TreeSum uses."""

    def exchange(mine, group):
        """What the threads of a group have, and the place of this one. None: all threads."""
        ranks = range(len(threads.rounds)) if group is None else group
        everyone = threads.exchange(mine)
        return [everyone[rank] for rank in ranks], ranks.index(threads.here.rank)

    def arrive(output, parts, async_op):
        """With async_op, nothing is there before `wait`."""
        work = SimpleNamespace(wait=lambda: output.copy_(torch.cat(parts)))
        return work if async_op else work.wait()

    def all_to_all_single(output, sent, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False):
        sizes = input_split_sizes or len(sent) // len(group or threads.rounds)
        splits, place = exchange(sent.clone().split(sizes), group)
        parts = [split[place] for split in splits]
        assert output_split_sizes in (None, [len(part) for part in parts])
        return arrive(output, parts, async_op)

    def all_gather_single(output, mine, group=None, async_op=False):
        return arrive(output, exchange(mine.clone(), group)[0], async_op)

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    monkeypatch.setattr(vp, "all_gather_single", all_gather_single)
    monkeypatch.setattr(vp, "SMALL", 100)
    return threads


def random_leaves(number, size):
    leaves = torch.randn(number, size, generator=torch.Generator().manual_seed(0))
    return leaves * 10.0 ** (torch.arange(number) % 5)[:, None]


@pytest.mark.parametrize("kind", ["NO", "FSDP"])
@pytest.mark.parametrize(("number", "size"), [(8, 1000), (7, 13), (12, 1)])  # small or not, by SMALL and the processes
def test_sums_are_the_same_bits_on_any_number_of_processes(tree_threads, number, size, kind):
    leaves = random_leaves(number, size)

    def total(rank, world_size):
        accelerator, nodes = OneRank(rank, world_size, number, kind), []
        tree = vp.TreeSum([*map(accelerator.layout.slots, range(world_size))])
        for leaf in accelerator.layout.slots():
            tree_push(nodes, Node(leaf, 1, leaves[leaf].clone()), torch.Tensor.add_)
        return tree.total(nodes)

    (expected,) = tree_threads.run(1, lambda rank: total(rank, 1))
    exact = leaves.double().sum(0).float()
    torch.testing.assert_close(expected, exact, rtol=1e-5, atol=1e-5 * float(leaves.abs().max()))
    one_by_one = leaves[0].clone()
    for leaf in leaves[1:]:
        one_by_one += leaf
    assert size == 1 or not torch.equal(expected, one_by_one)  # another order gives other bits
    for world_size in range(2, number + 1):
        for found in tree_threads.run(world_size, lambda rank, w=world_size: total(rank, w)):
            assert torch.equal(found, expected)


SIZES = [(2, 4), (2, 8), (2, 14), (3, 6), (3, 12), (4, 12), (5, 20)]
HSDP = [(4, 4, 2), (4, 8, 2), (4, 12, 2), (6, 12, 3), (6, 18, 2), (8, 16, 4)]


@pytest.mark.parametrize(("world_size", "number", "shards"), [*((*size, size[0]) for size in SIZES), *HSDP])
def test_shards_are_added_in_the_order_of_the_tree_and_stay_shards(tree_threads, world_size, number, shards):
    size = 7  # of a shard
    leaves = random_leaves(number, shards * size)
    leaves[:, ::3] = -0.0
    # Of each replica's micro-batches, the first ones of its processes.
    late = leaves.clone()
    starts = range(0, number, number * shards // world_size)
    firsts = [start + shard for start in starts for shard in range(shards)]
    late[firsts] = 0

    def run(rank):
        accelerator = OneRank(rank, world_size, number, "FSDP", shards=shards)
        groups = {"replicas": range(rank % shards, world_size, shards)}
        accelerator.mesh = SimpleNamespace(get_group=groups.get)
        own = range(rank - rank % shards, rank - rank % shards + shards)
        shard_sum, result = vp.ShardSum(accelerator), []
        for step in range(4):
            for leaf in accelerator.layout.slots():
                accelerator.step += 1
                if step == 1 and accelerator.sync_gradients:
                    continue  # an unfinished step, which must not count in the next one
                if step == 3 and leaf in firsts and number > world_size:
                    continue  # no gradients: as zeros
                output = torch.full((size,), math.nan)
                shard_sum(output, leaves[leaf].clone(), own, None)
                held = sum(node.value.untyped_storage().nbytes() for node in shard_sum.nodes)
                assert held <= (math.log2(number) + 1) * output.nbytes
            result.append(output)
        with pytest.raises(RuntimeError, match="one forward and one backward pass per micro-batch"):
            shard_sum(output, leaves[0], own, None)
        return torch.stack(result)

    parts = tree_threads.run(world_size, run)
    for step, expected in ((0, leaves), (2, leaves), (3, late if number > world_size else leaves)):
        for replica in range(0, world_size, shards):
            found = torch.cat([part[step] for part in parts[replica : replica + shards]])
            assert found.numpy().tobytes() == tree_sum(expected).numpy().tobytes()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_norm_for_clipping_has_the_same_bits_however_rows_are_sharded(threads, world_size, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    shapes = [(7, 37), (5,), (2, 3, 4), (1, 64), (64, 1), ()]
    gradients = [torch.randn(shape, generator=generator) * 10.0**-k for k, shape in enumerate(shapes)]
    plain = [SimpleNamespace(grad=gradient.clone()) for gradient in gradients] + [SimpleNamespace(grad=None)]
    expected = vp.total_norm(OneRank(0, 1, 4), plain)
    torch.testing.assert_close(expected, nn.utils.get_total_norm(gradients), rtol=1e-6, atol=0)
    assert all(torch.equal(each.grad, gradient) for each, gradient in zip(plain, gradients, strict=False))

    expected = vp.total_norm(OneRank(0, 1, 4), plain[: len(gradients) - 1])
    monkeypatch.setattr(vp, "local_rows", lambda gradient: gradient.rows)
    monkeypatch.setattr(dist, "all_reduce", lambda sums, group: sums.copy_(sum(threads.exchange(sums.clone()))))

    def norm(rank):
        accelerator = OneRank(rank, world_size, 4, "FSDP")
        accelerator.mesh = SimpleNamespace(get_group=lambda _: None)
        sharded = []
        for gradient in gradients[:-1]:  # FSDP does not shard a scalar
            parts = [*gradient.chunk(world_size), *[gradient[:0]] * world_size]  # of 1 row, the others have none
            rows = parts[rank], sum(map(len, parts[:rank]))
            shard = SimpleNamespace(shape=gradient.shape, ndim=gradient.ndim, rows=rows, to_local=None)
            sharded.append(SimpleNamespace(grad=shard))
        return vp.total_norm(accelerator, sharded)

    for found in threads.run(world_size, norm):
        assert torch.equal(found, expected)


def test_columns_are_added_in_the_same_order_for_any_strides():
    terms = torch.randn(16, 513, generator=torch.Generator().manual_seed(0))
    other_strides = terms.T.contiguous().T
    assert torch.equal(vp.sum_rows_pairwise(other_strides), vp.sum_rows_pairwise(terms))


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_a_step_rounds_alike_wherever_a_tensor_is_cut(kind, monkeypatch):
    """Not so a fused step on a CPU, in which the last entries of a tensor differ by rounding."""
    generator = torch.Generator().manual_seed(0)
    weights, gradients = torch.randn(35, generator=generator), torch.randn(20, 35, generator=generator)

    def train(cuts):
        parts = [nn.Parameter(part.clone()) for part in weights.tensor_split(cuts)]
        momentum = {"momentum": 0.9} if kind == "SGD" else {}
        optimizer = getattr(torch.optim, kind)(parts, 1e-2, weight_decay=0.1, fused=True, **momentum)
        monkeypatch.setattr(vp, "is_sharded", lambda _: cuts)
        vp.unfuse(optimizer)
        assert all(bool(group["foreach"]) == bool(cuts) for group in optimizer.param_groups)
        for gradient in gradients:
            for part, part_gradient in zip(parts, gradient.tensor_split(cuts), strict=True):
                part.grad = part_gradient
            optimizer.step()
        moments = [[value for value in optimizer.state[part].values() if value.shape == part.shape] for part in parts]
        assert all(moments)
        return [torch.cat(whole) for whole in (parts, *zip(*moments, strict=True))]

    assert all(torch.equal(*pair) for pair in zip(train([]), train([11, 13, 30]), strict=True))


def test_gradients_of_a_bare_model_are_added_in_the_tree_also_where_some_are_missing():
    accelerator = OneRank(0, 1, 4)
    first, second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    model = nn.ParameterList([first, second])
    gradients = vp.GradientSum(model, accelerator)
    leaves = torch.tensor([[1e8, 1.0, -0.0], [1.0, 1e-8, -0.0], [-1e8, 1e8, -0.0], [1.0, 3.0, -0.0]])
    for _ in range(2):
        for step, leaf in enumerate(leaves):
            accelerator.step += 1
            gradients.prepare()
            first.grad = leaf.clone()
            second.grad = leaf.clone() if step % 2 else None
            gradients.collect()
            gradients.prepare()
            gradients.collect()  # after a backward pass of another model
        assert torch.equal(first.grad, (leaves[0] + leaves[1]) + (leaves[2] + leaves[3]))
        assert torch.equal(second.grad, leaves[1] + leaves[3])
        # As in a bucket of DDP, in which a missing gradient is zero.
        assert second.grad.signbit().tolist() == [False, False, False]
        first.grad = second.grad = None
        assert gradients.nodes == []


def test_a_backward_pass_that_adds_to_the_last_steps_gradient_is_refused(capsys):
    """On 2 processes it would count twice; one of another model, which has its own phase, may stay."""
    accelerator = OneRank(0, 1, 2)
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    sums = [vp.GradientSum(part, accelerator) for part in (model, other)]
    other(torch.ones(1, 2)).sum().backward()
    for accelerator.step in (1, 2, 3):
        for gradients in sums:
            gradients.prepare()
        model(torch.ones(1, 2)).sum().backward()
        sums[1].collect()
        with pytest.raises(SystemExit) if accelerator.step == 3 else contextlib.nullcontext():
            sums[0].collect()
    assert "a backward pass adds to gradients of the last step" in capsys.readouterr().err


def test_a_micro_batch_without_any_gradient_keeps_its_place_in_the_tree():
    accelerator = OneRank(0, 1, 8)
    parameter = nn.Parameter(torch.zeros(100))
    gradients = vp.GradientSum(nn.ParameterList([parameter]), accelerator)
    leaves = list(torch.randn(8, 100, generator=torch.Generator().manual_seed(0)))
    for number, leaf in enumerate(leaves):
        accelerator.step += 1
        parameter.grad = None if number == 2 else leaf.clone()
        gradients.collect()
    first, second = (leaves[0] + leaves[1]) + leaves[3], (leaves[4] + leaves[5]) + (leaves[6] + leaves[7])
    assert torch.equal(parameter.grad, first + second)
    assert not torch.equal(parameter.grad, (leaves[0] + leaves[1]) + (leaves[3] + second))


@pytest.mark.parametrize(("unused", "in_backward"), [(None, 6), (0, 4), (2, 1)])
def test_exchanges_begin_in_the_last_backward_pass_in_one_order(tree_threads, unused, in_backward, monkeypatch):
    """The last layer's gradients come first; where rank 0 has none, its exchanges wait for the end."""
    monkeypatch.setattr(vp, "BUCKET", 1)
    monkeypatch.setattr(vp, "SMALL", 0)
    monkeypatch.setattr(vp, "LAG", 2)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, size: torch.full((size,), math.nan))
    begun = [], []

    def record(module, name):
        exchange = getattr(module, name)

        def recorded(*args, **options):
            begun[tree_threads.here.rank].append(name)
            return exchange(*args, **options)

        monkeypatch.setattr(module, name, recorded)

    record(dist, "all_to_all_single")
    record(vp, "all_gather_single")

    def run(rank):
        never, *parameters = [nn.Parameter(torch.full((2,), float(number))) for number in range(5)]
        accelerator = OneRank(rank, 2, 4)
        gradients = vp.GradientSum(nn.ParameterList([never, *parameters]), accelerator)
        used = [parameter for number, parameter in enumerate(parameters) if rank == 1 or number != unused]
        for is_last in (False, True):
            accelerator.step += 1
            gradients.prepare()
            functools.reduce(torch.mul, used).sum().backward()
            assert rank == 1 or len(begun[0]) == is_last * in_backward
            gradients.collect()
        assert never.grad is None
        return [parameter.grad.tolist() for parameter in parameters]

    found = tree_threads.run(2, run)
    to_all, gather = "all_to_all_single", "all_gather_single"
    assert begun[0] == begun[1] == [to_all, to_all, to_all, gather, to_all, gather, to_all, gather, gather, gather]
    for number, gradient in enumerate(found[0]):
        of_rank_0 = 0 if number == unused else 24 / (number + 1) / (1 if unused is None else unused + 1)
        assert gradient == found[1][number] == [2 * (24 / (number + 1) + of_rank_0)] * 2


def test_a_gradient_in_two_parts_is_refused_and_not_half_exchanged(tree_threads):
    def run(rank):
        accelerator, layer = OneRank(rank, 2, 2), nn.Linear(2, 2)
        gradients = vp.GradientSum(layer, accelerator)
        accelerator.step = 1
        gradients.prepare()
        x = torch.ones(1, 2, requires_grad=True)
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=True)
        with pytest.raises(RuntimeError, match="in two parts"):
            x.sum().backward()

    tree_threads.run(2, run)


def test_sparse_gradients_are_explained():
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 3])).sum().backward()
    with pytest.raises(RuntimeError) as raised:
        vp.flat({embedding.weight: embedding.weight.grad}, [embedding.weight], world_size=2)
    assert "need dense gradients: sparse=False, or DDP alone" in explain(raised.value)


def test_one_process_of_torchrun_has_the_bits_of_a_model_without_ddp():
    """Whose micro-batches all write their gradients into the same memory."""
    inputs = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))

    def gradients_of(wrap):
        torch.manual_seed(0)
        accelerator, model = OneRank(0, 1, 4), nn.Linear(3, 2)
        wrapped = wrap(model)
        gradients = vp.GradientSum(wrapped, accelerator)
        for micro_batch in inputs:
            accelerator.step += 1
            wrapped(micro_batch).square().sum().backward()
            gradients.collect()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = gradients_of(lambda model: model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = gradients_of(lambda model: nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True))
    finally:
        dist.destroy_process_group()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


class Rarely(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.rare = nn.Linear(2, 1), nn.Linear(2, 1)

    def forward(self, x, uses_rare):
        return self.head(x).sum() + (self.rare(x).sum() if uses_rare else 0)


@needs_torch("2.13")
def test_a_shard_that_only_some_steps_use_has_no_gradient_in_the_others():
    """Zeros instead would let momentum and weight decay go on."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        accelerator = OneRank(0, 1, 2, "FSDP")
        accelerator.reduce = lambda tensor, _: tensor
        model = Rarely()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        gradients = vp.ShardedGradientSum(model, accelerator)
        for uses_rare in (True, False, True):
            for _ in range(accelerator.gradient_accumulation_steps):
                accelerator.step += 1
                gradients.prepare()
                model(torch.ones(3, 2), uses_rare).backward()
                gradients.sums[0].called_at = accelerator.step  # one process reduces nothing
                gradients.collect()
            assert [parameter.grad is not None for parameter in model.parameters()] == [True] * 2 + [uses_rare] * 2
            model.zero_grad()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("step", [1, 2])
def test_two_backward_passes_of_a_model_in_one_micro_batch_are_refused(step):
    """Also in the last micro-batch of a step, after which the sum is in the parameters."""
    accelerator = OneRank(0, 1, 2)
    model = nn.Linear(2, 1)
    gradients = vp.GradientSum(model, accelerator)
    for accelerator.step in range(1, step + 1):
        gradients.prepare()
        model(torch.ones(1, 2)).sum().backward()
        gradients.collect()
    gradients.prepare()
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="one forward and one backward pass per micro-batch"):
        gradients.collect()


COMMON = ["--checkpoint_every", 1, "--keep_checkpoints", 0, "--log_every", 2]  # a log line may begin before a resume
SCRIPTS = {
    "mlp": [
        *("mlp", "--virtual_processes", 8, "--activation", "relu", "--dropout", 0.1, "--hidden", 32),
        *("--batch_size", 475, "--max_steps", 4),  # 3 steps an epoch, the last of 53 images
    ],
    "gradient_accumulation": [
        *("gradient_accumulation", "--virtual_processes", 7, "--variable_length"),
        *("--batch_size", 475, "--max_steps", 4),
    ],
    "resnet50": [
        *("small", "resnet50", "--virtual_processes", 4, "--batch_size", 8, "--max_steps", 4, "--num_workers", 0),
        *("--mixup", 0.2, "--ema_decay", 0.9, "--max_test_samples", 10, "--image_size", 16),
    ],
    # The generator trains in the fifth and in the last step; on 3 processes one has 2 micro-batches.
    "wgan": ["wgan", "--virtual_processes", 4, "--batch_size", 56, "--num_epochs", 2],
    "two_loaders": ["two_loaders", "--virtual_processes", 5, "--num_epochs", 2],
    # Parameters and a model without a gradient in some micro-batches.
    "sometimes": ["sometimes", "--virtual_processes", 8],
    "sometimes --complex": ["sometimes", "--virtual_processes", 8, "--complex"],
}
THREE = ("cpu_ddp", "--num_processes", 3)


@pytest.fixture(scope="module")
def made(runs, small_mnist):
    """Of each script: on 1 and 3 processes; and chain_P, which goes on from what fewer processes did."""
    found = {}
    for name, flags in SCRIPTS.items():
        data = ["--dataset", small_mnist] if name in ("mlp", "gradient_accumulation", "resnet50") else []
        words = [*flags, *COMMON, *data]
        one, three = runs(*words), runs(*words, on=THREE)
        chain_2 = runs(*words, on=("cpu_ddp",), resumes=one, at=1)
        chain_3 = runs(*words, on=THREE, resumes=chain_2, at=2)
        found[name] = {"1": one, "3": three, "chain_2": chain_2, "chain_3": chain_3}
    return found


def bits(run) -> dict:
    """SHA-256 of the final models and of all tensors of the last checkpoint; the logged numbers."""
    found, step = run.bits, run_reader.last_checkpoint(run.folder)
    for file, tensors in run_reader.checkpoint(step)[1].items():  # whole, also of shards
        data = {name: tensor.contiguous() for name, tensor in tensors.items()}
        found[f"checkpoints/{step.name}/{file}"] = hashlib.sha256(safetensors.torch.save(data)).hexdigest()
    return found | {f"{line['split']} {line['step']}": line for line in run_reader.lines(run.folder)}


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("other", ["3", "chain_2", "chain_3"])
def test_model_optimizer_and_log_are_the_same_bits(made, name, other):
    expected, found = bits(made[name]["1"]), bits(made[name][other])
    assert any(file.startswith("checkpoints") and "optim" in file for file in expected)
    assert len([key for key in expected if key.startswith("train")]) >= 2
    assert found == expected


SHARDED = {
    # Tied embeddings; most steps are clipped, and the last one has fewer samples than virtual processes.
    "transformer": [
        *("--virtual_processes", 12, "--vocabulary", 300, "--context", 8, "--layers", 2, "--dim", 32),
        *("--batch_size", 57, "--max_steps", 6, "--max_grad_norm", 0.3, "--num_tokens", 2),
    ],
    # The last of 3 steps an epoch has 4 samples.
    "sometimes": ["--virtual_processes", 12, "--idle", -1, "--batch_size", 28],
}
ALONE = {"FSDP": ("cpu_fsdp",), "HSDP 2 x 2": ("cpu_hsdp",)}
CHAIN = [("cpu_fsdp",), THREE, ("cpu_hsdp",), ("cpu_fsdp", "--num_processes", 3), ("cpu_fsdp", "--num_processes", 1)]


@pytest.fixture(scope="module")
def sharded(runs, texts):
    """Of each program: on one process; on some alone; and "chain", which each goes on with for a step."""
    found = {}
    for name, flags in SHARDED.items():
        words = [name, *flags, *COMMON, *(["--dataset", texts] if name == "transformer" else [])]
        found[name] = {"one": (run := runs(*words))}
        found[name] |= {kind: runs(*words, on=on) for kind, on in ALONE.items()}
        for step, on in enumerate(CHAIN, 1):
            run = runs(*words, on=on, resumes=run, at=step)
        found[name]["chain"] = run
    return found


@needs_torch("2.13")
@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("other", [*ALONE, "chain"])
def test_shards_have_the_bits_of_one_process(sharded, name, other):
    expected, found = bits(sharded[name]["one"]), bits(sharded[name][other])
    assert any(file.startswith("checkpoints") and "optim" in file for file in expected)
    assert found == expected
    kinds = [launch["distributed_type"] for launch in run_reader.launches(sharded[name][other].folder)]
    assert len(kinds) == (6 if other == "chain" else 1)
    assert kinds[-1] == (other if other in ALONE else "FSDP")


def test_an_optimizer_that_adds_up_over_a_whole_tensor_is_refused_on_shards(capsys):
    parameters = [nn.Parameter(torch.ones(2))]
    with pytest.raises(SystemExit):
        vp.sum_gradients_by_tree(OneRank(0, 2, 4, "FSDP"), [], [torch.optim.Adafactor(parameters)])
    assert "Adafactor may add up over a whole tensor" in capsys.readouterr().err
    vp.sum_gradients_by_tree(OneRank(0, 2, 4), [], [torch.optim.Adafactor(parameters)])
    vp.sum_gradients_by_tree(OneRank(0, 2, 4, "FSDP"), [], [torch.optim.AdamW(parameters)])


@needs_torch("2.13")
def test_shards_are_added_in_float32_also_in_mixed_precision():
    accelerator = OneRank(0, 2, 4, "FSDP")
    accelerator.whole_gradients = False
    plugin = SimpleNamespace(mixed_precision_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
    accelerator.state = SimpleNamespace(fsdp_plugin=plugin)
    vp.check_fsdp(accelerator)
    policy = plugin.mixed_precision_policy
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)


def test_shards_need_as_many_micro_batches_on_each_process(capsys):
    accelerator = OneRank(0, 3, 8, "FSDP")
    accelerator.whole_gradients, accelerator.gradient_accumulation_steps = False, 1
    with pytest.raises(SystemExit):
        vp.use_virtual_processes(accelerator)
    assert "--virtual_processes 8 is not divisible by the 3 processes" in capsys.readouterr().err
    accelerator.layout, accelerator.whole_gradients = Layout(3, 0, 3, virtual_processes=9), True
    with pytest.raises(SystemExit):
        vp.use_virtual_processes(accelerator)
    assert "leave --whole_gradients out" in capsys.readouterr().err
