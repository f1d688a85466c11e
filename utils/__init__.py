"""The map of this folder: what every script takes along, what can be left out, and the commands.

Copy it whole beside a script. The core, in the order in which a script meets it:

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
    processes          output that is closed, a launcher that is killed or restarts its processes
    signals            SIGTERM, SIGUSR1, Ctrl-C: save, then stop on all processes
    errors             a sentence in place of a traceback, where a user can do something about it
    console            lines on the screen
    atomic_files       files that are there whole or not at all

parallel/: what a config file or a script asks for.

    data_parallel      nn.DataParallel (dp.yaml), with the loss on each GPU
    fsdp               sharded models (fsdp.yaml)
    same_weights       compares the weights of the processes before each checkpoint, and the numbers of each test
    virtual_processes  --virtual_processes: the same bits on any number of processes
    batch_norm         BatchNorm statistics over all processes
    gather_samples     every sample's value on every process
    pipeline           a model cut over several devices

extras/: what a flag asks for, and what a run shows and watches.

    banner             what is going to run, on the screen and in run.json, with versions and commit
    peak_memory        peak memory, in summary.json
    curves             curves.png at the end of a run
    out_of_memory      advice, and the largest batch that fits
    watchdog           names the rank that the others wait for, or that is gone
    trackers           --log_with: log to tensorboard and the like, too
    profiling          --profile: a table and a trace of some steps
    pretrained         --pretrained: start from weights of others
    sampling           repeated augmentation

datasets/: where items come from.

    images_in_memory   a folder or a data set of the Hub, decoded into memory once
    image_decoding     image files of any format and colour, as grey or RGB
    image_files        image files of any size, decoded when needed, and augmented
    text               documents from a folder, parquet or the Hub, packed into sequences of tokens
    hub                a data set of the Hub, or of a folder in the same form
"""
