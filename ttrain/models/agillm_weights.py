"""AGILLM-3's weights under the names of the original, both ways.

The original keeps three dictionaries: `core` (embedding, blocks, last norm), `ar` and `sat` (the heads). Flat files
name a weight `core.emb.weight`. Values stay what they are, arrays or tensors of any floating dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ttrain.core.errors import CheckpointError
from ttrain.core.spec import TensorSpec

PARTS = ("core", "ar", "sat")
_COMPILED = "_orig_mod."  # what torch.compile puts before names
_BLOCK = {
    "attention_norm": "ln1",
    "attention.query": "mha.q",
    "attention.key": "mha.k",
    "attention.value": "mha.v",
    "attention.projection": "mha.proj",
    "feed_forward_norm": "ln2",
    "feed_forward.up": "ff.0",
    "feed_forward.down": "ff.2",
}
_OUTSIDE = {
    "embedding": "core.emb",
    "norm": "core.ln",
    "ar_head": "ar.proj",
    "sat_head": "sat.proj",
    "sat_head.gate": "sat.gate",
}
_TIED = {"ar.proj.weight": "embedding.weight"}  # the original keeps a tied weight under both of its names
_SHOWN = 20


def original_name(path: str) -> str:
    """Our path -> the original's: blocks.3.attention.key.weight -> core.blocks.3.mha.k.weight."""
    module, _, leaf = path.rpartition(".")
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{leaf}"
    _, number, inner = path.split(".", 2)
    if inner == "attention.rank_matrix":
        return f"core.blocks.{number}.mha.U"
    return f"core.blocks.{number}.{_BLOCK[inner.rpartition('.')[0]]}.{leaf}"


def to_original(values: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> dict[str, Any]:
    """Parameters by our path -> values by the original's flat name."""
    weights = {original_name(path): values[path] for path in specs}
    for name, path in _TIED.items():
        if name not in weights:
            weights[name] = weights[original_name(path)]
    return weights


def nested(weights: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Flat names -> the three dictionaries; `sat` is left out for a model without that head."""
    parts: dict[str, dict[str, Any]] = {}
    for name, weight in weights.items():
        part, _, rest = name.partition(".")
        parts.setdefault(part, {})[rest] = weight
    return parts


def flat(content: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a file by flat name: nested or flat, whole or one of the weight-only files of the original.

    Raises CheckpointError for content that is none of these.
    """
    content = content.get("weights", content) if isinstance(content.get("weights"), Mapping) else content
    if isinstance(content.get("core"), Mapping):
        parts = {part: content[part] for part in PARTS if isinstance(content.get(part), Mapping)}
        found = {
            f"{part}.{name.replace(_COMPILED, '')}": w for part, named in parts.items() for name, w in named.items()
        }
    else:
        found = {name.replace(_COMPILED, ""): weight for name, weight in content.items()}
    weights = {name: weight for name, weight in found.items() if name.partition(".")[0] in PARTS}
    if "core.emb.weight" not in weights:
        shown = ", ".join(map(str, list(content)[:5])) or "nothing"
        raise CheckpointError(
            f"the file holds no weights of AGILLM-3: got {shown}; expected a dictionary `core` with emb.weight, and "
            "the heads `ar` and `sat`."
        )
    return weights


def from_original(content: Mapping[str, Any], specs: Mapping[str, TensorSpec], strict: bool = True) -> dict[str, Any]:
    """The content of an original's file -> its values by our path.

    Raises CheckpointError naming every weight that is missing, left over or of another shape; unless `strict`, gives
    what is there under the names of this model, whatever its shape.
    """
    given = flat(content)
    names = {path: original_name(path) for path in specs}
    if not strict:
        return {path: given[name] for path, name in names.items() if name in given}
    spare = {name for name in given if name in _TIED and name not in names.values()}
    problems = [f"{name}: missing" for name in names.values() if name not in given]
    problems += [f"{name}: not a weight of this model" for name in given if name not in {*names.values(), *spare}]
    problems += list(_other_shapes(given, names, specs))
    if problems:
        shown = "\n".join(f"  {problem}" for problem in problems[:_SHOWN])
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(
            "the weights do not fit this model; layers, width, heads, rank, vocabulary, tied and objective must "
            "agree:\n" + shown + more
        )
    return {path: given[name] for path, name in names.items()}


def _other_shapes(given: Mapping[str, Any], names: Mapping[str, str], specs: Mapping[str, TensorSpec]) -> Iterator[str]:
    for path, name in names.items():
        if name in given and tuple(given[name].shape) != specs[path].shape:
            yield f"{name}: got {list(given[name].shape)}, expected {list(specs[path].shape)}"


def sizes_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The model keys that weights in our names or the original's say: all sizes, vocabulary, tied and objective.

    `heads` follows from the width and that of U. Raises CheckpointError where that can't be.
    """
    ours = "embedding.weight" in content
    given = {original_name(path): weight for path, weight in content.items()} if ours else flat(content)
    vocabulary, width = given["core.emb.weight"].shape
    blocks = {name.split(".")[2] for name in given if name.startswith("core.blocks.")}
    rank_matrix = given.get("core.blocks.0.mha.U")
    if not blocks or rank_matrix is None or width % rank_matrix.shape[0]:
        raise CheckpointError(
            "the file has no matrix core.blocks.0.mha.U of [head width, rank] that fits its embedding."
        )
    return {
        "layers": len(blocks),
        "width": int(width),
        "heads": int(width // rank_matrix.shape[0]),
        "rank": int(rank_matrix.shape[1]),
        "vocabulary": int(vocabulary),
        "tied": "ar.proj.bias" not in given,
        "objective": "joint" if any(name.startswith("sat.") for name in given) else "ar_only",
    }
