"""--max_restarts of the launcher: processes that it restarts after a failure continue the run."""

import os

from accelerate.utils import gather_object

from ..console import stop


def check_that_it_can_continue(is_new_folder: bool) -> None:
    """Check that restarted processes find each other, and the checkpoints.

    Args:
        is_new_folder: the run has no --output_dir, and writes to a new folder.

    Raises:
        SystemExit: if not.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # pytorch/pytorch#135712
        stop(
            "--max_restarts needs --rdzv_backend c10d and TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: otherwise restarted "
            "processes find the addresses of the old ones in the launcher's store"
        )
    if is_new_folder:
        stop("--max_restarts needs an --output_dir, to continue from the checkpoints in it")


def was_restarted() -> bool:
    """Whether the launcher restarted any process. Collective.

    On a machine where no process failed the launcher's count stays 0.
    """
    count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    return any(gather_object([count]))
