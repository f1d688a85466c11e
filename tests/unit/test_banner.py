"""Which code made a run."""

import subprocess

import pytest

from utils import banner


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with one commit, in which the code lies; returns a function that runs git there."""
    package = tmp_path / "repository" / "utils"
    package.mkdir(parents=True)
    (package / "code.py").write_text("one = 1\n")
    monkeypatch.setattr(banner, "__file__", str(package / "code.py"))

    def git(*words):
        names = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
        done = subprocess.run(["git", *names, *words], cwd=package, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init")
    git("add", ".")
    git("commit", "-m", "one")
    return git


def test_a_file_that_was_changed_since_the_commit_is_a_plus_behind_it(repository, tmp_path):
    commit = repository("rev-parse", "HEAD")
    assert banner.git_commit() == commit
    (tmp_path / "repository" / "runs.txt").write_text("of no commit")
    assert banner.git_commit() == commit
    (tmp_path / "repository" / "utils" / "code.py").write_text("one = 2\n")
    assert banner.git_commit() == commit + "+"


def test_outside_of_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(banner, "__file__", str(tmp_path / "code.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert banner.git_commit() is None
