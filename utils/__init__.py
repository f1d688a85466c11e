"""The modules of this folder, which is copied whole beside a script.

The core, in the order in which a script uses it:

    launch             creates the Accelerator for the topology in the config file
    topology           what the config file asks for, and whether the running processes match it
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
    progress           log lines, the progress bar, and timings
    banner             the topology, versions and commit of a run, for the screen and run.json
    best               the best test result so far, for --save_best and --patience
    curves             curves.png at the end of a run
    memory             peak memory, and advice when memory runs out
    watchdog           reports which rank the others wait for, or which one is lost
    processes          survives a closed output; follows a launcher that is killed, or restarts its processes
    signals            SIGTERM, SIGUSR1, Ctrl-C: save, then stop all processes
    console            prints lines, and messages instead of tracebacks for errors that a user can do something about
    atomic_files       files that exist whole or not at all

parallel/: for a config file, or for a script that needs it.

    data_parallel      nn.DataParallel (dp.yaml)
    fsdp               sharded models (fsdp.yaml, cpu_fsdp.yaml)
    same_weights       checks that all processes have the same weights, before a checkpoint
    virtual_processes  --virtual_processes: the same bits on any number of processes
    batch_norm         BatchNorm statistics over all processes
    gather_samples     every sample's value on every process
    pipeline           a model split over several devices

extras/: for a flag.

    trackers           --log_with: log to tensorboard and other trackers, too
    profiling          --profile: a table and a trace of a few steps
    pretrained         --pretrained: start from pretrained weights
    evaluate_metrics   --metrics: metrics of the library evaluate over all samples of a test
"""
