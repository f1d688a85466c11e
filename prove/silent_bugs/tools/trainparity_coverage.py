"""trainparity checks that no sample is read by two processes: the first pass of the first loader of each."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

from torch.utils.data import DataLoader
from trainparity.api import NoCrossRankOverlap, audit_rank_iterables

read = DataLoader.__iter__


def record(loader):
    ids = []
    try:
        for batch in read(loader):
            rows = batch[0] if isinstance(batch, (list, tuple)) else batch
            ids.append([row.numpy().tobytes().hex() for row in rows])
            yield batch
    finally:
        if not (path := Path(f"ids_{os.environ['RANK']}.json")).exists():
            path.write_text(json.dumps(ids))


if "RANK" in os.environ:
    DataLoader.__iter__ = record
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    sys.exit()
launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__]
subprocess.run([*launch, *sys.argv[1:]])
parts = {rank: json.loads(path.read_text()) for rank, path in enumerate(sorted(Path().glob("ids_*.json")))}
result = audit_rank_iterables(parts, sample_id_extractor=list, policy=NoCrossRankOverlap())
print(result)
sys.exit({"PASS": 0, "FAIL": 1}.get(result.outcome.name, 3) if len(parts) == 2 else 3)
