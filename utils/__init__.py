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
    memory             peak memory
    errors             what to say instead of a traceback, for errors of libraries that a user can do something about
    watchdog           reports which rank the others wait for, or which one is lost
    processes          survives a closed output; follows a launcher that is killed, or restarts its processes
    signals            SIGTERM, SIGUSR1, Ctrl-C: save, then stop all processes
    console            prints lines and error messages, and ends the process with one
    atomic_files       files that exist whole or not at all

parallel/: for a config file, or for a script that needs it.

    data_parallel      nn.DataParallel (dp.yaml)
    ddp                DistributedDataParallel with the same order of additions in all launches of a run
    fsdp               sharded models (fsdp.yaml, cpu_fsdp.yaml)
    first_step         what would make numbers depend on the number of processes, seen in the first step
    same_weights       checks that all processes have the same weights, before a checkpoint
    virtual_processes  --virtual_processes: the same bits on any number of processes
    shards             which rows of a sharded tensor a process has
    batch_norm         BatchNorm statistics over all processes
    gather_samples     every sample's value on every process
    pipeline           a model split over several devices

data/: where items come from. The other modules import nothing of it, so a copy can do without.

    files              the files of a folder, the splits that their names say, and `datasets.load_dataset`
    images             labelled images: their rows, or all of them decoded into memory
    image_files        images of any size and format, decoded and cropped when they are read
    text               documents, tokenized once and packed into sequences of tokens
    tar_files          samples in tar files, as webdataset lays them out, read from their place
    cache              folders that one process builds once, while the others wait

extras/: for a flag.

    trackers           --log_with: log to tensorboard and other trackers, too
    pretrained         --pretrained: start from pretrained weights
    evaluate_metrics   --metrics: metrics of the library evaluate over all samples of a test
    data_sheets        the peak speed of GPUs, for MFU
"""

VERSION = "7"  # also in run.json: which version a copy has; to update one, replace the folder
