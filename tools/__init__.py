"""Programs that one runs by their path, from any folder:

    python tools/compare RUN OTHER          where the numbers of two runs begin to differ, and by how much
    python tools/curves RUN [RUN ...]       the metrics of a run, or of several runs, in one picture
    python tools/doctor                     the config that fits this machine, and its problems

Nothing in utils/ or scripts/ imports them.
"""
