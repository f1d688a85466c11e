"""Scripts that train with this project's GlobalLoader and Run, wherever they were copied to.

They promise more than a DataLoader can: the fact `is_exact`. Batches, their unequal parts and learning rates need no
allowance, and Run says by itself what the test results are, when it saves, and how it resumes.
"""

import contextlib
import importlib

from ..tensors import rows
from .data import PASSES, Batches
from .files import saved
from .same_work import Tagged
from .where import before, wrap


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
                with contextlib.suppress(ImportError, AttributeError):  # another class of this name
                    watch(kind, recording)
            original(self, *args, **kwargs)


def watch(accelerator: type, recording) -> None:
    package = accelerator.__module__.rpartition(".")[0]
    run, loader = (importlib.import_module(f"{package}.{name}") for name in ("run", "loader"))
    # Processes that differ are a finding, and must not end the run.
    run.same_weights.check, run.same_result = lambda *_: None, lambda numbers: numbers
    watch_accelerator(accelerator, recording)
    watch_loader(loader.GlobalLoader, recording)
    watch_run(run.Run, recording)
    watch_checkpoints(run.Checkpoints, recording)


def watch_accelerator(cls: type, recording) -> None:
    models = recording.models

    @wrap(cls, "prepare_model")
    def prepare_model(original, *args, **kwargs):
        models.depth, models.in_backward = models.depth + 1, True  # the pass that arranges DDP's buckets is not a step
        try:
            return original(*args, **kwargs)
        finally:
            models.depth, models.in_backward = models.depth - 1, False


def watch_loader(cls: type, recording) -> None:
    batches = recording.batches

    @wrap(cls, "__init__")
    def init(original, loader, dataset, batch_size, accelerator, **options):
        limit = recording.plan.limit
        options["max_samples"] = min(limit, options.get("max_samples") or limit)
        batches.is_reading = True
        original(loader, dataset, batches.step_size(batch_size), accelerator, **options)
        batches.is_reading = False
        if loader.reader is not None:
            fetcher, weigh = loader.reader.fetcher, loader.loss_weights
            fetcher.collate_fn, fetcher.prove_reads_itself = Tagged(fetcher.collate_fn), True
            loader.loss_weights = weigh and (lambda content: weigh(batches.opened(content)[0]))
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


def watch_run(cls: type, recording) -> None:
    @wrap(cls, "start")
    def start(original, run, train_loader, test_loader, total_steps, **options):
        recording.facts.run = recording.where.line()
        recording.facts.virtual_processes = getattr(run.accelerator, "virtual_processes", 0)
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
