"""The device without arithmetic."""

from ttrain.device.null.device import NullDevice

__all__ = ["NullDevice"]
