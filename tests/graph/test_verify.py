"""Each rule of the stage verifier, broken once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.graph.tools import PAIR, recorded
from ttrain import ops
from ttrain.core.errors import GraphError
from ttrain.core.spec import TensorSpec
from ttrain.graph.verify import verify
from ttrain.optim.base import EXAMPLE
from ttrain.optim.settings import SGDConfig
from ttrain.optim.sgd import SGD

KNOWN = {"x": PAIR, "w": (2, 3), "lr": TensorSpec(())}
RULE = SGD(SGDConfig()).rule(EXAMPLE, False)


def test_a_sound_graph_is_returned() -> None:
    graph = recorded(lambda x, w: {"w": (new := ops.accumulate(w, old := x * w)), "y": ops.relu(new) + old}, KNOWN)
    assert verify(graph, "some pass") is graph


# What breaks a rule, by what is told.
BROKEN: dict[str, Any] = {
    r"= tanh\(.* which no earlier node makes": lambda graph, x: (ops.tanh(ops.relu(x)), graph.nodes.reverse()),
    "output 0 reads": lambda graph, x: ([ops.relu(x)], graph.nodes.clear()),
    "outputs that its op does not infer": lambda x: setattr(ops.relu(x), "spec", TensorSpec((3, 2))),
    r"relu\(w:.* reads w:fp32\[2, 3\], but its buffer holds": lambda x, w: (ops.assign(w, x), ops.relu(w)),
    "tanh.* but its buffer holds": lambda x, w: (v := ops.reshape(w, (6,)), ops.accumulate(w, x), ops.tanh(v)),
    "reshape.* but its buffer holds": lambda x, w: (ops.accumulate(w, x), ops.relu(ops.reshape(w, (6,)))),
    "exp.* but its buffer holds": lambda x, w: (v := ops.accumulate(w, x), ops.accumulate(v, x), ops.exp(v)),
    r"output 0 reads w:fp32\[2, 3\], but its buffer holds": lambda x, w: ([w], ops.assign(w, x)),
    "overwrites x.* which is not state": lambda x, w: (ops.accumulate(x, w),),
    "overwrites %.* which is not state": lambda x, w: (ops.accumulate(ops.relu(x), w),),
    r"overwrites w:fp32\[2, 3\] twice": lambda x, w, lr: ops.update(RULE, [[w, w], [x, x]], lr, lr) and None,
}


@pytest.mark.parametrize("said", BROKEN)
def test_a_broken_rule_is_named_with_the_pass(said: str) -> None:
    with pytest.raises(GraphError, match=f"^after some pass: .*{said}"):
        verify(recorded(BROKEN[said], KNOWN), "some pass")
