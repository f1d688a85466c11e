"""The results of V processes, bit for bit, on any number of processes from 1 to V.

A floating-point sum depends on the order of its terms, so P processes usually train a different model than one, at
first by rounding. With virtual processes, a step is always split into V micro-batches, and their gradients are added in
the order of one binary tree, whichever process computed them. For V = 8:

    ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))

Each process computes consecutive micro-batches and makes the sums of the tree that contain only these: 2 processes one
sum each, 3 processes two. Then each process receives one slice of all sums (all-to-all), completes the tree on its
slice and sends the result to all (all-gather). If P divides V and both are powers of two, this is the traffic of a ring
all-reduce; otherwise a process sends up to 2 log2(V) sums.

Under FSDP, each process computes every P-th micro-batch, and receives its slice of each one's gradients, which is as
much traffic as the reduce-scatter of FSDP. The sums of the tree stay sharded.

Source: EasyScale, M. Li et al., SC 2023, https://arxiv.org/abs/2208.14228, which trains with a fixed number of logical
workers; the tree makes it irrelevant which process computes them.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, is_compiled_module
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..console import plural, stop
from ..sampler import logical_ranks, virtual_processes
from ..topology import data_parallel_gpus
from .gather_samples import gather_samples
from .same_weights import AVERAGE_BUFFERS, sum_of_bits


def use_virtual_processes(accelerator: Accelerator, number: int) -> None:
    """Make loaders, metrics and gradients behave as with `number` processes."""
    world_size = accelerator.num_processes
    if accelerator.gradient_accumulation_steps > 1:
        stop(
            f"--virtual_processes {number} already splits a batch into {plural(number, 'micro-batch')}: "
            "leave --gradient_accumulation_steps out"
        )
    if number < world_size:
        stop(
            f"--virtual_processes {number} is less than the {world_size} processes of this run: "
            f"some would have nothing to do; start {number} or fewer"
        )
    if data_parallel_gpus(accelerator) > 1:
        stop("--virtual_processes works with DDP and FSDP, not with DataParallel: use ddp.yaml")
    if accelerator.distributed_type == DistributedType.FSDP:
        check_fsdp(accelerator, number)
    accelerator.virtual_processes = number
    accelerator.gradient_accumulation_steps = len(own_logical_ranks(accelerator))


def check_fsdp(accelerator: Accelerator, number: int) -> None:
    """Stop if FSDP cannot make `number` virtual processes; in mixed precision, have it add in float32."""
    if number % accelerator.num_processes:
        stop(
            f"--virtual_processes {number} is not divisible by the {accelerator.num_processes} processes of this run, "
            "and FSDP needs as many micro-batches on each: choose a multiple, or start fewer processes"
        )
    if accelerator.whole_gradients:
        stop("--virtual_processes reduces the gradients of each micro-batch: leave --whole_gradients out")
    plugin = accelerator.state.fsdp_plugin
    if plugin.mixed_precision_policy:
        plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32)


def own_logical_ranks(accelerator: Accelerator, rank: int | None = None) -> range:
    """The logical ranks of process `rank`; None: this one."""
    rank = accelerator.process_index if rank is None else rank
    strided = accelerator.distributed_type == DistributedType.FSDP
    return logical_ranks(rank, accelerator.num_processes, virtual_processes(accelerator), strided)


def current_logical_rank(accelerator: Accelerator) -> int:
    """The virtual process of the micro-batch in the current `accelerator.accumulate`."""
    logical_ranks = own_logical_ranks(accelerator)
    return logical_ranks[(accelerator.step - 1) % len(logical_ranks)]


class Node(NamedTuple):
    """A sum of the tree, over the logical ranks start to start + size - 1."""

    start: int
    size: int  # a power of two that divides start
    value: Any


def tree_push(nodes: list[Node], node: Node, add: Callable) -> None:
    """Append `node` to the consecutive `nodes` on its left, and make the sums of the tree that this completes.

    add(left, right) returns the sum, and may change either in place.
    """
    # A node with an odd number is added to the one on its left, if this process has that one.
    while nodes and nodes[-1][:2] == (node.start - node.size, node.size) and node.start // node.size % 2 == 1:
        left = nodes.pop()
        node = Node(left.start, 2 * left.size, add(left.value, node.value))
    nodes.append(node)


def tree_total(nodes: list[Node], add: Callable) -> Any:
    """The root of the tree, from nodes that cover all logical ranks."""
    total = nodes[-1].value
    for node in reversed(nodes[:-1]):
        total = add(node.value, total)
    return total


def partial_sums(logical_ranks: range) -> list[Node]:
    """The nodes, without values, that a process with these logical ranks sends."""
    nodes = []
    for logical_rank in logical_ranks:
        tree_push(nodes, Node(logical_rank, 1, None), lambda left, right: None)
    return nodes


class TreeSum:
    """Adds up tensors over all virtual processes, on every real process. Collective.

    It has its own process group and thread, so communication overlaps with the backward pass.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.world_size = accelerator.num_processes
        self.logical_ranks = own_logical_ranks(accelerator)
        self.buffers = {}
        if self.world_size == 1:
            return
        self.nodes_of_ranks = [partial_sums(own_logical_ranks(accelerator, rank)) for rank in range(self.world_size)]
        handler = accelerator.init_handler
        self.group = dist.new_group(timeout=handler.timeout if handler else None)
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="tree_sum")
        if accelerator.device.type == "cuda":
            self.stream = torch.cuda.Stream()

    def total(self, nodes: list[Node]) -> torch.Tensor:
        """The sum over all logical ranks; `nodes` are this process's, flat tensors of one size. Collective."""
        if self.world_size == 1:
            return tree_total(nodes, torch.Tensor.add_)
        values = [node.value for node in nodes]
        return self._exchange(values, torch.empty_like(values[0]))

    def start(self, values: list[torch.Tensor], result: torch.Tensor) -> torch.futures.Future:
        """As `total`, in the background. Returns a Future of `result`, which receives the sum."""
        if result.is_cuda:
            self.stream.wait_stream(torch.cuda.current_stream())
            future = torch.futures.Future(devices=[result.device])
            with torch.cuda.stream(self.stream):
                for tensor in [*values, result]:
                    tensor.record_stream(self.stream)
                future.set_result(self._exchange(values, result))
            return future
        future = torch.futures.Future()

        def work():
            try:
                future.set_result(self._exchange(values, result))
            except BaseException as error:
                future.set_exception(error)

        self.thread.submit(work)
        return future

    def _exchange(self, values: list[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
        size = math.ceil(result.numel() / self.world_size)  # of each slice; the last one is padded
        is_even = size * self.world_size == result.numel()
        counts = [len(nodes) for nodes in self.nodes_of_ranks]
        sent = values[0]
        if len(values) > 1 or not is_even:
            # The slices in the order of the ranks that receive them.
            sent = self._buffer("sent", result, self.world_size * len(values) * size)
            for index, value in enumerate(values):
                for rank, part in enumerate(value.split(size)):
                    start = (rank * len(values) + index) * size
                    sent[start : start + len(part)] = part
        received = self._buffer("received", result, sum(counts) * size)
        dist.all_to_all_single(
            received,
            sent,
            output_split_sizes=[count * size for count in counts],
            input_split_sizes=[len(values) * size] * self.world_size,
            group=self.group,
        )
        nodes = []
        expected = [node for nodes_of_rank in self.nodes_of_ranks for node in nodes_of_rank]
        leaves = [node._replace(value=part) for node, part in zip(expected, received.split(size), strict=True)]
        for node in sorted(leaves, key=lambda node: node.start):
            tree_push(nodes, node, torch.Tensor.add_)
        total = tree_total(nodes, torch.Tensor.add_)
        if is_even:
            dist.all_gather_into_tensor(result, total, group=self.group)
            return result
        gathered = self._buffer("gathered", result, self.world_size * size)
        dist.all_gather_into_tensor(gathered, total, group=self.group)
        return result.copy_(gathered[: result.numel()])

    def _buffer(self, name: str, like: torch.Tensor, size: int) -> torch.Tensor:
        """Memory for `size` entries, reused in every step: allocating it takes as long as a copy."""
        key = (name, like.dtype, size)
        if key not in self.buffers:
            self.buffers[key] = like.new_zeros(size)
        return self.buffers[key]


class GradientSum:
    """Adds the gradients of one model in the order of the tree.

    After each micro-batch except the last one, the gradients are moved from the parameters to the tree. In the last one
    the sums are completed: with several processes in DDP's communication hook, bucket by bucket.
    """

    def __init__(self, model: nn.Module, tree: TreeSum):
        self.tree = tree
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._begin_step()
        self.collected_at = None  # accelerator.step
        is_wrapped = isinstance(model, DistributedDataParallel)
        # torchrun with one process: DDP does not reduce, and Accelerate has no no_sync.
        self.in_buckets = is_wrapped and tree.world_size == 1
        self.is_ddp = is_wrapped and tree.world_size > 1
        self.finds_unused = self.is_ddp and model.find_unused_parameters
        self.used = set()  # if finds_unused: the parameters that got a gradient in this backward pass
        if self.is_ddp:
            self.ddp = model
            model.register_comm_hook(None, self._sum_bucket)
            self.step_of_bucket = {}  # accelerator.step in which each bucket was summed last
        if self.finds_unused:
            for parameter in self.parameters:
                parameter.register_post_accumulate_grad_hook(self.used.add)

    def _begin_step(self) -> None:
        self.nodes = []  # of {parameter: gradient}; a missing gradient is zero
        self.next_rank = self.tree.logical_ranks[0]

    def prepare(self) -> None:
        """Call it before each backward pass."""
        if not self.finds_unused or not self.tree.accelerator.sync_gradients:
            return
        self.used.clear()
        # DDP ends the run if a parameter that had a gradient before has none in the last micro-batch. Adding to -0.0
        # does not change a bit.
        for parameter in {parameter for node in self.nodes for parameter in node.value}:
            if parameter.grad is None:
                parameter.grad = torch.full_like(parameter, -0.0)

    def collect(self) -> None:
        """Call it after each backward pass."""
        accelerator = self.tree.accelerator
        logical_rank = current_logical_rank(accelerator)
        is_last = accelerator.sync_gradients
        if is_last and self.is_ddp:
            if accelerator.step in self.step_of_bucket.values():  # this model's backward pass, not a different one's
                self._begin_step()
                # DDP would do this, a broadcast, in its next forward pass, and ranks with more micro-batches would
                # wait in it while others wait for their part of a different model's sum.
                self.ddp.reducer._rebuild_buckets()
            return
        gradients = {parameter: parameter.grad for parameter in self.parameters if parameter.grad is not None}
        again = self.collected_at == accelerator.step
        if not gradients or (again and is_last):
            return
        if again:
            refuse_second_backward()
        self.collected_at = accelerator.step
        self._skip_to(logical_rank)
        for parameter in gradients:
            parameter.grad = None
        if self.in_buckets:  # the next micro-batch overwrites them
            gradients = {parameter: gradient.clone() for parameter, gradient in gradients.items()}
        tree_push(self.nodes, Node(logical_rank, 1, gradients), add_gradients)
        self.next_rank = logical_rank + 1
        if is_last:
            for parameter, gradient in tree_total(self.nodes, add_gradients).items():
                parameter.grad = gradient
            self._begin_step()

    def _skip_to(self, logical_rank: int) -> None:
        """Push empty nodes for micro-batches in which the model got no gradient at all."""
        for skipped in range(self.next_rank, logical_rank):
            tree_push(self.nodes, Node(skipped, 1, {}), add_gradients)
        self.next_rank = logical_rank

    def _sum_bucket(self, _, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook: `bucket` holds the gradients of the last micro-batch."""
        if self.step_of_bucket.get(bucket.index()) == self.tree.accelerator.step:
            refuse_second_backward()
        self.step_of_bucket[bucket.index()] = self.tree.accelerator.step
        last = self.tree.logical_ranks[-1]
        self._skip_to(last)
        buffer = bucket.buffer()
        gradients = views_of(bucket, buffer)
        if self.finds_unused:
            for parameter in gradients.keys() - self.used:
                gradients[parameter].zero_()
        nodes = list(self.nodes)
        tree_push(nodes, Node(last, 1, gradients), add_into_bucket)
        values = []
        for node in nodes[:-1]:  # sums that do not include the last micro-batch
            values.append(torch.zeros_like(buffer))
            views = {key: view for key, view in views_of(bucket, values[-1]).items() if key in node.value}
            if views:  # copied, because adding to the zeros would change -0.0
                torch._foreach_copy_(list(views.values()), [node.value[parameter] for parameter in views])
        return self.tree.start([*values, buffer], buffer)


class ShardSum:
    """FSDP's reduce-scatter of one module's gradients, in the order of the tree.

    Each process receives one slice of the gradients of all: the next leaves. Sums stay sharded between micro-batches:
    up to log2(V) + 1 slices.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator, self.called_at = accelerator, None
        self._begin_step()

    def _begin_step(self) -> None:
        self.nodes, self.next_leaf = [], 0

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False) -> None:
        """Add this micro-batch; in the last one of a step, write this process's slice of the sum to `output_tensor`."""
        accelerator = self.accelerator
        if self.called_at == accelerator.step:
            refuse_second_backward()
        self.called_at = accelerator.step
        first = current_logical_rank(accelerator) - accelerator.process_index
        if first < self.next_leaf:  # the last step had no backward pass in its last micro-batch
            self._begin_step()
        for skipped in range(self.next_leaf, first):
            tree_push(self.nodes, Node(skipped, 1, torch.zeros_like(output_tensor)), torch.Tensor.add_)
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        for leaf, value in enumerate(received.split(len(output_tensor)), first):
            tree_push(self.nodes, Node(leaf, 1, value), torch.Tensor.add_)
        self.next_leaf = first + accelerator.num_processes
        if accelerator.sync_gradients:
            output_tensor.copy_(tree_total(self.nodes, torch.Tensor.add_))
            self._begin_step()
        else:  # sums that begin here lie in `received`, which would stay in memory whole
            self.nodes = [n if n.start < first else n._replace(value=n.value.clone()) for n in self.nodes]


class ShardedGradientSum:
    """As GradientSum, for a model sharded over several processes."""

    def __init__(self, model: nn.Module, tree: TreeSum):
        self.accelerator, self.collected_at = tree.accelerator, None
        self.sums, self.parameters, self.used = [], [], set()
        model.set_reduce_scatter_unused_params(True)  # as zeros: each process sends as much
        for module in [module for module in model.modules() if isinstance(module, FSDPModule)]:
            self.sums.append(ShardSum(self.accelerator))
            module.set_custom_reduce_scatter(self.sums[-1])
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            for group in module._get_fsdp_state()._fsdp_param_groups:
                self.parameters += [param for param in group.fsdp_params if param.sharded_param.requires_grad]
        self.unhooked = list(self.parameters)

    def prepare(self) -> None:
        """Call it before each backward pass."""
        for parameter in [p for p in self.unhooked if hasattr(p, "_unsharded_param")]:  # made in the first forward pass
            parameter.unsharded_param.register_post_accumulate_grad_hook(lambda _, p=parameter: self.used.add(p))
            self.unhooked.remove(parameter)

    def collect(self) -> None:
        """Call it after each backward pass."""
        accelerator = self.accelerator
        if not accelerator.sync_gradients:  # the sum is in `sums`
            for parameter in self.parameters:
                parameter.sharded_param.grad = None
        elif self.collected_at != accelerator.step and accelerator.step in [s.called_at for s in self.sums]:
            self.collected_at = accelerator.step
            self._forget_unused()
            self.used.clear()

    def _forget_unused(self) -> None:
        """Remove the gradients, zeros, of parameters that no process used in this step: AdamW must skip them."""
        unused = [number for number, parameter in enumerate(self.parameters) if parameter not in self.used]
        counts = torch.zeros(len(self.parameters), device=self.accelerator.device)
        for number in unused:
            counts[number] = 1
        counts = self.accelerator.reduce(counts, "sum")
        for number in unused:  # no waiting for the GPU if there are none
            if counts[number] == self.accelerator.num_processes:
                self.parameters[number].sharded_param.grad = None


def views_of(bucket: dist.GradBucket, buffer: torch.Tensor) -> dict:
    """{parameter: view into `buffer`}, which has the layout of the bucket's own buffer.

    The views of bucket.gradients() lack the strides of channels_last.
    """
    if bucket.parameters()[0].is_complex():  # the buffer holds real and imaginary parts
        buffer = torch.view_as_complex(buffer.view(-1, 2))
    views = {}
    for parameter, part in zip(bucket.parameters(), bucket.gradients(), strict=True):
        offset = part.storage_offset() - bucket.buffer().storage_offset()
        views[parameter] = buffer[offset:].as_strided(parameter.size(), parameter.stride())
    return views


def add_gradients(left: dict, right: dict) -> dict:
    """Add {parameter: gradient} `right` to `left`, in place."""
    if left and left.keys() == right.keys():
        torch._foreach_add_(list(left.values()), [right[parameter] for parameter in left])
        return left
    for parameter, gradient in right.items():
        if parameter in left:
            left[parameter].add_(gradient)
    for parameter in left.keys() ^ right.keys():
        # As in DDP's buckets, where the missing gradient is zeros: -0.0 becomes 0.0.
        left[parameter] = (left.get(parameter, right.get(parameter))).add_(0)
    return left


def add_into_bucket(left: dict, right: dict) -> dict:
    """Add the gradients in `left` to `right`, views of a bucket, in place."""
    common = [parameter for parameter in right if parameter in left]
    if common:
        torch._foreach_add_([right[parameter] for parameter in common], [left[parameter] for parameter in common])
    for parameter in right.keys() - left.keys():
        right[parameter].add_(0)
    return right


def refuse_second_backward():
    raise RuntimeError(
        "with --virtual_processes a model takes one backward pass per micro-batch: add its losses, "
        "and call accelerator.backward once"
    )


def sum_gradients_by_tree(
    accelerator: Accelerator, models: list[nn.Module], optimizers: Iterable[Optimizer] = ()
) -> TreeSum:
    """Make `accelerator.backward` leave the sum over all virtual processes in `.grad`. Collective."""
    check_dense(models)
    for optimizer in optimizers if accelerator.device.type == "cpu" else ():
        unfuse(optimizer)
    before = bits_of_buffers(models)
    tree = TreeSum(accelerator)
    sums = []
    for model in models:
        model = model._orig_mod if is_compiled_module(model) else model  # by dynamo_config
        if any(parameter.requires_grad for parameter in model.parameters()):
            is_sharded = tree.world_size > 1 and isinstance(model, FSDPModule)
            sums.append((ShardedGradientSum if is_sharded else GradientSum)(model, tree))
    accumulation = accelerator.gradient_accumulation_steps

    @contextlib.contextmanager
    def collect_gradients():
        # accelerator.backward would divide by the accumulation steps of this process.
        accelerator.gradient_accumulation_steps = 1
        for gradient_sum in sums:
            gradient_sum.prepare()
        try:
            yield
        finally:
            accelerator.gradient_accumulation_steps = accumulation
        if before:
            check_buffers(before, bits_of_buffers(models))
        if accelerator.sync_gradients:  # the first step is enough
            before.clear()
        for gradient_sum in sums:
            gradient_sum.collect()

    accelerator.around_backward.append(collect_gradients)
    return tree


def unfuse(optimizer: Optimizer) -> None:
    """Take torch's default step: on CPUs, a fused one rounds the last entries of a tensor, so of a shard, apart."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            group["fused"] = None


def check_dense(models: list[nn.Module]) -> None:
    """Stop if an embedding has sparse gradients, which DDP does not put into buckets."""
    for name, module in (pair for model in models for pair in model.named_modules()):
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            layer = name.removeprefix("module.")  # of DDP
            stop(
                f"--virtual_processes needs dense gradients, but {layer} has sparse ones: create it with sparse=False, "
                "or leave --virtual_processes out"
            )


def bits_of_buffers(models: list[nn.Module]) -> dict[tuple[nn.Module, str], int]:
    """`sum_of_bits` of each saved buffer by model and name, except those that `BatchNorms.averaged` changes."""
    averaged = [layer for model in models for layer in model.modules() if hasattr(layer, "is_averaged")]
    buffers = {buffer for model in models for buffer in model.buffers()}
    buffers -= {buffer for layer in averaged for buffer in layer.buffers()}
    saved = {(model, name): t for model in models for name, t in model.state_dict(keep_vars=True).items()}
    return {key: int(sum_of_bits(tensor)) for key, tensor in saved.items() if tensor in buffers}


def check_buffers(before: dict, after: dict) -> None:
    """Stop if a buffer has changed between two `bits_of_buffers`: each process would have a value of its own."""
    for (model, name), bits in after.items():
        if bits != before.get((model, name), bits):
            stop(
                f"the forward pass changes the buffer {name.removeprefix('module.')}, which --virtual_processes cannot "
                f"add up over processes: {AVERAGE_BUFFERS}; otherwise leave --virtual_processes out"
            )


def exact_sums(accelerator: Accelerator, columns: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """The weighted sum of values and the sum of their weights, of each pair, over all processes. Collective.

    Each sum is exact and rounded once, so the order does not matter.

    Args:
        columns: pairs of values and weights, (n,) each; as many pairs on every process.
    """
    rows = []
    for number, (values, weights) in enumerate(columns):
        pair = [column.cpu().to(torch.float64) for column in (values, weights)]
        rows.append(torch.stack([torch.full_like(pair[0], number), *pair], 1).to(accelerator.device))
    rows = gather_samples(accelerator, rows).cpu().numpy()
    sums = []
    for number in range(len(columns)):
        _, values, weights = rows[rows[:, 0] == number].T
        for terms in (values * weights, weights):
            sums.append(math.fsum(terms) if np.isfinite(terms).all() else math.nan)
    return sums


def total_norm(accelerator: Accelerator, parameters: list[nn.Parameter]) -> torch.Tensor:
    """The 2-norm of all gradients, the same bits whether and over how many processes they are sharded. Collective.

    Shards are whole rows: their sums of squares are added up over the columns first, then over all rows.
    """
    sums = [torch.zeros(1, device=accelerator.device)]  # if there are no gradients
    is_sharded = False
    for gradient in [parameter.grad for parameter in parameters if parameter.grad is not None]:
        rows = gradient.shape[0] if gradient.ndim else 1
        own = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        squares = own.abs().to(torch.promote_types(own.abs().dtype, torch.float32)).square()
        sums.append(squares.new_zeros(rows))
        start = 0
        if own is not gradient:  # cut as torch.chunk does
            is_sharded, start = True, accelerator.process_index * math.ceil(rows / accelerator.num_processes)
        own_rows = own.shape[0] if own.ndim else 1
        sums[-1][start : start + own_rows] = add_columns(squares.reshape(own_rows, math.prod(gradient.shape[1:])))
    sums = torch.cat(sums)
    if is_sharded:  # zeros and one number each, so the order does not matter
        sums = accelerator.reduce(sums, "sum")
    return add_columns(sums[None]).sqrt()[0]


def add_columns(terms: torch.Tensor) -> torch.Tensor:
    """The sum of each row of `terms` (rows, columns), which it overwrites: (rows,).

    Halves are added elementwise: in torch.sum, strides decide the order of additions, and on GPUs the shape.
    """
    while terms.shape[1] > 1:
        half = math.ceil(terms.shape[1] / 2)
        terms[:, : terms.shape[1] - half] += terms[:, half:]
        terms = terms[:, :half]
    return terms[:, 0]
