"""Proves that a training script trains the same on one, two and three processes, or names what is wrong in it.

    python tools/prove_training train.py [flags of the script]
    python tools/prove_training --resume_flags "--resume last.pt" train.py --lr 0.1

Any script that trains with Accelerate or with torch.distributed, unchanged. The map:

    command         the command line
    proof           what is run, and in which order; the report
    imports         what the script imports, once for all processes
    runs            a run of the script: its processes, where they can harm nothing
    sandbox         what keeps the user's files as they are
    recording       what one process records, and its recorders, each with one job:
      same_work       the same samples per step on each number of processes
      data            batches: who reads which samples
      models          models, optimizers and steps
      evaluations     what is said after a test
      processes       collective calls
      starting        process groups, and scripts that start their processes themselves
      files           what is saved and loaded
      global_loader   scripts that train through GlobalLoader and Run
    stages          what the records show, in the order in which things happen
      single          of one process alone
      several         of several: samples, losses, rates, steps, evaluations
      unfinished      why a run has not ended
    resuming        what the record of a resumed run shows
    mistakes        what to do about each mistake
    picture         who read which sample
    tensors, text   small things

Imports nothing but torch and NumPy, Accelerate where it is installed, and matplotlib for the picture.
"""

__version__ = "1.0"
