"""torch.distributed between threads of one process, with a rank each: a few of its functions.

What is written by hand with these can be tested so on any number of ranks, in milliseconds.
"""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch
import torch.distributed as dist

TIMEOUT_S = 20  # for a message that never comes


class Threads:
    """messages: (sender, receiver) of each. rounds: by rank, how many messages one after another
    its result has waited for."""

    def __init__(self, monkeypatch):
        self.here, self.changed = threading.local(), threading.Condition()
        self.waiting, self.messages, self.rounds = [], [], []
        for name in ("send", "isend", "recv", "all_reduce", "broadcast"):
            monkeypatch.setattr(dist, name, getattr(self, name))
        monkeypatch.setattr(dist, "get_rank", lambda: self.here.rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: len(self.rounds))

    def run(self, n, function) -> list:
        """What `function(rank)` returns, for each rank."""
        self.rounds, self.tensors = [0] * n, [None] * n
        self.barrier = threading.Barrier(n, timeout=TIMEOUT_S)

        def start(rank):
            self.here.rank = rank
            return function(rank)

        with ThreadPoolExecutor(n) as pool:
            return list(pool.map(start, range(n)))

    def send(self, tensor, dst, group=None, tag=0):
        rank = self.here.rank
        with self.changed:
            self.messages.append((rank, dst))
            self.waiting.append((rank, dst, tag, tensor.clone(), self.rounds[rank]))
            self.changed.notify_all()

    def isend(self, tensor, dst):
        self.send(tensor, dst)
        return SimpleNamespace(wait=lambda: None)

    def recv(self, tensor, src=None, group=None, tag=0):
        rank = self.here.rank

        def find():
            for message in self.waiting:
                if message[1:3] == (rank, tag) and src in (None, message[0]):
                    return message
            return None

        with self.changed:
            assert self.changed.wait_for(find, TIMEOUT_S), f"nothing comes to rank {rank}"
            message = find()
            self.waiting = [each for each in self.waiting if each is not message]
            self.rounds[rank] = 1 + max(self.rounds[rank], message[-1])
        tensor.copy_(message[3])
        return message[0]

    def exchange(self, value) -> list:
        """The value of each rank, tensors as copies. A collective."""
        self.tensors[self.here.rank] = value.clone() if torch.is_tensor(value) else value
        self.barrier.wait()
        tensors = list(self.tensors)
        self.barrier.wait()
        return tensors

    def all_reduce(self, tensor, op=dist.ReduceOp.SUM, group=None):
        assert op == dist.ReduceOp.SUM
        tensor.copy_(sum(self.exchange(tensor)))

    def broadcast(self, tensor, src):
        tensor.copy_(self.exchange(tensor)[src])
