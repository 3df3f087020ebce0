"""A second model in the steps of a run, whose weights stay: a teacher, or the reference that a policy is kept near."""

from __future__ import annotations

from typing import Any

import numpy as np

from ttrain.core.errors import ConfigError
from ttrain.engine.state import State
from ttrain.nn.module import Buffer, Parameter


class FrozenModel:
    """A decoder beside the trained one. Its tensors are state whose names begin with `prefix`.

    They have no gradient and no optimizer state, and are in no checkpoint: whoever resumes a run reads them again.
    `key` is the option that names their `source`, a WeightSource of train/runs/warm_start.py.
    """

    def __init__(self, key: str, model: Any, source: Any, prefix: str = "frozen.") -> None:
        self._key, self.model, self._source, self._prefix = key, model, source, prefix
        self.parameters: list[Parameter] = list(model.parameters().values())
        self.buffers: list[Buffer] = list(model.buffers().values())
        for parameter in self.parameters:
            parameter.trainable = parameter.saved = False
        for tensor in (*self.parameters, *self.buffers):
            tensor.path = prefix + tensor.path  # type: ignore[attr-defined]

    def at_length(self, length: int) -> Any:
        """Return the model for sequences of so many tokens. Raises ConfigError where it can't read them."""
        if not hasattr(self.model, "at_length") or self.model.context < length:
            config, wanted = self.model.config, f"expected a llama or gpt that reads {length}"
            told = f"is a {config.name} that reads {config.context} tokens, {wanted}"
            raise ConfigError(f"{self._key}: {told}. Give another, or a smaller model.context.")
        return self.model.at_length(length)

    def check(self, known: str | None, tokenizer: Any, length: int) -> str:
        """Return the SHA-256 of the weights. `tokenizer` is that of the data, whose sequences have `length` tokens.

        Raises ConfigError where the SHA-256 is not the `known` one, where the frozen model can't read such sequences,
        or where its tokenizer has other ids.
        """
        self.at_length(length)
        if not self._source.has_ids_of(tokenizer):
            told = "its tokenizer gives tokens other ids than that of the data"
            raise ConfigError(f"{self._key}: {told}. Give its tokenizer as data.tokenizer, or another model.")
        digest = self._source.digest
        if known not in (None, digest):
            told = f"its weights have the SHA-256 {digest}, expected {known}: they have changed"
            raise ConfigError(f"{self._key}: {told}. Restore them, or give all keys of objective anew.")
        return digest

    def write(self, state: State) -> None:
        """Read the values of all tensors into the state."""
        values = self._source.values(self.model)
        for path in self.model.persistent():
            if not np.isfinite(values[path]).all():
                raise ConfigError(f"{self._key}: {path} holds NaN or infinity. Give another model.")
            state.write(self._prefix + path, values[path])
