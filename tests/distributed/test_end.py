"""The end of a process that has succeeded."""

import subprocess
import sys

import pytest
from conftest import ROOT
from hosts import free_port

# FSDP's modules keep the threads of gloo, which get hardly any time here: they still have to free what the last
# collectives have used.
PROGRAM = """import os
import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, {root!r})
from utils.failures.processes import end_process_group

distributed.init_process_group("gloo")
torch.set_num_threads(1)
mesh = init_device_mesh("cpu", (2,))
model = nn.Linear(8, 8)
fully_shard(model, mesh=mesh)
model(torch.randn(4, 8)).sum().backward()
for task in Path("/proc/self/task").iterdir():
    if (task / "comm").read_text() == "pt_gloo_runloop\\n":
        os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
works = [distributed.all_reduce(torch.ones(3), async_op=True) for _ in range(4)]
for work in works:
    work.wait()
del work, works
end_process_group()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_thread_of_gloo_aborts_a_process_that_has_succeeded_on_a_busy_machine(tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM.format(root=str(ROOT)))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:  # without the wait, two of three launches fail
        words = ["--nproc_per_node=2", f"--master_port={free_port()}", str(tmp_path / "train.py")]
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *words], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
    finally:
        for process in busy:
            process.kill()
            process.wait()
