"""Fewer columns in the matrices U of a trained AGILLM-3, for the same scores.

Scores see a layer's U only through M = U U^T. With M = Q diag(lambda) Q^T, the matrix U' = Q_kept sqrt(lambda_kept) has
U' U'^T = M up to the eigenvalues left out, and as many columns as M has rank: at most the head width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
