"""Start the ranks of one machine. Each runs the same command, and none outlives the others."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from ttrain.core.cores import default_threads
from ttrain.core.errors import EXIT_DONE, EXIT_INTERRUPTED, RankFailed
from ttrain.parallel.failure_store import Failure, FailureStore
from ttrain.parallel.settings import ParallelConfig, place
from ttrain.train.supervise.child import PROGRAM, Child, PassOn, describe_exit

_HOST = "127.0.0.1"
_GRACE_SECONDS = 15.0  # for the other ranks to end once one has failed
_POLL_SECONDS = 0.05


def wanted(config: ParallelConfig) -> int:
    """Return how many ranks this process is to start; 0 where it is a rank itself, or stands alone."""
    several = config.processes is not None and config.processes > 1
    return config.processes or 0 if several and place() is None else 0


def launch(config: ParallelConfig, arguments: Sequence[str], note: Callable[[RankFailed], None]) -> int:
    """Run `python -m ttrain` with these arguments on all ranks. Return the exit code of the first that fails.

    `note` is told of a rank that was killed. Signals go to all ranks, and ranks end with this process.
    """
    count = config.processes or 1
    listener = socket.socket()
    listener.bind((_HOST, 0))
    listener.listen(4 * count)
    environment = rank_environment(count, listener.getsockname()[1])
    ranks: list[Child] = []
    with PassOn(lambda: ranks) as signals:
        for rank in range(count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            ranks.append(Child([*PROGRAM, *arguments], {**environment, **own}, orphaned=signal.SIGKILL))
        from ttrain.parallel.distributed import serve  # while they start

        failures = serve(listener, count, config.timeout)
        failure = _ended(ranks, failures, signals, note)
    if failure is None:
        return EXIT_DONE
    return EXIT_INTERRUPTED if signals.received else failure.exit_code


def rank_environment(count: int, port: int) -> Mapping[str, str]:
    """Return the environment for all ranks of one machine; the process at the port keeps their store."""
    return {
        "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": _HOST, "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": str(max(1, default_threads() // count)),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else ""),
    }  # fmt: skip


def _ended(
    ranks: Sequence[Child], failures: FailureStore, signals: PassOn, note: Callable[[RankFailed], None]
) -> Failure | None:
    """Wait for all ranks. Return why they failed, None where they did not."""
    failure, until = None, 0.0
    while None in (codes := [rank.poll() for rank in ranks]) or (failure is None and any(codes)):
        bad = next(((rank, code) for rank, code in enumerate(codes) if code), None)
        if bad is not None and failure is None:
            own = Failure(bad[0], describe_exit(bad[1]), max(bad[1], 1))
            failure, until = failures.fail(own), time.monotonic() + _GRACE_SECONDS
            if failure == own and bad[1] < 0 and not signals.received:
                note(own.error(reported=False))
        elif failure is not None and time.monotonic() > until:
            for rank in ranks:
                rank.kill()
        time.sleep(_POLL_SECONDS)
    return failure
