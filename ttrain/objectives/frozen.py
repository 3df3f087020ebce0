"""A second model in the steps of a run, whose weights stay: a teacher, or the reference that a policy is kept near."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ttrain.core.errors import ConfigError
from ttrain.engine.state import State
from ttrain.nn.module import Buffer, Parameter


class Source(Protocol):
    """Place of weights; see train/runs/weight_source.py."""

    @property
    def digest(self) -> str: ...
    def values(self, model: Any) -> Mapping[str, Any]: ...
    def has_ids_of(self, tokenizer: Any) -> bool: ...


class FrozenModel:
    """A decoder beside the trained one. Its tensors are state whose names begin with `prefix`.

    They have no gradient and no optimizer state, and are in no checkpoint: whoever resumes a run reads them again.
    `key` is the option that names their `source`, for messages.
    """

    def __init__(self, key: str, model: Any, source: Source, prefix: str = "frozen.") -> None:
        self._key, self._model, self._source, self._prefix = key, model, source, prefix
        for parameter in self.parameters:
            parameter.trainable = parameter.saved = False
            parameter.path = prefix + parameter.path
        for buffer in self.buffers:
            buffer.path = prefix + buffer.path

    @property
    def parameters(self) -> list[Parameter]:
        return list(self._model.parameters().values())

    @property
    def buffers(self) -> list[Buffer]:
        return list(self._model.buffers().values())

    def beside(self, model: Any) -> Any:
        """Return the model on the sequences that another one reads. Raises ConfigError where they are too long."""
        if not hasattr(self._model, "at_length"):
            raise ConfigError(f"{self._key}: model={self._model.config.name} is no plain decoder. Give a llama or gpt.")
        if self._model.context < model.length:
            told = f"it reads {self._model.context} tokens at most, sequences have {model.length}"
            raise ConfigError(f"{self._key}: {told}. Give another, or a smaller model.context.")
        return self._model.at_length(model.length)

    def check(self, known: str | None, tokenizer: Any, model: Any) -> str:
        """Return the SHA-256 of the weights. Raises ConfigError where it is not the one that is `known`.

        So it does where the model can't stand beside the trained one, whose data has the tokenizer.
        """
        self.beside(model)
        if not self._source.has_ids_of(tokenizer):
            told = "its tokenizer gives tokens other ids than that of the data"
            raise ConfigError(f"{self._key}: {told}. Give its tokenizer as data.tokenizer, or another model.")
        digest = self._source.digest
        if known not in (None, digest):
            told = f"its weights have the SHA-256 {digest}, expected {known}: they have changed"
            raise ConfigError(f"{self._key}: {told}. Restore them, or give all keys of objective anew.")
        return digest

    def follow_compute(self) -> None:
        """See Model.follow_compute."""
        self._model.follow_compute()

    def write(self, state: State) -> None:
        """Read the values into the state."""
        values = self._source.values(self._model)
        for path in self._model.persistent():
            state.write(self._prefix + path, values[path])
