"""Parameters that are offloaded to host memory: the device that runs their nodes, and the rows that transfer values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ttrain.device.base import Attributes, Delivery, Device, GivenSpecs, Kernel, Launch, Layout, Specs, Table
from ttrain.device.ttnn.settings import TenstorrentConfig
from ttrain.device.ttnn.tensors.device_tensor import DeviceTensor, IntegerInput
from ttrain.device.ttnn.tensors.layout import default_layout

if TYPE_CHECKING:
    from ttrain.device.ttnn.tensors.store import Store


def offloaded_by(config: TenstorrentConfig, name: str) -> bool:
    """True if a persistent tensor stays in host memory."""
    return any(belongs(name.partition("/")[0], prefix) for prefix in config.host_resident)


def belongs(path: str, name: str) -> bool:
    """True if a name of host_resident means a parameter: `head` is head.weight, and ar_head.weight as well."""
    return path == name or path.startswith(f"{name}.") or path.partition(".")[0].endswith(f"_{name}")


def host_device(config: TenstorrentConfig, computes: bool) -> Device:
    """The CPU; where values are not computed, one that only knows its rows and takes no memory."""
    if computes:
        from ttrain.device.torch.device import TorchDevice

        return TorchDevice("cpu", threads=config.threads)
    import torch

    from ttrain.device.null.device import NullDevice
    from ttrain.device.torch.kernels import kernel_table
    from ttrain.device.torch.kernels.common import Context

    return NullDevice(rows=kernel_table(Context.of(torch.device("cpu"), config.threads or 1)))


def both_tables(card: Mapping[str, Kernel], host: Device, store: Store) -> Table:
    """The rows of the card and of the host, each with those that transfer values to it."""
    return Table(
        {**card, "stage": _stage(store), "to_device": _to_device(host, store)},
        {**host.kernels, "to_host": _to_host(host), "host_input": _host_input(host)},
    )


def _apart(inputs: GivenSpecs, outputs: Specs, attributes: Attributes) -> list[Layout | None]:
    """Naming the default layout keeps such values in tensors that nothing else takes turns in.

    So a tensor stays the same from step to step, and the host finds it after a captured step has run.
    """
    return [default_layout(output) for output in outputs]


def _stage(store: Store) -> Kernel:
    def bind(ins: Sequence[Any], outs: Sequence[Any], attributes: Attributes, work: Sequence[Any]) -> Launch:
        (x,), (y,) = ins, outs
        return lambda: store.tt.copy(x.t, y.t)

    return Kernel(bind, layouts=_apart)


def _to_host(host: Device) -> Kernel:
    def bind(ins: Sequence[Any], outs: Sequence[Any], attributes: Attributes, work: Sequence[Any]) -> Launch:
        (x,), (y,) = ins, outs
        return lambda: host.upload(y, x.download())

    return Kernel(bind)


def _to_device(host: Device, store: Store) -> Kernel:
    """Written past the buffer's own `upload`: a scalar that changes within a step is no step input."""

    def bind(ins: Sequence[Any], outs: Sequence[Any], attributes: Attributes, work: Sequence[Any]) -> Launch:
        (x,), (y,) = ins, outs
        return lambda: store.write(y.t, y.layout, np.asarray(host.download(x), np.float32))

    return Kernel(bind, Delivery.OUT, layouts=_apart)


def _host_input(host: Device) -> Kernel:
    def bind(ins: Sequence[Any], outs: Sequence[Any], attributes: Attributes, work: Sequence[Any]) -> Launch:
        (x,), (y,) = ins, outs
        return lambda: host.upload(y, _as_uploaded(x))

    return Kernel(bind)


def _as_uploaded(tensor: DeviceTensor) -> np.ndarray:
    """The values of a step input, of which the host keeps integers and scalars."""
    if not isinstance(tensor, IntegerInput) and tensor.value is not None:
        return np.full(tensor.spec.shape, tensor.value, np.float32)
    return tensor.download()
