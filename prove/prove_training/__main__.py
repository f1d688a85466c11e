"""`python -m prove_training`, or `python path/to/prove_training`: also in a folder that has a utils.py or queue.py."""

import sys

if not (__package__ and getattr(sys.flags, "safe_path", False)):  # Python 3.11
    del sys.path[0]  # the working directory or this folder, whose modules must not shadow others
if not __package__:  # run by its path
    import importlib.util
    import os

    folder = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.util.spec_from_file_location(
        "prove_training", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    package = sys.modules["prove_training"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)

from prove_training.command import main

if __name__ == "__main__":
    sys.exit(main())
