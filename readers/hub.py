"""Datasets from the Hub, or from a folder of the same form, through `datasets.load_dataset`."""

import os
import re
from pathlib import Path

from utils.console import is_local_main, stop

TEST_SPLITS = ("test", "validation", "val")  # the first of these that exists is used


def load_dataset(dataset: str, example: str, folder: Path | None = None, streaming: bool = False) -> dict:
    """The splits of a dataset by name, each a `datasets.Dataset`, or with `streaming` an IterableDataset.

    Args:
        dataset: the value of --dataset: a Hub id or a folder.
        example: a Hub id, for the error message.
        folder: load from here instead.
    """
    import datasets  # slow: errors in flags should not wait for it

    source = folder or Path(dataset)
    is_folder = source.is_dir()
    if is_folder or not is_local_main():
        datasets.disable_progress_bars()
    if not is_local_main():  # print the Hub's messages once per machine
        import huggingface_hub

        datasets.logging.set_verbosity_error()
        huggingface_hub.logging.set_verbosity_error()
    if not is_folder and (not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", dataset) or source.exists()):
        stop(f"--dataset {dataset} is neither a folder nor a Hub id such as {example}")
    for top, folders, _ in os.walk(source) if is_folder else ():
        for link in filter(os.path.islink, (os.path.join(top, name) for name in folders)):
            stop(f"--dataset {dataset} has a link to a folder, {link}, whose files would be left out: move them here")
    try:
        return datasets.load_dataset(source.as_posix(), streaming=streaming)
    except Exception as error:  # some twenty types; all of them mean that there is no data
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        cache = str(datasets.config.HF_DATASETS_CACHE)
        if cache in reason:
            stop(f"the cache {cache} cannot be used ({reason}): remove it, or set HF_HOME")
        if is_folder:
            stop(f"--dataset {dataset} holds no intact dataset ({reason}): fix it, or remove its copies in {cache}")
        stop(f"--dataset {dataset} is not a folder, and cannot be loaded from the Hub: {reason}")
