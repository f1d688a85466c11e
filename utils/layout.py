"""Who computes what: which micro-batches of a step belong to which process."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Layout:
    """Who computes what: the processes, the shards of a model on them, and the micro-batches of a step.

    Attributes:
        processes, rank: how many run, and which one this is.
        shards: processes over which FSDP shards a model: all of them, or with HSDP those of a replica; otherwise 1.
        accumulation: micro-batches per step on each process; without effect with virtual processes.
        virtual_processes: the value of --virtual_processes; 0: off.
        split_batch: each process gets a part of the batch; False if the processes share the model.
    """

    processes: int = 1
    rank: int = 0
    shards: int = 1
    accumulation: int = 1
    virtual_processes: int = 0
    split_batch: bool = True

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return self.processes // self.shards

    @property
    def num_slots(self) -> int:
        """Micro-batches of a step, over all processes."""
        return self.virtual_processes or self.processes * self.accumulation

    def slots(self, rank: int | None = None) -> range:
        """The micro-batches of a step that process `rank` computes; None: this one.

        Processes take turns: all of them, or with virtual processes those of a replica, which has consecutive ones.
        """
        stride = self.shards if self.virtual_processes else self.processes
        replica, shard = divmod(self.rank if rank is None else rank, stride)
        first, end = (number * self.num_slots * stride // self.processes for number in (replica, replica + 1))
        return range(first + shard, end, stride)
