"""Steps of small models, quicker: one answer of Accelerate is remembered.

In every step Accelerate's optimizer asks twice whether a package "lomo_optim" is installed, which searches the disk:
about 0.1 ms, a tenth of a step of mnist_mlp.py at batch 64. The answer does not change.
"""

import functools

import accelerate.optimizer


def ask_once() -> None:
    """From now on the question is answered from memory; a second call changes nothing."""
    module = accelerate.optimizer
    if not hasattr(module.is_lomo_available, "cache_info"):
        module.is_lomo_available = functools.cache(module.is_lomo_available)
