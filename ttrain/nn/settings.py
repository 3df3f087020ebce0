"""Small config of what is added to the layers of any model."""

from __future__ import annotations

from dataclasses import dataclass

from ttrain.core.options import option


@dataclass
class LoraConfig:
    """Low-rank adapters beside the linear layers of a frozen model (Hu et al., 2021)."""

    rank: int | None = option(None, "columns of each adapter, such as 8; null or 0 trains the model itself", minimum=0)
    alpha: float = option(16.0, "adapters' output is scaled by alpha/rank", above=0)
    dropout: float = option(0.0, "dropout of the adapters' input", minimum=0, below=1)
    targets: list[str] = option(
        ["all-linear"],
        "name endings of layers that get an adapter, ours or the original's, such as [qkv] or [c_attn]; * is any text, "
        "all-linear every linear layer of the blocks",
    )
    from_: str | None = option(
        None,
        "folder of PEFT adapters that a new run starts with; it sets rank, alpha, targets and the default of dropout",
        path=True,
    )

    @property
    def scale(self) -> float:
        """The factor of the product that adapters add: alpha / rank."""
        return self.alpha / (self.rank or 1)
