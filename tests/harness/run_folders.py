"""Folders of runs that nobody trained, for the tools that read them."""

import json


def truncate(file):
    """Take away the last byte."""
    file.write_bytes(file.read_bytes()[:-1])


LAUNCH = {"from_step": 0, "num_processes": 1, "processes": [{"host": "h", "device": "cpu"}]}


def line(step, split="train", **metrics):
    return {"split": split, "step": step, "epoch": 1, **metrics}


LINES = [line(1, loss=2.0), line(2, loss=1.0), line(2, "test", loss=1.5, accuracy=0.5)]


def make_run(folder, lines=LINES, record=None, tail="", finished=2):
    """A run folder without checkpoints. finished: at which step, or None; tail: after the last line of metrics."""
    folder.mkdir(parents=True)
    content = {"arguments": {"lr": 0.1, "output_dir": str(folder), "batch_size": 5}, "versions": {"torch": "2"}}
    content |= {"data": {"dataset": "/x/mnist", "train": 10, "fingerprint": "f"}, "launches": [LAUNCH]}
    (folder / "run.json").write_text(json.dumps(content | (record or {})))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines) + tail)
    if finished is not None:
        (folder / "summary.json").write_text(json.dumps({"step": finished}))
    return folder
