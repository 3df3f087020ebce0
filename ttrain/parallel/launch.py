"""Starting the ranks of one machine, each the same command, by torch's own launcher."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Sequence

from ttrain.core.cores import default_threads
from ttrain.core.errors import EXIT_DONE, EXIT_FAILURE
from ttrain.parallel.place import place
from ttrain.parallel.settings import ParallelConfig


def wanted(config: ParallelConfig) -> int:
    """How many ranks this process is to start, 0 where it is one itself, or stands alone."""
    several = config.processes is not None and config.processes > 1
    return config.processes or 0 if several and place() is None else 0


def launch(processes: int, arguments: Sequence[str]) -> int:
    """Runs `python -m ttrain` with these arguments as so many ranks, and returns the exit code of the first to fail."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # a rank's own message tells more
    os.environ["OMP_NUM_THREADS"] = str(max(1, default_threads() // processes))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1, start_method="spawn",
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", "ttrain", *arguments)
    except ChildFailedError as error:
        first = error.get_first_failure()[1]
        return first.exitcode if first.exitcode > 0 else EXIT_FAILURE
    return EXIT_DONE
