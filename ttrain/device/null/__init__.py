"""The device without arithmetic."""

from ttrain.device.null.device import NullDevice
