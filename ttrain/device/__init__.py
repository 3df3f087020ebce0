"""Devices: where memory lives and kernels run."""
