"""The modules of this folder, which is copied whole beside a script.

Read these eight first, in an evening; they have all that decides a number:

    scripts/mnist_mlp.py      110 lines   the loop
    loader.py, from Batch on  270         batches that are the same on any topology, and the exact mean loss
    sampler.py                100         which process reads which item, in which step
    randomness.py             110         random numbers by seed, epoch and item
    run.py                    410         steps, logging, checkpoints, resuming
    metrics.py                210         means that count each sample once
    checkpoint/folder.py      200         files that are whole or not there
    guides/same_numbers.md     90         why all this gives the same numbers

Do not read the rest until a message, a config file or a flag leads there: launch and launched (what a config file asks
for), failures/ (what happens when something goes wrong), parallel/ (one file per config or flag).

The core, in the order in which a script uses it:

    launch             creates the Accelerator for the topology in the config file
    accelerator        Accelerate's Accelerator, where it trains something else or lacks what a run needs
    launched           what the config file asks for, and whether the running processes match it
    layout             which micro-batches of a step belong to which process
    agree              processes compare what they have, and stop together if it differs
    flags              command-line flags, and the ones that every script has
    run                the bookkeeping of a run: steps, epochs, logging, checkpoints, resuming
    loader             batches of a map-style dataset, the same on any topology
    items              reads the items of datasets that are not tensors in memory, also in workers
    sampler            assigns items to processes
    randomness         random numbers that depend only on seed, epoch and item
    fingerprint        a digest of the data, to compare processes, and a run with its resume
    metrics            means over all processes that count each sample once
    checkpoint/        checkpoints: atomic, verified, readable on any topology
    run_folder         the files of a run
    progress           log lines, timings, and peak memory
    banner             the topology, versions and commit of a run, for the screen and run.json
    best               the best test result so far, for --save_best and --patience
    pretrained         --pretrained: start from pretrained weights
    sample_metrics     metrics from the values of all samples; --metrics: metrics of the library evaluate
    console            prints lines and error messages, and ends the process with one
    atomic_files       files that exist whole or not at all
    observed           what a program that judges scripts may know of a run; nothing here imports it

failures/: when something goes wrong.

    errors             what to say instead of a traceback, for errors of libraries that a user can do something about
    watchdog           each rank whose micro-batch does not end says where it is
    processes          survives a closed output; follows a launcher that is killed, or restarts its processes
    signals            SIGTERM, SIGUSR1, Ctrl-C: save, then stop all processes

parallel/: for a config file, or for a script that needs it.

    data_parallel      nn.DataParallel (dp.yaml); DistributedDataParallel that adds in the same order in all launches
    fsdp               sharded models (fsdp.yaml, cpu_fsdp.yaml)
    same_state         comparisons that find what would silently make numbers depend on the topology
    virtual_processes  --virtual_processes: the same bits on any number of processes
    shards             which rows of a sharded tensor a process has
    batch_norm         BatchNorm statistics over all processes
    pipeline           a model split over several devices

data/: where items come from. The other modules import nothing of it, so a copy can do without.

    files              the files of a folder, the splits that their names say, and `datasets.load_dataset`
    images             labelled images: their rows, or all of them decoded into memory
    image_files        images of any size and format, decoded and cropped when they are read
    text               documents, tokenized once and packed into sequences of tokens
    tar_files          samples in tar files, as webdataset lays them out, read from their place
    cache              folders that one process builds once, while the others wait
"""

VERSION = "7"  # also in run.json: which version a copy has; to update one, replace the folder
