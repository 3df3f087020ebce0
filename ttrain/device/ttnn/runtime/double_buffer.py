"""Double buffering: a second tensor for every input of a step takes in the next batch while the current one computes.

Queue 1 writes the second tensors during a run, and before the next one queue 0 copies them into those that the step's
launches (or its captured trace) read. Two events order that: `written` holds the copies back, `taken` the next writes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ttrain.device.base import Launch
from ttrain.device.ttnn.tensors.layout import TileLayout

if TYPE_CHECKING:
    from ttrain.device.ttnn.runtime.mesh import Mesh
    from ttrain.device.ttnn.tensors.store import Store


class DoubleBuffer:
    """The second tensors of one step's inputs, made as they are first written."""

    def __init__(self, mesh: Mesh, store: Store) -> None:
        self._mesh, self._store = mesh, store
        self._pairs: dict[int, tuple[Any, Any]] = {}  # by the tensor's id, which the pair keeps alive
        self._taken: Any = None

    def write(self, upload: Callable[[], None]) -> Launch:
        """Run `upload`, whose writes go to the second tensors. The returned call copies what was written."""
        store, pairs = self._store, {}

        def redirect(tensor: Any, layout: TileLayout) -> Any:
            key = id(tensor)
            if key not in self._pairs:
                self._pairs[key] = (tensor, store.blank(layout))
            pairs[key] = self._pairs[key]
            return pairs[key][1]

        # New tensors may get memory that launches under way still use: the first write waits for all of them.
        free = self._mesh.record(0) if self._taken is None else self._taken
        store.redirect = redirect
        try:
            with self._mesh.second_queue(store, free):
                upload()
        finally:
            store.redirect = None
        written = self._mesh.record(1)

        def take() -> None:
            self._mesh.wait(0, written)
            for tensor, second in pairs.values():
                store.tt.copy(second, tensor)
            self._taken = self._mesh.record(0)

        return take
