"""guides/two_gpus.ipynb runs from its first to its last cell; without GPUs, on the CPU."""

import re
import shutil

import pytest
import run_reader
from conftest import ROOT

NOTEBOOK = ROOT / "guides" / "two_gpus.ipynb"


@pytest.mark.slow
def test_the_notebook_trains_on_one_and_on_all_and_compares(tmp_path, home, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    # In a copy without version control, so that its runs stay out of this folder.
    names = ["accelerate_configs", "scripts", "utils", "tools", "data", "benchmarks", "requirements.txt"]
    for name in names:
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "guides").mkdir()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = nbformat.read(shutil.copy(NOTEBOOK, tmp_path / "guides"), as_version=4)
    assert len(notebook.cells) == 8
    NotebookClient(notebook, timeout=400, resources={"metadata": {"path": str(tmp_path / "guides")}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "all-reduce over 2 GPUs, gloo: " in printed
    assert float(re.search(r"differ by (\S+) of", printed)[1]) < 1e-5
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert printed.rstrip().endswith("nothing: no GPU was there")
    (top,) = (tmp_path / "runs").iterdir()  # with the time in its name: run twice, no run meets an old one
    assert re.fullmatch(r"notebook-\d{8}-\d{6}", top.name)
    for name, processes in (("one", 1), ("all", 2)):
        assert run_reader.launches(top / name)[0]["num_processes"] == processes
        assert run_reader.summary(top / name)["test_samples"] == 10_000


def test_the_notebook_in_the_repository_has_no_outputs():
    import nbformat

    assert not any(cell.get("outputs") for cell in nbformat.read(NOTEBOOK, as_version=4).cells)
