"""Programs that one runs by their path, from any folder:

    python tools/prove_training train.py    whether a script trains the same on 1, 2 and 3 processes, or what is wrong
    python tools/compare RUN OTHER          where the numbers of two runs begin to differ, and by how much
    python tools/doctor                     the config that fits this machine, and its problems

Nothing in utils/ or scripts/ imports them.
"""
