import importlib
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate.commands.config.config_args import ClusterConfig
from conftest import ROOT
from torch import nn

from utils import launch, stop


def fake_accelerator(processes=1, device="cpu", kind="NO"):
    return SimpleNamespace(
        num_processes=processes,
        device=torch.device(device),
        distributed_type=launch.DistributedType(kind),
        is_main_process=True,
    )


def cluster(**keys):
    keys = {"distributed_type": "NO", "num_processes": 1, "use_cpu": False, "debug": False} | keys
    return ClusterConfig(compute_environment="LOCAL_MACHINE", mixed_precision="no", **keys)


def run_flags(**flags):
    args = {"batch_size": 8, "gradient_accumulation_steps": 1, "seed": 0, "timeout_s": 600, "log_with": None}
    return SimpleNamespace(**args, **flags)


@pytest.fixture
def asked(monkeypatch):
    def ask(config, **options):
        options = SimpleNamespace(cpu=False, num_processes=None, config_file="some.yaml", **options)
        monkeypatch.setattr(launch, "requested_topology", lambda: (options, config))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return ask


@pytest.mark.parametrize(
    ("config", "environment", "runs", "sentence"),
    [
        ({}, {"WORLD_SIZE": "2"}, {}, "the launcher started 2 processes, but they do not find each other"),
        ({"distributed_type": "MULTI_CPU", "num_processes": 4, "use_cpu": True}, {}, {}, "asks for 4 processes"),
        ({}, {}, {}, "asks for a GPU and none is visible"),
        ({"distributed_type": "FSDP", "gpu_ids": "-1,-1"}, {}, {"kind": "MULTI_CPU"}, "asks for FSDP"),
        ({"num_processes": 8}, {"WORLD_SIZE": "4"}, {"processes": 4, "device": "cuda"}, "asks for 8 processes"),
    ],
)
def test_another_topology_than_asked_for_stops_the_run(asked, monkeypatch, capsys, config, environment, runs, sentence):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if "gpu_ids" in config:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", config["gpu_ids"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    asked(cluster(**config))
    with pytest.raises(SystemExit):
        launch.check_topology(fake_accelerator(**runs))
    assert sentence in capsys.readouterr().err


def test_more_processes_than_gpus_stop_the_run(monkeypatch, capsys):
    """Accelerate itself takes the local rank modulo the number of GPUs, and two processes share one."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        launch.check_topology(fake_accelerator(4, "cuda", "MULTI_GPU"))
    assert "4 processes were started on a machine where 2 GPUs are visible" in capsys.readouterr().err


@pytest.mark.parametrize(("devices", "processes", "wrapped"), [(4, 1, True), (1, 1, False), (4, 4, False)])
def test_data_parallel_is_one_process_with_several_gpus(monkeypatch, devices, processes, wrapped):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    made = []
    monkeypatch.setattr(launch.nn, "DataParallel", lambda model: made.append(model) or model)
    model = nn.Linear(1, 1)
    monkeypatch.setattr(model, "to", lambda device: model)
    launch.data_parallel(model, fake_accelerator(processes, "cuda"))
    assert bool(made) == wrapped


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("distributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n", "asks for 2 processes"),
        ("distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\n", "no available devices found"),
    ],
)
def test_configs_that_accelerate_takes_for_something_else(launcher, name, text):
    config = launcher.folder / "trap.yaml"
    config.write_text(name)
    done = launcher(str(config), "--output_dir", "run", check=False)
    assert done.returncode != 0
    assert text in done.stderr
    assert not (launcher.folder / "run").exists()


@pytest.mark.slow
def test_use_cpu_with_several_processes_is_one_job(launcher, small_mnist):
    """Accelerate alone would train two separate models here."""
    config = launcher.folder / "two.yaml"
    config.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\nuse_cpu: true\n")
    done = launcher(str(config), "--dataset", small_mnist, "--max_steps", 2, "--output_dir", "run")
    assert "2 processes on 1 machine (MULTI_CPU over gloo)" in done.stdout
    assert done.stdout.count("done: ") == 1


def test_a_gpu_config_without_a_gpu_names_the_way_out(launcher):
    if torch.accelerator.is_available():
        pytest.skip("there is a GPU here")
    done = launcher("single_gpu", check=False)
    assert "asks for a GPU and none is visible here: take cpu.yaml or cpu_ddp.yaml" in done.stderr


def test_what_was_imported_is_not_searched_for_garbage():
    code = "from utils import launch; import gc; print(gc.isenabled(), gc.get_freeze_count() > 100_000); "
    code += f"launch.make_accelerator(launch.argparse.Namespace(**{vars(run_flags(output_dir='x'))}), 1); "
    code += "print(gc.isenabled(), gc.get_freeze_count() > 100_000)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("False False\nTrue True\n", "")


def test_accelerate_answers_the_lomo_question_once():
    """Two searches of the disk an update otherwise: half of the time of a small step."""
    import accelerate.optimizer

    launch.make_accelerator(run_flags(output_dir="x"), 1)
    accelerate.optimizer.is_lomo_available()
    before = accelerate.optimizer.is_lomo_available.cache_info().hits
    accelerate.optimizer.is_lomo_available()
    assert accelerate.optimizer.is_lomo_available.cache_info().hits == before + 1
    assert torch.get_num_threads() == 1


def test_numbers_in_flags_are_checked(capsys):
    parser = launch.ArgumentParser()
    parser.add_argument("--count", type=launch.at_least(1))
    parser.add_argument("--share", type=launch.at_least(0.0, float, below=1.0))
    assert parser.parse_args(["--count", "3", "--share", "0.5"]).count == 3
    for words in (["--count", "0"], ["--count", "x"], ["--share", "1"], ["--share", "nan"], ["--cou", "3"], ["--no"]):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert len(error.splitlines()) == 1


@pytest.mark.parametrize("path", sorted((ROOT / "scripts").glob("*.py")), ids=lambda path: path.stem)
def test_help_has_each_flag_in_a_group_with_its_default_and_the_command(path, monkeypatch, capsys):
    script = importlib.import_module(f"scripts.{path.stem}")
    monkeypatch.setattr(sys, "argv", [f"scripts/{path.name}"])
    defaults = vars(script.parse_args())
    monkeypatch.setattr(sys, "argv", [f"scripts/{path.name}", "--help"])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        script.parse_args()
    assert ended.value.code == 0
    text, _, examples = capsys.readouterr().out.partition("\nexamples:\n")
    assert re.match(rf"  accelerate launch --config_file accelerate_configs/\w+.yaml scripts/{path.name}\b", examples)
    assert "None" not in text
    assert text.isascii()
    assert max(map(len, text.splitlines()[1:])) <= 80  # behind the usage
    groups = dict(re.findall(r"(?m)^(\w[\w ]+):\n((?:  .*\n?)+)", text))
    assert len(groups) >= 4
    assert ("--resume" in groups["run"]) == ("--profile" in groups["run"]) == (defaults["resume"] is not None)
    assert "--output_dir FOLDER" in groups["run"]
    flags = re.findall(r"(?m)^  --(\w+)(.*\n(?: {10}.*\n)*)", text)
    assert {name for name, _ in flags} >= {"seed", "timeout_s"}
    for name, rest in flags:
        assert len(rest.split()) > 2, name  # a word of help
        if isinstance(defaults[name], (int, float)) and not isinstance(defaults[name], bool) and name != "profile":
            assert re.search(r"\(default: [\d.e-]+\)", rest), name


def test_help_is_printed_once_a_machine(monkeypatch, capsys):
    for rank, printed in (("0", True), ("1", False)):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as ended:
            launch.ArgumentParser("What it does.").parse_args(["--help"])
        assert ended.value.code == 0
        assert ("What it does." in capsys.readouterr().out) == printed


def test_an_error_is_said_once_a_machine(monkeypatch, capsys):
    for rank, expected in (("0", "error: so\n"), ("1", "")):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit):
            stop("so")
        assert capsys.readouterr().err == expected


def test_the_command_to_go_on_is_the_one_that_was_typed(monkeypatch):
    words = ["--config_file", "accelerate_configs/cpu.yaml", "scripts/mnist_mlp.py", "--output_dir", "a b"]
    monkeypatch.setattr(launch, "launcher_words", lambda: words)
    monkeypatch.setattr(launch, "requested_topology", lambda: (launch.launch_command_parser().parse_args(words), None))
    monkeypatch.setattr(sys, "argv", words[2:])
    expected = (
        "accelerate launch --config_file accelerate_configs/cpu.yaml scripts/mnist_mlp.py --output_dir 'a b' --resume"
    )
    assert launch.resume_command() == expected
    monkeypatch.setattr(sys, "argv", [*words[2:], "--resume"])
    assert launch.resume_command() == expected


def test_the_command_to_go_on_names_the_folder_that_was_made(monkeypatch):
    """Without it, --resume would begin anew in another folder."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    args = run_flags(output_dir=None, resume=False)
    launch.make_accelerator(args, 1)
    assert args.output_dir.startswith("runs/train-")
    assert launch.resume_command().endswith(f"train.py --lr 1 --output_dir {args.output_dir} --resume")


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGINT"])
def test_a_signal_asks_for_a_stop(name):
    stop_signal = launch.StopSignal(fake_accelerator())
    assert not stop_signal.agreed()
    os.kill(os.getpid(), getattr(signal, name))
    assert stop_signal.agreed()


def test_scripts_find_utils_from_any_folder(launcher):
    done = launcher("cpu", "--help")
    assert ROOT not in launcher.folder.parents
    assert "--batch_size" in done.stdout


def test_a_lost_peer_is_one_sentence_and_a_bug_keeps_its_traceback(monkeypatch, capsys):
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch.socket, "gethostname", lambda: "alpha")
    monkeypatch.setattr(launch, "own_address", lambda: "10.0.0.1")
    peers = launch.explain_lost_peers()
    hosts = [("alpha", "10.0.0.1"), ("alpha", "10.0.0.1"), ("beta", "10.0.0.11"), ("gamma", "10.0.0.111")]
    peers += [{"host": host, "address": address, "restarts": 0} for host, address in hosts]

    def said(error):
        sys.excepthook(type(error), error, None)
        return capsys.readouterr().err

    closed = said(RuntimeError("[/gloo/pair.cc:545] Connection closed by peer [10.0.0.111]:64. This is typically ..."))
    assert closed.startswith("error: rank 1 on alpha lost rank 3 on gamma: Connection closed by peer [10.0.0.111]:64; ")
    assert closed.endswith(" --resume\n")
    assert closed.count("\n") == 1
    monkeypatch.setattr(launch, "is_up", lambda address: address == "10.0.0.11")
    assert "rank 1 on alpha lost rank 3 on gamma: Timed out" in said(RuntimeError("Timed out waiting 8001ms for recv"))
    monkeypatch.setattr(launch, "is_up", lambda address: True)
    assert "lost another process: Timed out" in said(RuntimeError("Timed out waiting 8001ms for recv"))
    launch.explain_lost_peers(can_resume=False)
    assert said(RuntimeError("Timed out waiting 8001ms for recv")).endswith(": Timed out waiting 8001ms for recv\n")
    launch.explain_lost_peers()
    for bug in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), KeyError("connection closed")):
        assert said(bug).startswith(type(bug).__name__)


def test_what_differs_between_processes_is_named(monkeypatch, capsys):
    facts = {"lr": 0.1, "output_dir": "a", "seed": 0}
    shared = [(host, {"lr": lr, "seed": 0}) for host, lr in (("alpha", 0.1), ("beta", 0.1), ("gamma", 0.2))]
    monkeypatch.setattr(launch, "gather_object", lambda mine: [*mine, *shared[1:2]])
    assert launch.same_on_all(fake_accelerator(), facts) == facts
    monkeypatch.setattr(launch, "gather_object", lambda mine: shared)
    with pytest.raises(SystemExit):
        launch.same_on_all(fake_accelerator(), facts)
    assert capsys.readouterr().err == "error: rank 2 on gamma has lr 0.2, not 0.1 as rank 0 on alpha\n"


def test_the_timeout_reaches_the_process_group(monkeypatch):
    """Accelerate drops one that equals its own default of 600 s, and gloo then waits for half an hour."""
    made = []

    def refuse(**options):
        made.extend(options["kwargs_handlers"])
        raise ValueError

    monkeypatch.setattr(launch, "Accelerator", refuse)
    parser = launch.ArgumentParser()
    parser.add_run_flags()
    args = vars(parser.parse_args(["--output_dir", "x"]))
    with pytest.raises(SystemExit):
        launch.make_accelerator(SimpleNamespace(**args, gradient_accumulation_steps=1, log_with=None))
    (kwargs,) = [each.to_kwargs() for each in made if isinstance(each, launch.InitProcessGroupKwargs)]
    assert kwargs["timeout"].total_seconds() == pytest.approx(600, abs=0.1)


def test_a_machine_that_refuses_a_connection_is_up():
    assert launch.is_up("127.0.0.1")
