"""Small config of what is added to the layers of any model."""

from __future__ import annotations

from dataclasses import dataclass

from ttrain.core.options import option


@dataclass
class LoraConfig:
    """Low-rank adapters beside linear layers (Hu et al., 2021): they alone are trained, the model itself is frozen."""

    rank: int | None = option(
        None, "columns of each adapter, such as 8 or 16; null or 0 trains the model itself", minimum=0
    )
    alpha: float = option(16.0, "what adapters add is scaled by alpha/rank", above=0)
    dropout: float = option(0.0, "probability of zeroing an adapter's input", minimum=0, below=1)
    targets: list[str] = option(
        ["all-linear"],
        "linear layers of the blocks that get one, by the end of their name, here or in the original, such as [qkv] "
        "or [c_attn]; * stands for any characters, all-linear for all of them",
    )
    from_: str | None = option(
        None,
        "folder of adapters in PEFT's form that a new run starts with; it decides rank, alpha, targets and, where it "
        "is not given, dropout; train.init_from gives the frozen model",
        path=True,
    )

    @property
    def scale(self) -> float:
        """The factor of the product that adapters add: alpha / rank."""
        return self.alpha / (self.rank or 1)
