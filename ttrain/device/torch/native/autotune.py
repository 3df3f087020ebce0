"""Autotuner of matrix products: it measures own code and libraries, and chooses a backend for each product.

Products of libraries put all kernels of a plan on OpenMP's threads. So a product that a library makes faster by itself
is no gain yet: where such products promise one, whole steps are timed both ways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from ttrain.core.spec import DType
from ttrain.core.waiting import Waiting, waited_for
from ttrain.device.torch.kernels.costs import TIE, Costs, winner
from ttrain.device.torch.kernels.matmul import LIBRARIES, OWN
from ttrain.device.torch.native.codegen import Request

FASTEST = "fastest"
LONGEST = 0.5  # seconds of both steps together by their products; longer ones are compared by these alone
Backends = dict[Request, str]  # of products: OWN or the name of a library


def backends_of(request: Request) -> tuple[str, ...]:
    """Return the backends of a product; all but fp32 reaches oneDNN through aten alone."""
    return (OWN, *LIBRARIES) if request.input(0).dtype is DType.FP32 else (OWN, "aten")


def choose_backends(
    counts: Counter[Request],
    alone: Callable[[Request], Costs | None],
    together: Callable[[Mapping[str, Backends]], Costs | None],
    mixed_anyway: bool = False,
) -> Backends:
    """Return a backend for every product of a plan, which has each `counts` times; none where times are missing.

    `alone` gives the seconds of a product by backend, `together` those of a step by candidate: all products OWN, each
    by its fastest backend (FASTEST), or all by one library. A step is timed only where the sums of products promise
    more than TIE, and never where it is `mixed_anyway`.
    """
    timed = waited_for(counts, "Timing products", lambda request: str(request).partition(" ->")[0])
    costs = {request: alone(request) for request in timed}
    known = {request: cost for request, cost in costs.items() if cost is not None}
    if len(known) < len(costs):
        return {}
    fastest = {request: winner(cost, OWN) for request, cost in known.items()}
    if mixed_anyway:
        return fastest
    shared = [library for library in LIBRARIES if all(library in cost for cost in known.values())]
    candidates = {OWN: dict.fromkeys(counts, OWN), FASTEST: fastest}
    candidates |= {library: backends for library in shared if (backends := dict.fromkeys(counts, library)) != fastest}
    sums = {
        name: sum(count * known[request][backends[request]] for request, count in counts.items())
        for name, backends in candidates.items()
    }
    if winner(sums, OWN) == OWN:
        return candidates[OWN]
    candidates = {name: each for name, each in candidates.items() if name == OWN or sums[OWN] > TIE * sums[name]}
    with Waiting("Timing steps with other products"):
        measured = together(candidates) if sums[OWN] + sums[FASTEST] <= LONGEST else sums
    return {} if measured is None else candidates[winner(measured, OWN)]
