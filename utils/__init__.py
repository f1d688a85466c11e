"""The map of this folder: what every script takes along, what can be left out, and the commands.

The core, in the order in which a script meets it:

    launch             the Accelerator for the topology that the config file asks for
    topology           what the config asks for, and whether that runs
    flags              command-line flags, and those that every script has
    run                the bookkeeping of a run: steps, epochs, log, checkpoints, resume
    loader             batches of any map-style dataset, the same on any topology
    items              reads the items of data that are not tensors in memory, by workers too
    sampler            which items each process reads
    randomness         random numbers that depend on seed, epoch and item alone
    fingerprint        a digest of the data: have two processes, or a run and its resume, the same?
    metrics            means over all processes; each sample counts once
    checkpoint/        checkpoints: whole or not there, verified, readable on any topology
    run_folder         the files that a run leaves
    progress           what a run shows, and how long its parts take
    best               which test was the best so far
    signals            SIGTERM, SIGUSR1, Ctrl-C: save, then stop on all processes
    errors             a sentence in place of a traceback, where a user can do something about it
    console            lines on the screen
    atomic_files       files that are there whole or not at all

features/: each module can be left out, and its flag goes with it; its README.md lists them.

datasets/: where items come from.

    images_in_memory   a folder or a data set of the Hub, decoded into memory once
    image_decoding     image files of any format and colour, as grey or RGB
    image_files        image files of any size, decoded when needed, and augmented
    text               documents from a folder, parquet or the Hub, packed into lines of tokens
    tokens             bytes, byte pairs that are learned from the text, or a tokenizer.json

Commands: `python -m utils.NAME`, from the folder above.

    doctor/            inspects the machine, and names the config that fits
    take/              copies a script and what it needs into a folder of yours
    prove/             runs a script on several topologies, and names the first thing that differs
    compare/           compares runs: where their numbers begin to differ, and by how much

No core module imports a feature or a command at the top of its file, and no feature imports a command.
"""
