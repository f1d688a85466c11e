"""The modules of this folder, which is copied whole beside a script.

Read these eight first, in an evening; they have all that decides a number:

    scripts/mnist_mlp.py      110 lines   the loop
    loader.py, from Batch on  270         batches that are the same on any topology, and the exact mean loss
    sampler.py                100         which process reads which item, in which step
    randomness.py             110         random numbers by seed, epoch and item
    run.py                    410         steps, logging, checkpoints, resuming
    metrics.py                200         means that count each sample once
    checkpoint/folder.py      200         files that are whole or not there
    guides/same_numbers.md     90         why all this gives the same numbers

Do not read the rest until a message, a config file or a flag leads there: launch and launched (what a config file asks
for), failures/ (what happens when something goes wrong), parallel/ (one file per config or flag), data/ (where items
come from; a copy can do without it, as the others import nothing of it). Each file's first line says what it is for:

    head -n 1 utils/*.py utils/*/*.py
"""

VERSION = "8"  # also in run.json: which version a copy has; to update one, replace the folder
