"""Scripts that train with GlobalLoader and Run of the scripts in https://github.com/OWNER/accelerate-scripts.

They promise more than a DataLoader can: the fact `is_exact`. Batches, their unequal parts and learning rates need no
allowance, and Run says by itself what the test results are, when it saves, and how it resumes.

What is known of them comes from one module beside their accelerator's, `observed`, whose VERSION must be that below:
its functions, and the classes GlobalLoader (its constructor and `epoch`), Run (`start`, `log_test`, `finish`),
Checkpoints (`save`, `wait`) and Batch (`data`). A script of another version is judged as any other.
"""

import contextlib
import importlib
import os
from types import ModuleType

from ..tensors import rows
from .data import PASSES, Batches
from .files import saved
from .same_work import Tagged
from .where import before, wrap

VERSION = 1


def install(recording) -> None:
    with contextlib.suppress(ImportError):
        import accelerate

        watched = set()

        @wrap(accelerate.Accelerator, "__init__")
        def init(original, self, *args, **kwargs):
            """The first object that such a script makes tells where its modules are."""
            kind = type(self)
            if kind.__name__ == "TrainingAccelerator" and kind not in watched:
                watched.add(kind)
                watch(kind, recording)
            original(self, *args, **kwargs)


def watch(accelerator: type, recording) -> None:
    watch_accelerator(accelerator, recording)
    package = accelerator.__module__.rpartition(".")[0]
    try:
        observed = importlib.import_module(f"{package}.observed")
        version = observed.VERSION
    except (ImportError, AttributeError):  # an older copy, or another class of this name
        version = "none"
    if version != VERSION:
        recording.facts.other_version = f"{package}.observed has version {version} instead of {VERSION}"
        return
    recording.where.library = os.path.join(os.path.dirname(observed.__file__), "")
    observed.let_processes_differ()
    watch_loader(observed, recording)
    watch_run(observed, recording)
    watch_checkpoints(observed.Checkpoints, recording)


def watch_accelerator(cls: type, recording) -> None:
    models = recording.models

    @wrap(cls, "prepare_model")
    def prepare_model(original, *args, **kwargs):
        models.depth, models.in_backward = models.depth + 1, True  # the pass that arranges DDP's buckets is not a step
        try:
            return original(*args, **kwargs)
        finally:
            models.depth, models.in_backward = models.depth - 1, False


def watch_loader(observed: ModuleType, recording) -> None:
    cls, batches = observed.GlobalLoader, recording.batches

    @wrap(cls, "__init__")
    def init(original, loader, dataset, batch_size, accelerator, **options):
        limit = recording.plan.limit
        options["max_samples"] = min(limit, options.get("max_samples") or limit)
        batches.is_reading = True
        original(loader, dataset, batches.step_size(batch_size), accelerator, **options)
        batches.is_reading = False
        observed.wrap_collate(loader, Tagged, lambda content: batches.opened(content)[0])
        recording.facts.is_exact = True
        key, facts = batches.key(len(dataset)), {"length": len(dataset), "items": loader.sampler.length}
        facts |= {"given": batch_size, "drop_last": bool(options.get("drop_last"))}
        batches.new_loader(loader, key, sampler="GlobalLoader", **facts)

    @wrap(cls, "epoch")
    def epoch(original, loader, *args, **kwargs):
        if batches.end_passes(loader):
            return
        current, iterator = batches.begin_pass(loader), original(loader, *args, **kwargs)
        batches.expect_draws()
        while (batch := read(batches, iterator)) is not None:
            batch.data, digests = batches.opened(batch.data)
            if digests is None:
                digests = rows(batch.data)
            batches.deliver(current, [] if batch.is_stand_in else digests, batch.data)
            yield batch
        batches.end_pass(current)


def read(batches: Batches, iterator):
    with batches.reading():
        return next(iterator, None)


def watch_run(observed: ModuleType, recording) -> None:
    cls = observed.Run

    @wrap(cls, "start")
    def start(original, run, train_loader, test_loader, total_steps, **options):
        recording.facts.run = recording.where.line()
        recording.facts.virtual_processes = observed.virtual_processes(run)
        original(run, train_loader, test_loader, min(total_steps, PASSES * len(train_loader)), **options)

    before(cls, "log_test", lambda _, result: recording.evaluations.add_result(result))
    before(cls, "finish", lambda _: setattr(recording.facts, "is_finished", True))


def watch_checkpoints(cls: type, recording) -> None:
    @wrap(cls, "save")
    def save(original, checkpoints, *args, **kwargs):
        original(checkpoints, *args, **kwargs)
        if recording.plan.stop_after_save:
            checkpoints.wait()  # a thread writes it
            saved(recording)
