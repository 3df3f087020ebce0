"""LoRA (Hu et al., 2021): trained products of two narrow matrices beside the linear layers of a frozen model.

A packed projection, such as queries, keys and values in one, gets one adapter over its whole output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any
from weakref import ref

from ttrain import ops
from ttrain.core.errors import ConfigError
from ttrain.core.names import did_you_mean, listed
from ttrain.device.quantized import BLOCK
from ttrain.graph import Graph, Value
from ttrain.nn.experts import ExpertLinear
from ttrain.nn.initialize import Constant
from ttrain.nn.layers import Linear
from ttrain.nn.module import Module, Parameter
from ttrain.nn.settings import LoraConfig

ALL = "all-linear"
_STREAMS = 1 << 20  # of random bits for the adapters of one pass of the model, behind those of its own dropouts


class Adapter(Module):
    """x [..., inputs] -> alpha/rank B A dropout(x) [..., outputs], A [rank, inputs], B [outputs, rank].

    A starts as torch.nn.Linear's weight does, B with zeros, so that nothing is added at first. `number` tells the
    dropout masks of the adapters of a model apart. Under muP only A, which sums over the width, learns more slowly in a
    wider model.
    """

    def __init__(self, weight: Parameter, rank: int, config: LoraConfig, number: int) -> None:
        """`weight` [outputs, inputs] is that of the layer; stacked weights [experts, ...] get stacked adapters."""
        *experts, outputs, inputs = weight.shape
        layer: Any = partial(ExpertLinear, experts[0]) if experts else partial(Linear, bias=False)
        self.a: Linear = layer(inputs, rank)
        self.b: Linear = layer(rank, outputs, weight_initializer=Constant(0.0))
        self.a.weight.width_ratio = weight.width_ratio
        self.scale, self._p, self._number = config.scale, config.dropout, number
        self.new = config.from_ is None
        # The graph of the last use, and how many uses it had before: a layer may have several in a step.
        self._last: tuple[Callable[[], Graph | None], int] = (lambda: None), 0

    def __call__(self, x: Value, *offsets: Value) -> Value:
        seed = x.graph.inputs.get("seed")  # steps without it, such as evaluation, drop nothing
        if seed is not None:
            graph, again = self._last
            again = again + 1 if graph() is x.graph else 0
            self._last = ref(x.graph), again
            x = ops.dropout(x, seed, self._p, (1 + again) * _STREAMS + self._number)
        return self.b(self.a(x, *offsets) * self.scale, *offsets)


def attach(model: Module, config: LoraConfig) -> None:
    """Freeze a model and give the linear layers that the config names their adapters.

    The weights of all linear layers of blocks are kept in the bits of the config's base. Raises ConfigError for a
    target that names no layer, and for a layer that does not fit the base.
    """
    assert config.rank, "there is nothing to attach"
    layers = {path: layer for path, layer in model.modules() if isinstance(layer, Linear) and _in_block(path)}
    original = getattr(model, "original_name", None)
    key = "lora.targets" if config.from_ is None else f"lora.targets, those of lora.from={config.from_}"
    chosen = targets(config.targets, {path: names(path, original) for path in layers}, key)
    for parameter in model.parameters().values():
        parameter.trainable = False
    for path, layer in layers.items():
        *experts, _, inputs = layer.weight.shape
        if config.base is not None and (experts or (config.base == "nf4" and inputs % BLOCK)):
            told = "holds experts" if experts else f"reads {inputs} features, expected a multiple of {BLOCK}"
            raise ConfigError(f"lora.base={config.base}: {path} {told}. Give another lora.base, or null.")
        layer.weight.code = config.base
    for number, path in enumerate(chosen):
        layers[path].lora = Adapter(layers[path].weight, config.rank, config, number)
    model.name_parameters()


def starts_bare(model: Module) -> bool:
    """Return whether a model has adapters and began as it is without them: they are not those of lora.from."""
    return any(isinstance(module, Adapter) and module.new for _, module in model.modules())


@contextmanager
def without_adapters(model: Module) -> Iterator[None]:
    """Let layers record what they compute without their adapters meanwhile: the model before it was fine-tuned."""
    held = [(layer, layer.lora) for _, layer in model.modules() if isinstance(layer, Linear)]
    try:
        for layer, _ in held:
            layer.lora = None
        yield
    finally:
        for layer, adapter in held:
            layer.lora = adapter


def names(path: str, original: Callable[[str], str] | None) -> tuple[str, ...]:
    """Names of a layer: its path, and its name in the original."""
    return (path,) if original is None else (path, original(f"{path}.weight").removesuffix(".weight"))


def targets(wanted: list[str], layers: Mapping[str, tuple[str, ...]], key: str) -> list[str]:
    """Paths of the layers that are wanted, of `layers` with their names. Raises ConfigError, which names the `key`."""
    found = {target: [path for path, called in layers.items() if _named(target, called)] for target in wanted}
    ends = {name.rpartition(".")[2] for called in layers.values() for name in called}
    unknown = [target for target, paths in found.items() if not paths]
    if unknown:
        told = listed(map(repr, unknown))
        raise ConfigError(f"{key}: no linear layer of a block is {told}. {did_you_mean(unknown[0], ends)}")
    if not wanted:
        raise ConfigError(f"{key}=[]: nothing would be trained. Name some of {', '.join(sorted(ends))}.")
    chosen = {path for paths in found.values() for path in paths}
    return [path for path in layers if path in chosen]


def _named(target: str, called: tuple[str, ...]) -> bool:
    return target == ALL or any(fnmatchcase(name, each) for name in called for each in (target, f"*.{target}"))


def _in_block(path: str) -> bool:
    """True for a layer in a list of modules: heads are read in other ways than by calling them."""
    return any(part.isdecimal() for part in path.split("."))
