"""Datasets from the Hub, and parquet files with images, through `datasets.load_dataset`."""

import re
from pathlib import Path

from utils.console import is_local_main, stop

from .files import SPLIT_WORDS, TEST_SPLITS


def load_dataset(dataset: str, example: str, files: dict[str, dict[str, str]] | None = None) -> tuple[dict, list[str]]:
    """The splits train and test of a dataset, each a `datasets.Dataset`, and the names of those that are left out.

    Args:
        dataset: the value of --dataset: a Hub id, unless there are `files`.
        example: a Hub id, for the error message.
        files: parquet files by split, as `split_files` gives them.
    """
    import datasets  # slow: errors in flags should not wait for it

    if files or not is_local_main():
        datasets.disable_progress_bars()
    if not is_local_main():  # print the Hub's messages once per machine
        import huggingface_hub

        datasets.logging.set_verbosity_error()
        huggingface_hub.logging.set_verbosity_error()
    if not files and (not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", dataset) or Path(dataset).exists()):
        stop(f"--dataset {dataset} is neither a folder nor a Hub id such as {example}")
    try:
        if files:
            paths = {split: [*of_split.values()] for split, of_split in files.items()}
            return datasets.load_dataset("parquet", data_files=paths), []
        splits = datasets.load_dataset(dataset)
    except Exception as error:  # some twenty types; all of them mean that there is no data
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        cache = str(datasets.config.HF_DATASETS_CACHE)
        if cache in reason:
            stop(f"the cache {cache} cannot be used ({reason}): remove it, or set HF_HOME")
        if files:
            stop(f"--dataset {dataset} holds no intact dataset ({reason}): fix it, or remove its copies in {cache}")
        stop(f"--dataset {dataset} is not a folder, and cannot be loaded from the Hub: {reason}")
    if "train" not in splits:
        stop(f"--dataset {dataset} has the splits {', '.join(splits)}, but no train")
    test = next((name for split in TEST_SPLITS for name in splits if SPLIT_WORDS.get(name) == split), None)
    left_out = [f"the split {name}" for name in splits if name not in ("train", test)]
    return {"train": splits["train"]} | ({"test": splits[test]} if test else {}), left_out
