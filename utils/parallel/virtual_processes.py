"""The results of V processes, bit for bit, on any number of processes from 1 to V.

A floating-point sum depends on the order of its terms, so P processes usually train a different model than one, at
first by rounding. With virtual processes, a step is always split into V micro-batches, and their gradients are added in
the order of one binary tree, whichever process computed them. For V = 8:

    ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))

Each process computes consecutive micro-batches and makes the sums of the tree that contain only these: 2 processes one
sum each, 3 processes two. In the last micro-batch, each process receives one slice of all sums (all-to-all),
completes the tree on its slice and sends the result to all (all-gather), both during the backward pass. If P divides V
and both are powers of two, this is the traffic of a ring all-reduce; otherwise a process sends up to 2 log2(V) sums. A
small model's sums go to all processes at once (all-gather), and each completes the whole tree.

Under FSDP, each process computes every P-th micro-batch, and receives its slice of each one's gradients, which is as
much traffic as the reduce-scatter of FSDP. The sums of the tree stay sharded. Under HSDP, each replica does so with
consecutive micro-batches, and the replicas complete the tree as the processes of DDP do.

Source: EasyScale, M. Li et al., SC 2023, https://arxiv.org/abs/2208.14228, which trains with a fixed number of logical
workers; the tree makes it irrelevant which process computes them.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, is_compiled_module
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ..console import plural, stop
from ..launched import data_parallel_gpus
from ..metrics import sum_rows_pairwise
from .shards import is_sharded, local_rows

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # before torch 2.14
BUCKET = 2**21  # gradients that are exchanged at a time
SMALL = 2**20  # numbers up to which it takes less time to receive all sums than to wait for a second collective
LAG = 3  # buckets that begin to travel before the sum of the first one is needed: it may still be on its way
# Optimizers that compute each number by itself.
ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD")


def use_virtual_processes(accelerator: Accelerator) -> None:
    """Compute the micro-batches of the layout's virtual processes, which loaders and metrics already do."""
    number, world_size = accelerator.layout.virtual_processes, accelerator.num_processes
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
        check_fsdp(accelerator)
    accelerator.gradient_accumulation_steps = len(accelerator.layout.slots())


def check_fsdp(accelerator: Accelerator) -> None:
    """Stop if FSDP cannot make the virtual processes; in mixed precision, have it add in float32."""
    number = accelerator.layout.virtual_processes
    if number % accelerator.num_processes:
        stop(
            f"--virtual_processes {number} is not divisible by the {accelerator.num_processes} processes of this run, "
            "and FSDP needs as many micro-batches on each: choose a multiple, or start fewer processes"
        )
    if accelerator.whole_gradients:
        stop("--virtual_processes reduces the gradients of each micro-batch: leave --whole_gradients out")
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        stop(f"--virtual_processes with FSDP needs torch 2.13 or newer, and this is {torch.__version__}")
    plugin = accelerator.state.fsdp_plugin
    if plugin.mixed_precision_policy:
        plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, reduce_dtype=torch.float32)


def current_slot(accelerator: Accelerator) -> int:
    """The virtual process of the micro-batch in the current `accelerator.accumulate`."""
    slots = accelerator.layout.slots()
    return slots[(accelerator.step - 1) % len(slots)]


class Node(NamedTuple):
    """A sum of the tree, over the virtual processes start to start + size - 1."""

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
    """The root of the tree, from nodes that cover all virtual processes."""
    total = nodes[-1].value
    for node in reversed(nodes[:-1]):
        total = add(node.value, total)
    return total


def partial_sums(slots: Iterable[int]) -> list[Node]:
    """The nodes, without values, that are made of these virtual processes."""
    nodes = []
    for slot in slots:
        tree_push(nodes, Node(slot, 1, None), lambda left, right: None)
    return nodes


class TreeSum:
    """Adds up tensors over all virtual processes, on every process of a group. Collective.

    Args:
        slots: the virtual processes that each process of the group computes.
        group: None: all processes.
    """

    def __init__(self, slots: list[Iterable[int]], group: dist.ProcessGroup | None = None):
        self.world_size, self.group = len(slots), group
        self.nodes_of_ranks = [*map(partial_sums, slots)]

    def total(self, nodes: list[Node]) -> torch.Tensor:
        """The sum over all virtual processes; `nodes` are this process's, flat tensors of one size. Collective."""
        if self.world_size == 1:
            return tree_total(nodes, torch.Tensor.add_)
        *_, total = self.stages(nodes)
        return total

    def stages(self, nodes: list[Node]) -> Iterator[torch.Tensor | None]:
        """Yield None after beginning to send the nodes, and after beginning to send sums; then yield the total."""
        values, length = [node.value for node in nodes], len(nodes[0].value)
        counts = [*map(len, self.nodes_of_ranks)]
        if min(counts) == max(counts) and sum(counts) * length <= SMALL:
            received = values[0].new_empty(sum(counts) * length)
            work = all_gather_single(received, torch.cat(values), group=self.group, async_op=True)
            yield
            work.wait()
            yield self._complete(received.split(length))
            return
        size = math.ceil(length / self.world_size)  # of each slice; the last one is padded
        if length != self.world_size * size:
            values = [nn.functional.pad(value, (0, self.world_size * size - length)) for value in values]
        sent = values[0]
        if len(values) > 1:  # the slices in the order of the ranks that receive them
            sent = torch.stack([value.view(self.world_size, size) for value in values], dim=1).flatten()
        received = sent.new_empty(sum(counts) * size)
        splits = [count * size for count in counts], [len(values) * size] * self.world_size  # received, sent
        work = dist.all_to_all_single(received, sent, *splits, group=self.group, async_op=True)
        del nodes, values, sent  # free their memory
        yield
        work.wait()
        total = received.new_empty(self.world_size * size)
        work = all_gather_single(total, self._complete(received.split(size)), group=self.group, async_op=True)
        del received
        yield
        work.wait()
        yield total[:length]

    def _complete(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        """The root of the tree, from the values of all processes' nodes, by rank; it overwrites them."""
        sums, parts = [], iter(parts)
        leaves = [node._replace(value=next(parts)) for nodes in self.nodes_of_ranks for node in nodes]
        for node in sorted(leaves):  # no two have the same start
            tree_push(sums, node, torch.Tensor.add_)
        return tree_total(sums, torch.Tensor.add_)


def tree_over_all(accelerator: Accelerator) -> TreeSum:
    """The TreeSum over all processes."""
    return TreeSum([*map(accelerator.layout.slots, range(accelerator.num_processes))])


class GradientSum:
    """Adds the gradients of one model in the order of the tree.

    After each micro-batch but the last, the gradients are moved from the parameters to the tree. In the last backward
    pass, the exchange of a bucket begins when its gradients are there. DDP does not all-reduce.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator):
        self.accelerator, self.collected_at = accelerator, None
        self.versions, self.waiting = {}, None  # of gradients before a backward pass; parameters without one in it
        self.tree = tree_over_all(accelerator)
        # DDP would not average a parameter that is trained later either.
        self.parameters = [p for p in model.parameters() if p.requires_grad or self.tree.world_size == 1]
        self.buckets = buckets(self.parameters[::-1])  # the gradients of the last layers come first
        for parameter in self.parameters if self.tree.world_size > 1 else ():
            parameter.register_post_accumulate_grad_hook(self._arrived)
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = False
        self._begin_step()

    def _begin_step(self) -> None:
        self.nodes = []  # of {parameter: gradient}; a missing gradient is zero
        self.next_slot = self.accelerator.layout.slots()[0]
        self.exchanges = []  # generators, one per bucket in their order

    def prepare(self) -> None:
        """Call it before each backward pass."""
        self.versions = {p: p.grad._version for p in self.parameters if p.grad is not None}
        self.waiting = set(self.parameters)

    def _arrived(self, parameter: nn.Parameter) -> None:
        if self.waiting is None or not self.accelerator.sync_gradients:
            return
        if parameter not in self.waiting:
            raise RuntimeError("a parameter gets its gradient in two parts: use checkpoint(..., use_reentrant=False)")
        self.waiting.remove(parameter)
        for bucket in self.buckets[len(self.exchanges) :]:  # in the same order on all processes
            if not self.waiting.isdisjoint(reversed(bucket)):  # the last one to come first
                break
            self._begin(bucket, self._take(bucket))

    def collect(self) -> None:
        """Call it after each backward pass. Collective in the last micro-batch of a step."""
        self.waiting = None
        gradients = self._take(self.parameters)
        if not gradients and not self.exchanges:  # a different model's backward pass
            return
        self.collected_at = self.accelerator.step
        if not self.accelerator.sync_gradients:
            self._push(self.nodes, gradients)
            self.next_slot = current_slot(self.accelerator) + 1
            return
        for bucket in self.buckets[len(self.exchanges) :]:
            self._begin(bucket, {p: gradients.pop(p) for p in bucket if p in gradients})
        for exchange in self.exchanges[-LAG:] + self.exchanges:
            next(exchange, None)
        self._begin_step()

    def _take(self, parameters: list[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
        """Take the gradients of this backward pass from the parameters."""
        gradients = {p: p.grad for p in parameters if p.grad is not None and p.grad._version != self.versions.get(p)}
        if gradients and self.collected_at == self.accelerator.step:
            refuse_second_backward()
        refuse_old_gradients(not self.versions.keys().isdisjoint(gradients))
        for parameter in gradients:
            parameter.grad = None
        return gradients

    def _push(self, nodes: list[Node], gradients: dict) -> None:
        """Add this micro-batch, after those before it that had no backward pass."""
        last = current_slot(self.accelerator)
        for skipped in range(self.next_slot, last):
            tree_push(nodes, Node(skipped, 1, {}), add_gradients)
        tree_push(nodes, Node(last, 1, gradients), add_gradients)

    def _begin(self, bucket: list[nn.Parameter], gradients: dict) -> None:
        """Begin to send the gradients of a bucket, and the sums of the bucket LAG before it. Collective."""
        self.exchanges.append(self._exchange(bucket, gradients))
        for exchange in self.exchanges[::-LAG][:2]:
            next(exchange, None)

    def _exchange(self, bucket: list[nn.Parameter], gradients: dict) -> Iterator:
        """Leave the sum of the gradients of a bucket in `.grad`, after the stages of TreeSum."""
        nodes = [node._replace(value={p: node.value.pop(p) for p in bucket if p in node.value}) for node in self.nodes]
        self._push(nodes, gradients)
        if self.tree.world_size == 1:
            total = tree_total(nodes, add_gradients)
        else:
            used = {parameter for node in nodes for parameter in node.value}
            stages = self.tree.stages([n._replace(value=flat(n.value, bucket, self.tree.world_size)) for n in nodes])
            del nodes, gradients  # free their memory
            for values in stages:
                if values is None:  # until something has arrived
                    yield
            parts = zip(views(values, bucket).items(), values[-len(bucket) :], strict=True)
            # Without those that no process has used: AdamW must skip them.
            total = {parameter: part for (parameter, part), count in parts if parameter in used or count}
        for parameter, gradient in total.items():
            parameter.grad = gradient


def buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Lists of parameters of one dtype, of about BUCKET entries each."""
    found = []
    for parameter in sorted(parameters, key=lambda parameter: str(parameter.dtype)):
        if not found or found[-1][0].dtype != parameter.dtype or sum(p.numel() for p in found[-1]) >= BUCKET:
            found.append([])
        found[-1].append(parameter)
    return found


def flat(gradients: dict, bucket: list[nn.Parameter], world_size: int) -> torch.Tensor:
    """The gradients of a bucket in one vector; at its end, for each parameter, whether it has one."""
    size = sum(parameter.numel() + 1 for parameter in bucket)
    values = bucket[0].new_empty(math.ceil(size / world_size) * world_size)
    zero = values.new_zeros(())
    for number, (parameter, view) in enumerate(views(values, bucket).items()):
        values[number - len(bucket)] = parameter in gradients
        view.copy_(gradients.get(parameter, zero))
    return values


def views(values: torch.Tensor, bucket: list[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
    """The gradients in a vector as from `flat`, with the strides of the parameters: fused steps need these."""
    sizes = [parameter.numel() for parameter in bucket]
    parts = zip(bucket, values[: sum(sizes)].split(sizes), strict=True)
    return {parameter: part.as_strided(parameter.size(), parameter.stride()) for parameter, part in parts}


class ShardSum:
    """FSDP's reduce-scatter of one module's gradients, in the order of the tree; with HSDP, its all-reduce as well.

    Each process receives one slice of the gradients of its replica's processes: the next leaves. Sums stay sharded
    between micro-batches: up to log2(V) + 1 slices. In a step's last micro-batch, it calls on_last() before it sends.
    """

    def __init__(self, accelerator: Accelerator, on_last: Callable = lambda: None):
        self.accelerator, self.on_last, self.called_at, shards = accelerator, on_last, None, accelerator.layout.shards
        firsts = [*map(accelerator.layout.slots, range(0, accelerator.num_processes, shards))]
        self.leaves = firsts[accelerator.process_index // shards]  # the first one of each micro-batch
        all_leaves = [[leaf for first in replica for leaf in range(first, first + shards)] for replica in firsts]
        self.tree = TreeSum(all_leaves, accelerator.mesh.get_group("replicas") if len(firsts) > 1 else None)
        self._begin_step()

    def _begin_step(self) -> None:
        self.nodes, self.micro_batches = [], 0

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False) -> None:
        """Add this micro-batch; in the last one of a step, write this process's slice of the sum to `output_tensor`."""
        accelerator = self.accelerator
        if self.called_at == accelerator.step:
            refuse_second_backward()
        self.called_at = accelerator.step
        micro_batch = (accelerator.step - 1) % len(self.leaves)
        if micro_batch < self.micro_batches:  # the last step had no backward pass in its last micro-batch
            self._begin_step()
        for skipped in self.leaves[self.micro_batches : micro_batch]:
            for leaf in range(skipped, skipped + accelerator.layout.shards):
                tree_push(self.nodes, Node(leaf, 1, torch.zeros_like(output_tensor)), torch.Tensor.add_)
        if accelerator.sync_gradients:
            self.on_last()
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        first, self.micro_batches = self.leaves[micro_batch], micro_batch + 1
        for leaf, value in enumerate(received.split(len(output_tensor)), first):
            tree_push(self.nodes, Node(leaf, 1, value), torch.Tensor.add_)
        if accelerator.sync_gradients:
            output_tensor.copy_(self.tree.total(self.nodes))
            self._begin_step()
        else:  # sums that begin here lie in `received`, which would stay in memory whole
            self.nodes = [n if n.start < first else n._replace(value=n.value.clone()) for n in self.nodes]


class ShardedGradientSum:
    """As GradientSum, for a model sharded over several processes."""

    def __init__(self, model: nn.Module, accelerator: Accelerator):
        self.accelerator, self.collected_at = accelerator, None
        self.sums, self.parameters, self.used, self.counting = [], [], set(), None
        model.set_reduce_scatter_unused_params(True)  # as zeros: each process sends as much
        for module in [module for module in model.modules() if isinstance(module, FSDPModule)]:
            self.sums.append(ShardSum(accelerator, self._begin_count))
            module.set_custom_reduce_scatter(self.sums[-1])
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            for group in module._get_fsdp_state()._fsdp_param_groups:
                self.parameters += group.fsdp_params  # also the frozen ones: they may be trained later
        self.unhooked = list(self.parameters)

    def prepare(self) -> None:
        """Call it before each backward pass."""
        self.versions = self._versions()
        for p in [p for p in self.unhooked if hasattr(p, "_unsharded_param") and p.unsharded_param.requires_grad]:
            p.unsharded_param.register_post_accumulate_grad_hook(lambda _, p=p: self.used.add(p))
            self.unhooked.remove(p)

    def _begin_count(self) -> None:
        """If all units have their gradients: begin to count the processes that have not used a parameter."""
        if all(each.called_at == self.accelerator.step for each in self.sums):
            self.counting = self._count_unused()

    def collect(self) -> None:
        """Call it after each backward pass."""
        versions = self._versions()
        refuse_old_gradients(any(versions.get(p, version) != version for p, version in self.versions.items()))
        if not self.accelerator.sync_gradients:  # the sum is in `sums`
            for parameter in self.parameters:
                parameter.sharded_param.grad = None
        elif self.collected_at != self.accelerator.step and self.accelerator.step in [s.called_at for s in self.sums]:
            self.collected_at = self.accelerator.step
            self._forget_unused()

    @torch.no_grad()  # with gradients, to_local takes 20 us
    def _versions(self) -> dict:
        gradients = {p: p.sharded_param.grad for p in self.parameters if p.sharded_param.grad is not None}
        return {p: gradient.to_local()._version for p, gradient in gradients.items()}

    def _count_unused(self) -> tuple[dist.Work, torch.Tensor, list[int]]:
        unused = [number for number, parameter in enumerate(self.parameters) if parameter not in self.used]
        counts = torch.zeros(len(self.parameters), device=self.accelerator.device)
        for number in unused:
            counts[number] = 1
        return dist.all_reduce(counts, async_op=True), counts, unused

    def _forget_unused(self) -> None:
        """Remove the gradients, zeros, of parameters that no process used in this step: AdamW must skip them."""
        work, counts, unused = self.counting or self._count_unused()  # a frozen unit is not called
        work.wait()
        for number in unused:  # no waiting for the GPU if there are none
            if counts[number] == self.accelerator.num_processes:
                self.parameters[number].sharded_param.grad = None
        self.used, self.counting = set(), None


def add_gradients(left: dict, right: dict) -> dict:
    """Add {parameter: gradient} `right` to `left`, in place."""
    both = [parameter for parameter in left if parameter in right]
    if both:  # torch refuses empty lists
        torch._foreach_add_([left[parameter] for parameter in both], [right[parameter] for parameter in both])
    for parameter in left.keys() ^ right.keys():
        # As in `flat`, where the missing gradient is zeros: -0.0 becomes 0.0.
        left[parameter] = (left.get(parameter, right.get(parameter))).add_(0)
    return left


def refuse_second_backward():
    raise RuntimeError(
        "with --virtual_processes a model takes one forward and one backward pass per micro-batch: give it all inputs "
        "in one forward pass, add the losses, and call accelerator.backward once"
    )


def refuse_old_gradients(has_some: bool) -> None:
    """Stop if a backward pass has added to gradients from before it, which would count once per process."""
    if has_some:
        stop(
            "a backward pass adds to gradients of the last step, which --virtual_processes cannot: call zero_grad "
            "after each optimizer.step()"
        )


def sum_gradients_by_tree(
    accelerator: Accelerator, models: list[nn.Module], optimizers: Iterable[Optimizer] = ()
) -> None:
    """Make `accelerator.backward` leave the sum over all virtual processes in `.grad`. Collective."""
    for optimizer in optimizers:
        if accelerator.layout.shards > 1 and type(optimizer).__name__ not in ELEMENTWISE:
            stop(
                f"--virtual_processes with FSDP works with {', '.join(ELEMENTWISE)}: {type(optimizer).__name__} may "
                "add up over a whole tensor, in an order that depends on its shards; use one of these, or DDP"
            )
        if accelerator.device.type == "cpu":
            unfuse(optimizer)
    accelerator.gradient_sums = []
    for model in models:
        model = model._orig_mod if is_compiled_module(model) else model  # by dynamo_config
        if any(parameter.requires_grad for parameter in model.parameters()):
            is_sharded = accelerator.num_processes > 1 and isinstance(model, FSDPModule)
            accelerator.gradient_sums.append((ShardedGradientSum if is_sharded else GradientSum)(model, accelerator))


def unfuse(optimizer: Optimizer) -> None:
    """Use torch's default step: on CPUs, a fused one rounds the last entries of each tensor or shard differently."""
    for group in optimizer.param_groups:
        if group.get("fused"):
            # Over lists, the same bits take two thirds of the time for shards, but more for large whole tensors.
            group.update(fused=None, foreach=any(map(is_sharded, group["params"])) or None)


def total_norm(accelerator: Accelerator, parameters: list[nn.Parameter]) -> torch.Tensor:
    """The 2-norm of all gradients, the same bits whether and over how many processes they are sharded. Collective.

    Shards are whole rows: their sums of squares are added up over the columns first, then over all rows.
    """
    sums = [torch.zeros(1, device=accelerator.device)]  # if there are no gradients
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    for gradient in gradients:
        own, first = local_rows(gradient)
        squares = own.abs().to(torch.promote_types(own.abs().dtype, torch.float32)).square()
        squares = squares.reshape(own.shape[0] if own.ndim else 1, math.prod(gradient.shape[1:]))
        sums.append(squares.new_zeros(gradient.shape[0] if gradient.ndim else 1))
        sums[-1][first : first + len(squares)] = sum_rows_pairwise(squares)
    sums = torch.cat(sums)
    if any(map(is_sharded, gradients)):  # zeros and one number each, so the order does not matter
        dist.all_reduce(sums, group=accelerator.mesh.get_group("shards"))
    return sum_rows_pairwise(sums[None]).sqrt()[0]
