"""Weights of files: the names of originals, which values can be weights, and which have to agree."""

from __future__ import annotations

from collections import Counter, UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import CheckpointError
from ttrain.core.names import listed
from ttrain.core.spec import TensorSpec
from ttrain.device.quantized import Quantized
from ttrain.nn.module import Module

Array = NDArray[Any]
Weight = NDArray[np.float32]
TOKENS = "AutoModelForCausalLM"  # what opens a model that predicts tokens
_SCORE = "score."  # begins the name of a head of classes, which a model may start without


def unusable(values: Mapping[str, Any]) -> list[str]:
    """A sentence for each value that is no dense array or torch tensor of floating numbers in memory."""
    return [f"{name}: {problem}" for name, value in values.items() if (problem := _problem(value)) is not None]


def same(a: Any, b: Any) -> bool:
    """True if two weights have the same shape and values."""
    return tuple(a.shape) == tuple(b.shape) and bool((as_fp32(a) == as_fp32(b)).all())


def as_fp32(value: Any) -> Weight:
    """A contiguous fp32 array of an array or a tensor of any floating dtype, without a copy where possible."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().float().numpy()
    with np.errstate(over="ignore"):  # what is too large becomes infinite, which is told as such
        return np.ascontiguousarray(value, np.float32)


@dataclass(frozen=True)
class Naming:
    """Names of a model's weights in its original.

    `outside` and `block` map our modules to the original's; those of blocks.<i> lie in `prefix`.<i> there. `block` may
    name a whole weight as well. `tied` are the names of the head's and the embedding's weight, which can be one tensor.
    `agree` tells the keys that names and shapes follow from.
    """

    outside: Mapping[str, str]
    block: Mapping[str, str]
    prefix: str
    tied: Sequence[str]
    agree: str
    root: str = ""  # what names begin with, but for that of the head
    ignored: Sequence[str] = ()  # ends of names of what is no weight, such as causal masks

    def name(self, path: str) -> str:
        """Our path -> the original's name. Raises KeyError or ValueError for what the tables don't have."""
        module, _, leaf = path.rpartition(".")
        if module in self.outside:
            return f"{self.outside[module]}.{leaf}"
        _, number, inner = path.split(".", 2)
        return f"{self.prefix}.{number}." + (self.block.get(inner) or f"{self.block[inner.rpartition('.')[0]]}.{leaf}")

    def given(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Weights of a file, or of its `model`, by full name: without what torch.compile and DataParallel put before.

        Raises CheckpointError for two with one name.
        """
        weights = content["model"] if isinstance(content.get("model"), Mapping) else content
        found = [(self._full(name), w) for name, w in weights.items() if not str(name).endswith(tuple(self.ignored))]
        twice = [f"{name}: there twice" for name, count in Counter(name for name, _ in found).items() if count > 1]
        if twice:
            raise self.unfitting(twice)
        return dict(found)

    def _full(self, name: Any) -> str:
        name = str(name).removeprefix("_orig_mod.").removeprefix("module.")
        return name if name.startswith((self.root, "lm_head.", _SCORE)) else self.root + name

    def taken(
        self,
        weights: Mapping[str, Any],
        specs: Mapping[str, TensorSpec],
        strict: bool,
        stored: Callable[[str, Sequence[int]], Sequence[int]] = lambda name, shape: shape,
    ) -> dict[str, Any]:
        """Weights by the original's name -> the same by our path; `stored` gives the shape in the file of a name's.

        Raises CheckpointError naming every weight that is missing, left over or of another shape; unless `strict`,
        gives what is there under the names of this model, whatever its shape.
        """
        names = {path: self.name(path) for path in specs}
        names = {path: name for path, name in names.items() if name in weights or not name.startswith(_SCORE)}
        found = {path: weights[name] for path, name in names.items() if name in weights}
        problems = unusable({names[path]: weight for path, weight in found.items()})
        if strict and not problems:
            head, embedding = self.tied
            own = {*names.values()}
            shapes = {name: stored(name, specs[path].shape) for path, name in names.items()}
            problems = mismatches({name: w for name, w in weights.items() if name in own or name != head}, shapes)
            spare = None if head in own else weights.get(head)
            if not (problems or unusable({head: spare}) or same(spare, weights[embedding])):
                problems = [f"{head}: differs from {embedding}, which a tied model has in its place"]
        if problems:
            raise self.unfitting(sorted(problems))
        return found

    def unfitting(self, problems: Sequence[str]) -> CheckpointError:
        told = listed(problems, 8, "; ")
        return CheckpointError(f"the weights do not fit this model; {self.agree} must agree: {told}")


class NamedWeights(Module):
    """A model whose weights have other names in its original."""

    naming: Naming
    opened_by = TOKENS  # class of Transformers or sentence-transformers

    def specs(self) -> dict[str, TensorSpec]:
        """Spec of every parameter by path, without padding and adapters."""
        return {path: parameter.stored_spec for path, parameter in self.parameters(adapters=False).items()}

    @classmethod
    def original_name(cls, path: str) -> str:
        """Our parameter path -> the original's name."""
        return cls.naming.name(path)

    def to_original(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters by path -> weights under the original's names."""
        return {self.original_name(path): values[path] for path in self.specs()}

    def from_original(self, content: Mapping[str, Any], strict: bool = True) -> Mapping[str, Any]:
        """The content of an original's file (arrays or torch tensors) -> its values by path; see Naming.taken."""
        return self.naming.taken(self.naming.given(content), self.specs(), strict)


class Weights(UserDict[str, Array]):
    """Arrays by name, each made by `read` when it is asked for, so that no two have to be in memory at once."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Array]) -> None:
        super().__init__()
        self.data: dict[str, Any] = dict.fromkeys(names)
        self._read = read

    def __getitem__(self, name: str) -> Array:
        if name not in self.data:
            raise KeyError(name)
        return self._read(name)

    @classmethod
    def widened(cls, given: Mapping[str, Any]) -> Weights:
        """Arrays or tensors of any floating dtype as fp32, but for those in fewer bits."""

        def read(name: str) -> Any:
            return value if isinstance(value := given[name], Quantized) else as_fp32(value)

        return cls(given, read)


def bf16_bits(weight: Any) -> NDArray[np.uint16]:
    """The bits of a weight rounded to bf16, to the even neighbour at a tie."""
    bits = np.ascontiguousarray(weight, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


def same_when_kept(weight: Any, kept: Any) -> bool:
    """True if a weight becomes what is kept of it, in bf16 or as Quantized."""
    if not isinstance(kept, Quantized):
        return np.array_equal(bf16_bits(weight), bf16_bits(kept))
    made = Quantized.of(kept.code, weight).parts
    return all(np.array_equal(made[name], kept.parts[name]) for name in made)


def mismatches(
    given: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], spare: str = "not a weight of this model"
) -> list[str]:
    """A sentence for each value that is missing, left over, unusable or, where all can be used, of another shape."""
    problems = [f"{name}: missing" for name in shapes if name not in given]
    problems += [f"{name}: {spare}" for name in given if name not in shapes]
    own = {name: given[name] for name in shapes if name in given}
    return problems + (
        unusable(own)
        or [
            f"{name}: got {list(value.shape)}, expected {list(shapes[name])}"
            for name, value in own.items()
            if tuple(value.shape) != tuple(shapes[name])
        ]
    )


def _problem(value: Any) -> str | None:
    if isinstance(value, np.ndarray):
        return None if np.issubdtype(value.dtype, np.floating) else f"holds {value.dtype}, expected floating numbers"
    if not hasattr(value, "is_floating_point"):
        return f"is {type(value).__name__}, expected a tensor"
    if not value.is_floating_point():
        return f"holds {value.dtype}, expected floating numbers"
    if value.is_meta or str(value.layout) != "torch.strided":
        return f"is {'without values' if value.is_meta else value.layout}, expected a dense tensor"
    return None
