"""Muon: the momentum of a hidden matrix, or of each in a stack, is made near orthogonal. AdamW updates all others."""

from __future__ import annotations

from math import sqrt

from ttrain import ops
from ttrain.core.spec import DType
from ttrain.graph import Value
from ttrain.nn.module import Parameter
from ttrain.ops.update import Rule, update_rule
from ttrain.optim.adamw import AdamW
from ttrain.optim.base import EXAMPLE, Optimizer, rule_cases
from ttrain.optim.groups import orthogonalised
from ttrain.optim.settings import AdamWConfig, MuonConfig, NorMuonConfig

QUINTIC = (3.4445, -4.7750, 2.0315)  # of Newton-Schulz: steepest at 0, singular values end between 0.7 and 1.2
RMS = 0.2  # of an element of AdamW's update (Liu et al., 2025)
_LEAST = 1e-7  # of a norm that is divided by


@update_rule
def muon(
    parameter: Value,
    gradient: Value,
    momentum: Value,
    lr: Value,
    step: Value,
    beta: float,
    nesterov: bool,
    iterations: int,
    scale: float,
    parts: int,
) -> tuple[Value, Value]:
    """Muon: m <- beta m + (1 - beta) g; the direction is scale * orthogonal(m) (Jordan et al., 2024).

    Nesterov's look ahead takes beta m + (1 - beta) g in place of m.
    """
    matrices, momentum = _momentum(gradient, momentum, beta, nesterov, parts)
    return ops.reshape(orthogonal(matrices, iterations, scale), gradient.shape), momentum


@update_rule
def normuon(
    parameter: Value,
    gradient: Value,
    momentum: Value,
    second: Value,
    lr: Value,
    step: Value,
    beta: float,
    nesterov: bool,
    iterations: int,
    scale: float,
    parts: int,
    beta2: float,
) -> tuple[Value, Value, Value]:
    """NorMuon: muon's direction o, with every neuron's row as long as the others (Li et al., 2025).

    v <- b2 v + (1 - b2) mean(o^2) over a row; o / (sqrt(v) + 1e-8) is scaled as a whole to the root mean square `scale`
    of an element.
    """
    matrices, momentum = _momentum(gradient, momentum, beta, nesterov, parts)
    o = ops.cast(ops.reshape(orthogonal(matrices, iterations, 1.0), gradient.shape), DType.FP32)
    second = beta2 * second + (1 - beta2) * ops.mean(o * o, -1)
    o = _matrices(o / (ops.sqrt(second) + 1e-8), parts)
    size = sqrt(o.shape[-2] * o.shape[-1])
    return ops.reshape(o * (scale * size / (_norm(o) + _LEAST)), gradient.shape), momentum, second


@update_rule
def descend(parameter: Value, direction: Value, lr: Value, step: Value, weight_decay: float) -> Value:
    """p <- p (1 - lr weight_decay) - lr d."""
    return parameter * (1.0 - weight_decay * lr) - lr * direction


def _momentum(gradient: Value, momentum: Value, beta: float, nesterov: bool, parts: int) -> tuple[Value, Value]:
    """Return the direction as matrices in the gradient's dtype, and the new momentum in fp32."""
    wide = (1 - beta) * ops.cast(gradient, DType.FP32)
    momentum = beta * momentum + wide
    look = beta * momentum + wide if nesterov else momentum
    return _matrices(ops.cast(look, gradient.spec.dtype), parts), momentum


def _matrices(x: Value, parts: int) -> Value:
    """[parts * m, n] as [parts, m, n]; one part stays as it is."""
    return x if parts == 1 else ops.reshape(x, (parts, x.shape[0] // parts, x.shape[1]))


def _norm(x: Value) -> Value:
    """Frobenius norms of matrices, fp32 [..., 1, 1]."""
    wide = ops.cast(x, DType.FP32)
    total = ops.reduce_sum(wide * wide, (x.spec.rank - 2, x.spec.rank - 1))
    return ops.reshape(ops.sqrt(total), (*x.shape[:-2], 1, 1))


def orthogonal(x: Value, iterations: int, scale: float) -> Value:
    """Orthogonalise: nearly scale * U V^T of x = U S V^T, by Newton and Schulz.

    x [..., m, n] is divided by its norm, then X <- a X + (b A + c A^2) X with A = X X^T in x's dtype, or with A on the
    other side if x is tall (Bernstein and Newhouse, 2024).
    """
    tall = x.shape[-2] > x.shape[-1]
    x = ops.cast(ops.cast(x, DType.FP32) * (1.0 / (_norm(x) + _LEAST)), x.spec.dtype)
    for left in reversed(range(iterations)):
        a, b, c = (number if left else number * scale for number in QUINTIC)
        gram = ops.matmul(x, x, transpose_a=tall, transpose_b=not tall)
        polynomial = c * (ops.matmul(gram, gram) + (b / c) * gram)  # what follows the product is one kernel
        x = a * x + (ops.matmul(x, polynomial) if tall else ops.matmul(polynomial, x))
    return x


class Muon(Optimizer[MuonConfig]):
    """The rule of a hidden matrix is muon, of everything else AdamW's."""

    def __init__(self, config: MuonConfig) -> None:
        super().__init__(config)
        self._others = AdamW(AdamWConfig(betas=config.betas, eps=config.eps, weight_decay=config.weight_decay))

    def rule(self, parameter: Parameter, decays: bool) -> Rule:
        if not orthogonalised(parameter):
            return self._others.rule(parameter, decays)
        config, (m, n) = self.config, (parameter.shape[-2] // parameter.parts, parameter.shape[-1])
        scale = RMS * sqrt(max(m, n)) if config.scale == "rms" else sqrt(max(1, m / n))
        settings = (
            ("beta", config.momentum), ("nesterov", config.nesterov), ("iterations", config.iterations),
            ("scale", scale), ("parts", parameter.parts),
        )  # fmt: skip
        apply = Rule("descend", (), (("weight_decay", config.weight_decay * decays),))
        return self._rule(settings, apply)

    def _rule(self, settings: tuple[tuple[str, float], ...], apply: Rule) -> Rule:
        return Rule("muon", ("momentum",), settings, apply)


class NorMuon(Muon):
    """The rule of a hidden matrix is normuon, of everything else AdamW's."""

    config: NorMuonConfig

    def _rule(self, settings: tuple[tuple[str, float], ...], apply: Rule) -> Rule:
        given = {**dict(settings), "scale": RMS, "beta2": self.config.beta2}
        return Rule("normuon", ("momentum", "second_moment"), tuple(given.items()), apply, (("second_moment", -1),))


rule_cases(Muon(MuonConfig()).rule(EXAMPLE, True))
rule_cases(NorMuon(NorMuonConfig()).rule(EXAMPLE, True), positive=(1,))
rule_cases(Rule("descend", (), (("weight_decay", 0.1),)))
