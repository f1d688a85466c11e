"""Several runs in one launch, as run_many.py; those that stop, because the hosts differ, do not end the launch."""

import shlex
import sys

import run_many

script, *runs = sys.argv[1:]
codes = [run_many.run(script, shlex.split(flags)) for flags in runs]
sys.exit(codes[-1])
