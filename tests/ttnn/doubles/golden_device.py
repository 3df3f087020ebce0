"""A plugin: device=golden is a Tenstorrent device that ttnn's reference functions answer for, without a card."""

from ttrain.config.registry import register
from ttrain.device.ttnn.settings import TenstorrentConfig

register("device", "golden", config=TenstorrentConfig, target="tests.ttnn.doubles.golden:open_golden")
