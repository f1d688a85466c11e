"""Judges programs with prove, one after the other in one process, which imports PyTorch once.

stdin: a list of programs as JSON, each with the keys name, text, flags and processes. They stand below the working
directory, each with a copy of utils/ beside it, as a user has it. stdout: for each name, the exit code and what prove
has printed, as JSON.
"""

import argparse
import compileall
import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"resume_flags": None, "timeout_s": 120, "strict": True, "module": None, "format": "text", "keep": None}


def main() -> None:
    sys.path[0] = str(ROOT / "prove")
    from prove_training import imports, proof, runs

    compileall.compile_dir(ROOT / "utils", quiet=1)  # or else processes write it while others look
    os.environ.update(runs.SETTINGS)
    del sys.path[0]
    folder, said = Path.cwd(), {}
    for program in json.load(sys.stdin):
        place = folder / program["name"].replace(" ", "_")
        shutil.copytree(ROOT / "utils", place / "utils")
        os.chdir(place)
        Path("planted.py").write_text(program["text"])
        imports.load_common(Path("planted.py"), place)
        script = {"script": Path("planted.py"), "flags": program["flags"], "processes": tuple(program["processes"])}
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = proof.prove(argparse.Namespace(**OPTIONS, **script))
        said[program["name"]] = code, printed.getvalue()
        files = {path.name for path in place.iterdir()}
        assert files == {"planted.py", "utils"}, "prove has written into the user's folder"
    print(json.dumps(said))


if __name__ == "__main__":
    main()
