"""AGILLM-3's weights under the names of the original, both ways, and its matrices U with fewer columns.

The original keeps three dictionaries: `core` (embedding, blocks, last norm), `ar` and `sat` (the heads). Flat files
name a weight `core.emb.weight`. Values stay what they are, arrays or tensors of any floating dtype.

Scores see a layer's U only through M = U U^T. With M = Q diag(lambda) Q^T, the matrix U' = Q_kept sqrt(lambda_kept) has
U' U'^T = M up to the eigenvalues left out, and as many columns as M has rank: at most the head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ttrain.core.errors import CheckpointError
from ttrain.core.names import listed
from ttrain.models.settings import PUBLISHED, AGILLMConfig
from ttrain.models.weight_checks import NamedWeights, Naming, unusable

PARTS = ("core", "ar", "sat")
NAMING = Naming(**PUBLISHED["names"]["agillm"])


class AGILLMWeights(NamedWeights):
    """The weights of an AGILLM-3 as the original names them, which keeps a tied weight under both of its names."""

    naming = NAMING
    config: AGILLMConfig

    def to_original(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters by path -> weights under the original's flat names."""
        weights, (head, embedding) = super().to_original(values), NAMING.tied
        return {**weights, head: weights.get(head, weights[embedding])}

    def original_file(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the original keeps of a model in a file: the weights of its parts, and its sizes."""
        config = self.config
        sizes = {"d": config.width, "layers": config.layers, "heads": config.heads, "rank": config.rank}
        return {**nested(self.to_original(values)), "cfg": sizes, "tie_weights": config.tied}

    def original_config(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Read what a file of the original says of its model besides shapes, by our keys."""
        cfg, tied = content.get("cfg"), content.get("tie_weights")
        heads = {"heads": cfg["heads"]} if isinstance(cfg, Mapping) and "heads" in cfg else {}
        if "ar_head.weight" in content:
            tied = False
        return heads | ({"tied": tied} if isinstance(tied, bool) else {})

    def from_original(self, content: Mapping[str, Any], strict: bool = True) -> dict[str, Any]:
        """The content of an original's file -> its values by our path; see Naming.taken."""
        return NAMING.taken(flat(content), self.specs(), strict)


def nested(weights: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Flat names -> the three dictionaries; `sat` is left out for a model without that head."""
    parts = {
        part: {name[len(part) + 1 :]: weight for name, weight in weights.items() if name.startswith(f"{part}.")}
        for part in PARTS
    }
    return {part: named for part, named in parts.items() if named}


def flat(content: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a file by flat name: nested or flat, whole or one of the weight-only files of the original.

    Raises CheckpointError for content that is none of these, and for weights that are no floating tensors.
    """
    content = content.get("weights", content) if isinstance(content.get("weights"), Mapping) else content
    found: Mapping[Any, Any] = content
    if isinstance(content.get("core"), Mapping):
        parts = {part: content[part] for part in PARTS if isinstance(content.get(part), Mapping)}
        found = {f"{part}.{name}": weight for part, named in parts.items() for name, weight in named.items()}
    weights = {str(name).replace("_orig_mod.", ""): weight for name, weight in found.items()}  # of torch.compile
    weights = {name: weight for name, weight in weights.items() if name.partition(".")[0] in PARTS}
    if "core.emb.weight" not in weights:
        shown = ", ".join(map(str, list(content)[:5])) or "nothing"
        raise CheckpointError(
            f"the file holds no weights of AGILLM-3: got {shown}; expected a dictionary `core` with emb.weight, and "
            "the heads `ar` and `sat`."
        )
    if problems := unusable(weights):
        raise CheckpointError("the file holds values that are no weights:\n  " + listed(problems, 20, "\n  "))
    return weights


def sizes_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The model keys that weights in our names or the original's say: all sizes, vocabulary, tied and objective.

    `heads` follows from the width and that of U. Raises CheckpointError where that can't be.
    """
    ours = "embedding.weight" in content
    given = dict(_renamed(content)) if ours else flat(content)
    embedding, rank_matrix = (_matrix(given.get(name)) for name in ("core.emb.weight", "core.blocks.0.mha.U"))
    blocks = {name.split(".")[2] for name in given if name.startswith("core.blocks.")}
    if embedding is None or rank_matrix is None or embedding[1] % rank_matrix[0]:
        raise CheckpointError(
            "the file has no matrix core.blocks.0.mha.U of [head width, rank] that fits a matrix core.emb.weight of "
            "[vocabulary, width]."
        )
    vocabulary, width = embedding
    return {
        "layers": len(blocks),
        "width": width,
        "heads": width // rank_matrix[0],
        "rank": rank_matrix[1],
        "vocabulary": vocabulary,
        # The original writes a tied head under its own name as well; a file without any has lost its head.
        "tied": "ar.proj.bias" not in given and (ours or "ar.proj.weight" in given),
        "objective": "joint" if any(name.startswith("sat.") for name in given) else "ar_only",
    }


def _renamed(content: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield weights under the original's names; those that no model has are left out."""
    for path, weight in content.items():
        with suppress(AttributeError, KeyError, ValueError):
            yield NAMING.name(path), weight


def _matrix(value: Any) -> tuple[int, int] | None:
    """[rows, columns] of a matrix that is not empty, None of anything else."""
    rows, *columns = getattr(value, "shape", ()) or (0,)
    return (int(rows), int(columns[0])) if len(columns) == 1 and rows and columns[0] else None


Matrix = NDArray[np.float32]
EPS = 1e-6  # of the largest eigenvalue: smaller ones are left out


def compact(matrix: Matrix, eps: float = EPS) -> Matrix:
    """U [head width, rank] -> U' [head width, kept]; U itself where that has no fewer columns."""
    wide = np.asarray(matrix, np.float64)
    values, vectors = np.linalg.eigh(wide @ wide.T)
    keep = values > eps * max(float(values[-1]), float(np.finfo(np.float64).tiny))  # eigh sorts them
    if not keep.any():
        keep[-1] = True
    if int(keep.sum()) >= matrix.shape[1]:
        return matrix
    return (vectors[:, keep] * np.sqrt(np.maximum(values[keep], 0))).astype(np.float32)


def compacted(matrices: Mapping[int, Matrix], eps: float = EPS) -> tuple[dict[int, Matrix], dict[str, Any]]:
    """Rank matrices by layer -> theirs after compaction, all as wide as the widest, and a report as JSON values.

    The model has one rank, so narrower ones get columns of zeros, which change nothing. The report tells of each layer
    the columns before, those that carry something, and the error of M relative to its largest entry.
    """
    reduced = {layer: compact(matrix, eps) for layer, matrix in matrices.items()}
    rank = max(matrix.shape[1] for matrix in reduced.values())
    layers = [
        {"layer": layer, "before": old.shape[1], "kept": reduced[layer].shape[1], "error": _error(old, reduced[layer])}
        for layer, old in matrices.items()
    ]
    padded = {layer: np.pad(matrix, ((0, 0), (0, rank - matrix.shape[1]))) for layer, matrix in reduced.items()}
    return padded, {"layers": layers, "rank": rank}


def _error(before: Matrix, after: Matrix) -> float:
    old, new = (np.asarray(m, np.float64) @ np.asarray(m, np.float64).T for m in (before, after))
    return float(np.abs(new - old).max() / max(np.abs(old).max(), np.finfo(np.float64).tiny))


def rank_matrix_path(layer: int) -> str:
    """Path of a layer's U among the parameters."""
    return f"blocks.{layer}.attention.rank_matrix"
