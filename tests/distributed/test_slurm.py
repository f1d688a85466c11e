"""The sbatch files under a real Slurm: a controller and two nodes in the network namespaces of
hosts.py.

Needs root and Debian's packages slurmctld, slurmd, slurm-client and munge; no systemd, no
configuration.
"""

import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
from conftest import ROOT
from hosts import Hosts
from network import ADDRESSES, NAMES

pytestmark = pytest.mark.slow

CONFIG = """
ClusterName=test
SlurmctldHost={names[0]}({addresses[0]})
SlurmUser=root
SlurmdUser=root
# A requeued job waits until its credential has expired: 5 s, the least there is, instead of 2
# minutes.
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/jobs.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=10
NodeName={names[0]} NodeAddr={addresses[0]} CPUs=2
NodeName={names[1]} NodeAddr={addresses[1]} CPUs=2
PartitionName=main Nodes=ALL Default=YES
"""


class Slurm:
    def __init__(self, hosts: Hosts, folder: Path):
        self.hosts, self.folder = hosts, folder
        # Slurm looks for the kernel's control groups even where it is told not to use them: an
        # empty folder will do.
        (folder / "cgroup.conf").write_text(f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={folder}/none\n")
        (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, names=NAMES, addresses=ADDRESSES))
        (folder / "munge.key").write_bytes(os.urandom(64))
        (folder / "munge.key").chmod(0o400)
        files = {"key-file": "munge.key", "socket": "munge.sock", "seed-file": "munge.seed", "pid-file": "munge.pid"}
        self.daemon(0, "munged", "--force", "--foreground", *(f"--{name}={folder / files[name]}" for name in files))
        self.until((folder / "munge.sock").exists, 10)
        self.daemon(0, "slurmctld", "-D")
        self.until(lambda: "UP" in self.run("scontrol", "ping", check=False), 30)
        for host, name in enumerate(NAMES):
            (folder / name).mkdir()
            self.daemon(host, "slurmd", "-D", "-N", name)
        idle = ["sinfo", "--noheader", "--states=idle", "--format=%D"]
        self.until(lambda: self.run(*idle, check=False).strip() == "2", 60)

    def daemon(self, host, name, *words):
        self.hosts.start(host, name, *words, log=f"{name}.{host}.log", SLURM_CONF=f"{self.folder}/slurm.conf")

    def run(self, *words, check=True, **environment) -> str:
        done = self.hosts.start(0, *words, cwd=ROOT, log="out", SLURM_CONF=f"{self.folder}/slurm.conf", **environment)
        failed, text = done.wait(60), (self.hosts.folder / "out").read_text()
        assert not (failed and check), text
        return text

    def submit(self, file, *flags, options=(), processes=1):
        """Queue one of the sbatch files for the CPU, as its header says; returns the number of the
        job."""
        overrides = {"PROCESSES_PER_NODE": str(processes), "LAUNCH_FLAGS": "--gpu_ids=-1,-1", "VENV": sys.prefix}
        options = ["--parsable", "--gpus-per-node=0", "--cpus-per-task=1", *options]
        options += [f"--output={self.hosts.folder}/job"]
        file = ROOT / "accelerate_configs" / "slurm" / file
        return self.run("sbatch", *options, file, "scripts/mnist_mlp.py", *flags, **overrides).strip()

    def job(self, number) -> dict[str, str]:
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", number)))

    def log(self) -> str:
        path = self.hosts.folder / "job"
        return path.read_text() if path.exists() else ""

    def until(self, condition, timeout=120):
        end = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < end, self.log()[-5000:] + self.run("squeue")
            time.sleep(0.3)


@pytest.fixture
def slurm(tmp_path, home):
    missing = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if not shutil.which(name)]
    if missing:
        pytest.skip(f"no {', '.join(missing)}: apt-get install slurmctld slurmd slurm-client munge")
    try:
        hosts = Hosts(tmp_path, home)
    except OSError as reason:
        pytest.skip(str(reason))
    with tempfile.TemporaryDirectory(prefix="slurm", ignore_cleanup_errors=True) as folder:  # short: for the sockets
        try:
            yield Slurm(hosts, Path(folder))
        finally:
            hosts.remove()


def flags(small_mnist, output_dir, max_steps):
    words = ["--dataset", small_mnist, "--max_steps", max_steps, "--batch_size", 64, "--log_every", 50]
    return [*words, "--checkpoint_every", 100, "--output_dir", output_dir]


def test_two_nodes_go_on_after_the_time_limit_and_after_scontrol_requeue(slurm, small_mnist, tmp_path):
    options = ["--time=1", "--signal=B:USR1@30"]
    number = slurm.submit("multi_node.sbatch", *flags(small_mnist, tmp_path / "run", 3000), options=options)
    slurm.until(lambda: slurm.job(number)["Restarts"] == "1")
    slurm.run("scontrol", "step", f"JobId={number}", "TimeLimit=30")
    assert "stopped by a signal" in slurm.log()  # saved by itself: it was not killed
    saved = max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").iterdir())
    slurm.until(lambda: slurm.log().count("topology  ") == 4)  # a line a host and start
    slurm.until(lambda: f"step {(saved // 50 + 2) * 50}/" in slurm.log())
    slurm.run("scontrol", "requeue", number)
    slurm.until(lambda: slurm.job(number)["JobState"] == "COMPLETED")
    print(slurm.run("sacct", "--completion", "--format=jobid,jobname,nnodes,nodelist,state,start,end"))
    print((slurm.folder / "jobs.txt").read_text())
    assert slurm.job(number)["Restarts"] == "2"
    assert [process.wait(120) for process in slurm.hosts.launch(*flags(small_mnist, "whole", 3000))] == [0, 0]
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


def test_one_node_goes_on_after_the_signal(slurm, launcher, small_mnist, tmp_path):
    """And one that fails by itself is not queued again."""
    number = slurm.submit("one_node.sbatch", *flags(small_mnist, tmp_path / "run", 1000), processes=2)
    slurm.until(lambda: "train epoch" in slurm.log())
    slurm.run("scancel", "--batch", "--signal=USR1", number)
    slurm.until(lambda: slurm.job(number)["JobState"] == "COMPLETED")
    assert slurm.job(number)["Restarts"] == "1"
    assert "stopped by a signal" in slurm.log()
    launcher("cpu_ddp", *flags(small_mnist, "whole", 1000))
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()

    number = slurm.submit("multi_node.sbatch", "--no_such_flag")
    slurm.until(lambda: slurm.job(number)["JobState"] == "FAILED")
    assert slurm.job(number)["Restarts"] == "0"
    assert "error: unrecognized arguments: --no_such_flag" in slurm.log()
    assert all(f"error: {name}: task {host}: Exited with exit code 1" in slurm.log() for host, name in enumerate(NAMES))
