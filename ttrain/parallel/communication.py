"""Exchange gradients of ranks while the device computes: on a thread of the host, or a stream of the GPU.

On both, what was started runs in order, one launch after another.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

from ttrain.device.base import Launch

_CLOSE_SECONDS = 1.0  # for what is under way as the ranks part


class CommunicationThread:
    """A thread of the host, started by the first launches. After one that raised it runs no more."""

    def __init__(self) -> None:
        self._orders: SimpleQueue[Sequence[Launch]] = SimpleQueue()
        self._outcomes: SimpleQueue[BaseException | None] = SimpleQueue()
        self._pending = 0
        self._thread: threading.Thread | None = None

    def start(self, launches: Sequence[Launch]) -> None:
        """Return at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="exchange", daemon=True)
            self._thread.start()
        self._pending += 1
        self._orders.put(launches)

    def finish(self) -> None:
        """Wait for all that was started. Raises what one of the launches raised."""
        while self._pending:
            outcome = self._outcomes.get()
            self._pending -= 1
            if outcome is not None:
                raise outcome

    def close(self) -> bool:
        """End the thread once it has done what was started. Return False where that takes too long."""
        if self._thread is None:
            return True
        self._orders.put(())
        self._thread.join(_CLOSE_SECONDS)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        outcome: BaseException | None = None
        while outcome is None and (launches := self._orders.get()):
            try:
                for launch in launches:
                    launch()
            except BaseException as error:
                outcome = error
            self._outcomes.put(outcome)


class CommunicationStream:
    """A stream of the GPU. What is captured between a start and the finish goes into the graph with its order."""

    def __init__(self) -> None:
        import torch

        self._torch, self._stream = torch.cuda, torch.cuda.Stream()
        self._pending = False

    def start(self, launches: Sequence[Launch]) -> None:
        self._stream.wait_stream(self._torch.current_stream())
        self._pending = True
        with self._torch.stream(self._stream):
            for launch in launches:
                launch()

    def finish(self) -> None:
        if self._pending:  # else there is nothing, and a capture may not wait for what it does not hold
            self._torch.current_stream().wait_stream(self._stream)
        self._pending = False

    def close(self) -> bool:
        return True
