"""kubernetes/trainjob.yaml and skypilot.yaml: their own commands on two hosts, with what the operators set."""

import sys
from pathlib import Path

import pytest
import run_reader
import yaml
from conftest import ROOT, free_port
from network import ADDRESSES

CONFIGS = ROOT / "accelerate_configs"


def kubernetes(host: int, port: int) -> tuple[list[str], dict]:
    """The command of a pod, and its variables: the manifest's, and those of Kubeflow Trainer."""
    _, job = yaml.safe_load_all((CONFIGS / "kubernetes" / "trainjob.yaml").read_text())
    trainer = job["spec"]["trainer"]
    variables = {variable["name"]: variable["value"] for variable in trainer["env"]}
    variables |= {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": str(host)}
    variables |= {"PET_MASTER_ADDR": ADDRESSES[0], "PET_MASTER_PORT": str(port)}
    assert trainer["command"] == ["torchrun"]
    return [sys.executable, "-m", "torch.distributed.run", *trainer["args"]], variables


def skypilot(host: int, port: int) -> tuple[list[str], dict]:
    """The script of a machine, and SkyPilot's variables."""
    task = yaml.safe_load((CONFIGS / "skypilot.yaml").read_text())
    script = task["run"].rstrip().replace("29500", str(port)).replace("/shared/", "")
    variables = {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NUM_GPUS_PER_NODE": "2"}
    variables |= {"SKYPILOT_NODE_RANK": str(host), "SKYPILOT_NODE_IPS": "\n".join(ADDRESSES)}
    return ["bash", "-c", f'{script} "$@"', "bash"], variables


# 320 steps: a kill after step 30 comes long before the end. By then the checkpoint of step 16 is complete, because the
# next one, of step 24, has begun.
FLAGS = ["--batch_size", 64, "--num_epochs", 20, "--log_every", 10, "--checkpoint_every", 8]


@pytest.fixture(scope="module")
def whole(shared_launcher, small_mnist):
    """The run of four processes that nothing happens to, on one machine."""
    flags = ["--dataset", small_mnist, *FLAGS, "--output_dir", "whole"]
    shared_launcher("cpu_ddp", *flags, launch_flags=["--num_processes", 4])
    return shared_launcher.folder / "whole"


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "losses"), [(kubernetes, 1), (skypilot, 0)])
def test_a_cluster_starts_two_machines_loses_one_and_resumes_with_the_same_bits(
    cluster, losses, hosts, tmp_path, small_mnist, whole
):
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    for name in ("scripts", "utils"):  # the folder is shared, and has a copy of the repository
        (tmp_path / name).symlink_to(ROOT / name)

    def start():
        port, running = free_port(), []
        for host in (0, 1):
            command, variables = cluster(host, port)
            words = [*command, "--dataset", small_mnist, *FLAGS]
            running.append(hosts.start(host, *words, cwd=tmp_path, PATH=path, **variables))
        return running

    for _ in range(losses):
        running = start()
        hosts.wait_for("step 30/")
        hosts.kill(1)
        assert 0 not in hosts.end(running)[0], hosts.tails()
        hosts.clear()
    assert hosts.ends(start())[0] == [0, 0], hosts.tails()
    run = next((tmp_path / "runs").iterdir())
    assert [launch["num_processes"] for launch in run_reader.launches(run)] == [4] * (losses + 1)
    assert run_reader.launches(run)[-1]["from_step"] >= 16 * losses
    assert run_reader.final_models(run) == run_reader.final_models(whole)


@pytest.mark.others("kubeflow_trainer_api")
def test_the_manifest_has_only_fields_that_kubeflow_knows():
    from kubeflow_trainer_api import models

    def lost(given, kept, path=""):
        if isinstance(given, dict):
            return [place for key in given for place in lost(given[key], (kept or {}).get(key), f"{path}/{key}")]
        if isinstance(given, list):
            pairs = zip(given, kept or [], strict=True)
            return [place for one, other in pairs for place in lost(one, other, f"{path}/-")]
        return [] if given == kept else [path]

    for document in yaml.safe_load_all((CONFIGS / "kubernetes" / "trainjob.yaml").read_text()):
        model = getattr(models, f"TrainerV1alpha1{document['kind']}").from_dict(document)
        assert not lost(document, model.to_dict())


def test_the_grace_periods_leave_the_launcher_time_to_save():
    runtime, job = yaml.safe_load_all((CONFIGS / "kubernetes" / "trainjob.yaml").read_text())
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    grace_s = node["template"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    (shutdown,) = [v for v in job["spec"]["trainer"]["env"] if v["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert 60 < int(shutdown["value"]) < grace_s
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in (CONFIGS / "skypilot.yaml").read_text()
