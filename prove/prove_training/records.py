"""What a run is told to do, and what each of its processes records. `recording` writes it, and `stages` compares."""

from dataclasses import dataclass, field
from typing import Any

import torch

Values = dict[str, torch.Tensor]  # by the name of the parameter, as from tensors.sampled


@dataclass
class Plan:
    """What a run does; see `runs.Runs`."""

    limit: int  # items of the data
    processes: int = 1
    folder: str = ""  # of the script, where it runs
    output: str = ""
    lightning: list[str] = field(default_factory=list)  # its packages that the files beside the script import
    without_gpu: bool = False  # what is for a GPU stays on the CPU
    asked: int = 0  # the number of processes that is written in the script, and replaced
    makes_group: bool = False  # for one process, whose script makes none
    machines: bool = False  # each process has one of its own
    devices: int = 0  # of a machine; 0: as many as it has processes
    own_batch_size: bool = False  # the script's
    is_resumed: bool | None = None  # None: neither resumed nor compared with a run that is
    stop_after_save: bool = False
    clock: int = 1  # how many times as fast the clocks are
    whole_batches: bool = False  # each process has as many samples in a step as the reference
    own_gradients: bool = False  # DistributedDataParallel does not average them
    seeds_own: bool = False  # generators that the items have themselves are seeded, too
    same_share: bool = False  # each process reads the samples of rank 0
    shorter: list[str] = field(default_factory=list)  # loaders of tests that end early
    # Recorded in the reference run and repeated in this one:
    orders: dict[str, list] | None = None  # by loader: the indices of each pass
    weights: dict[int, str] | None = None  # by the number of steps before: a file
    places: list[str] = field(default_factory=list)  # of its loaders
    lengths: set[int] = field(default_factory=set)  # of its data before they were cut
    sizes: set[int] = field(default_factory=set)  # of its batches
    tests: dict[str, int] = field(default_factory=dict)  # by loader that only tests: the size of its batches
    # Of the processes:
    address: dict[str, str] = field(default_factory=dict)
    time_is_over: int = -1  # a pipe


@dataclass
class Loader:
    line: str
    given: int | None = None  # the script's batch size; None: it makes the batches itself
    length: int | None = None  # of the data, before they are cut
    items: int | None = None  # after that
    is_part: bool = False  # the script divides its data by hand
    sampler: str = ""  # the name of its class
    drop_last: bool = False
    shuffles: bool = False
    is_iterable: bool = False


@dataclass
class Pass:
    """A pass over the data of a loader."""

    key: str  # of the loader
    number: int | None = None  # of the passes in training
    in_training: bool = False
    batches: int = 0
    length: int | None = None
    random: str = ""  # digest of the random state at its beginning
    epoch: int | None = None  # of a DistributedSampler
    read: list = field(default_factory=list)  # digests of each batch
    used: list["Part"] = field(default_factory=list)
    is_whole: bool = False  # it was read to its end


@dataclass
class Part:
    """Samples of a micro-batch, from one pass of a loader."""

    key: str | None
    number: int | None  # of the pass
    digests: list[str] | None


@dataclass
class MicroBatch:
    """A backward pass."""

    samples: list[Part] = field(default_factory=list)
    losses: list[tuple[float, int, str]] = field(default_factory=list)  # coefficient, number of losses, line
    syncs: bool | None = None  # DistributedDataParallel averages after it
    draws: bool = False  # the loop has drawn random numbers before it
    line: str = ""
    scales: bool = False  # the line multiplies or divides


@dataclass
class Draw:
    """Random numbers that the script draws."""

    line: str
    name: str
    state: str  # digest of the generator's state before
    rows: int
    is_per_sample: bool  # it has a row for each sample of a batch
    in_model: bool = False
    is_repeated: bool = False  # each row is replaced by numbers of its sample, the same in every run


@dataclass
class Step:
    """An optimizer.step()."""

    line: str = ""
    micro_batches: list[MicroBatch] = field(default_factory=list)
    before: Values = field(default_factory=dict)  # weights
    state_before: Values = field(default_factory=dict)
    own: Values = field(default_factory=dict)  # gradients before a collective call, without DistributedDataParallel
    gradients: Values = field(default_factory=dict)  # before clipping
    at_step: Values = field(default_factory=dict)  # gradients that the optimizer gets
    weights: Values = field(default_factory=dict)  # after the step
    statistics: Values = field(default_factory=dict)  # of BatchNorm
    buffers: dict[str, str] = field(default_factory=dict)  # digests of the others
    rates: list[float] = field(default_factory=list)  # by group
    bases: list[float] = field(default_factory=list)  # initial_lr
    options: list[str] = field(default_factory=list)
    schedule_calls: int = 0
    modes: dict[int, bool] = field(default_factory=dict)  # by model: whether it trains
    clips: list[tuple[int, str]] = field(default_factory=list)  # micro-batches before it, line
    clips_nothing: str = ""  # line of a call without parameters
    zeroed: list[tuple[int, str]] = field(default_factory=list)
    scaler: list[str] = field(default_factory=list)  # calls, in order
    collectives: list[tuple[str, str]] = field(default_factory=list)  # name, line
    gathers: list[tuple[str, str]] = field(default_factory=list)  # those in the loss
    drawn: list[Draw] = field(default_factory=list)
    holds: bool = False  # the previous step's gradients have not been zeroed
    in_step: bool = False  # the optimizer itself makes collective calls
    is_pending: bool = False  # FSDP has gradients that are not reduced
    syncs: bool | None = None  # in the next backward pass


@dataclass
class Evaluation:
    after: int  # steps
    line: str
    samples: dict[str, list[str]] = field(default_factory=dict)  # by loader
    inputs: list[str] = field(default_factory=list)  # of a script without loaders: digests of their rows
    collectives: list[tuple[str, str]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    draws: bool = False
    result: dict[str, float] = field(default_factory=dict)  # passed to Run
    in_training: str = ""  # the line of a call in training mode
    models: dict[int, float] = field(default_factory=dict)  # the sum of their weights


@dataclass
class Save:
    kind: str  # torch.save or save_state
    after: int  # steps
    path: str
    line: str
    prefix: str = ""  # of the names
    has: set[str] = field(default_factory=set)  # model, optimizer, schedule
    counters: list[str] = field(default_factory=list)
    lacks_schedule: bool = False
    is_rounded: bool = False  # to 16 bits


@dataclass
class Facts:
    """What the script uses. A line is where it does."""

    is_complete: bool = False
    refuses: bool = False  # this number of processes
    cannot_tell: str = ""
    asks: bool = False  # whether there is an accelerator
    framework: str = ""
    accelerate: str = ""  # a line, as the next ones
    group: str = ""
    asked: int = 0  # for processes, where the plan has another number
    starts: str = ""
    local_sgd: str = ""
    averages_weights: str = ""
    join: str = ""
    sharded: str = ""
    mesh: int = 0  # processes for a mesh of several dimensions, such as HSDP's
    data_parallel: str = ""
    waiting: int = 0  # backward passes after the last step
    layers: list[str] = field(default_factory=list)  # lines
    ddp: list[str] = field(default_factory=list)
    around_ddp: list[str] = field(default_factory=list)
    optimizers: list[str] = field(default_factory=list)
    schedules: int = 0
    has_state: bool = False
    has_saved: bool = False
    has_loaded: bool = False  # a file that may be a checkpoint
    loads_nothing: str = ""  # a line where a model takes no entry of what it is given
    lost: str = ""  # the first of these entries
    strips_prefix: bool = False  # the script has "module." in a string
    loads: bool = False  # the state of something: it may resume
    taken: set[tuple[str, int]] = field(default_factory=set)  # ("schedule", 4): its state_dict was taken after 4 steps
    untrained: list[str] = field(default_factory=list)  # parameters
    loaders: dict[str, Loader] = field(default_factory=dict)
    lengths: set[int] = field(default_factory=set)
    draws_items: bool = False
    draws_others: bool = False  # an item has random numbers of NumPy or Python
    worker_seeds: dict[str, str] = field(default_factory=dict)  # by line of a loader: what all its workers draw
    ignores_index: bool = False  # an item is made of random numbers alone
    draws_by_itself: bool = False  # an item has random numbers of a generator that nobody can seed
    switched_off: set[str] = field(default_factory=set)
    # Of a script with GlobalLoader and Run:
    other_version: str = ""  # of what it tells about itself
    run: str = ""  # a line
    is_exact: bool = False
    is_finished: bool = False
    virtual_processes: int = 0


@dataclass
class Record:
    """What one process leaves."""

    rank: int
    facts: Facts = field(default_factory=Facts)
    steps: list[Step] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    orders: dict[str, list] = field(default_factory=dict)
    plateaus: list[tuple[float, str]] = field(default_factory=list)
    initial: Values = field(default_factory=dict)
    final: Values = field(default_factory=dict)
    weights: dict[int, str] = field(default_factory=dict)  # files, by the number of steps before them
    error: str | None = None
    waits: str | None = None  # where it stood when time ran out
    doing: str = ""  # where it failed
    unused: list[str] = field(default_factory=list)  # parameters that DistributedDataParallel waits for
    printed: str = ""  # the last line


@dataclass
class Batch:
    """What a loader has given, before a backward pass uses it."""

    source: Pass | None
    digests: list[str] | None
    places: list[range] = field(default_factory=list)
    content: Any = None  # kept, so that its memory is not used again
    number: int = 0
    is_tested: bool = False
    draws: dict[str, int] = field(default_factory=dict)  # their numbers, by the state of the generator before
