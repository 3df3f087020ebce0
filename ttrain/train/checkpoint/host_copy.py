"""A copy in host memory of the part of a state that one rank writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from ttrain.core.spec import TensorSpec, stored_part_name
from ttrain.engine.state import State
from ttrain.graph.kinds import Kind
from ttrain.parallel.ranks import Ranks
from ttrain.train.protocols import SAVED_KINDS, Array, StateValues


class HostCopy:
    """The saved part of a state in host memory, as it is now; with or without the values that are frozen.

    Several ranks divide it: each has the parts that it alone holds, and some of the tensors that all hold.
    """

    def __init__(self, state: StateValues, frozen: bool = True, ranks: Ranks | None = None) -> None:
        ranks = ranks or Ranks()
        kinds = [kind for kind in SAVED_KINDS if frozen or kind is not Kind.FROZEN]
        self._kept: dict[str, tuple[Kind, TensorSpec, Array]] = {}
        of = {name: kind for kind in kinds for name in state.names(kind)}
        divided = cast(State, state)
        parts = {name: divided.own_parts(name) for name in of} if ranks.count > 1 else dict.fromkeys(of)
        whole = {name: state.spec(name).nbytes for name, own in parts.items() if own is None}
        mine = shared_out(whole, ranks)
        for name, kind in of.items():
            spec = state.spec(name)
            if name in mine:
                self._kept[name] = kind, spec, state.read(name)
            for part in parts[name] or ():
                values = divided.read_part(name, part)
                if part == (0, spec.size):
                    self._kept[name] = kind, spec, values.reshape(spec.shape)
                else:
                    cut = stored_part_name(name, part, spec.shape)
                    self._kept[cut] = kind, spec.with_shape(len(values)), values

    def names(self, *kinds: Kind) -> list[str]:
        return [name for name, (kind, _, _) in self._kept.items() if not kinds or kind in kinds]

    def spec(self, name: str) -> TensorSpec:
        return self._kept[name][1]

    def read(self, name: str) -> Array:
        return self._kept[name][2]


def shared_out(sizes: Mapping[str, int], ranks: Ranks) -> set[str]:
    """The names that a rank takes, so that all have about as much."""
    loads, mine = [0] * ranks.count, set()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        rank = loads.index(min(loads))
        loads[rank] += sizes[name]
        if rank == ranks.rank:
            mine.add(name)
    return mine
