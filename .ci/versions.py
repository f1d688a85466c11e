"""Write down, in tests/versions.json, the versions with which .ci/run has just passed.

python .ci/versions.py newest    # or oldest, as the argument of .ci/run
"""

import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "tests" / "versions.json"

passed = json.loads(FILE.read_text()) if FILE.exists() else {}
packages = ("torch", "torchvision", "accelerate", "datasets", "evaluate")
passed[sys.argv[1]] = {"Python": platform.python_version()} | {name: version(name) for name in packages}
FILE.write_text(json.dumps(passed, indent=1) + "\n")
