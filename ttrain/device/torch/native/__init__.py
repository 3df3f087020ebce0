"""Kernels of the CPU that are generated for a plan's exact shapes and compiled once by the machine's C++ compiler."""

from ttrain.device.torch.native.rows import NativeKernels
from ttrain.device.torch.native.toolchain import CompileError, Toolchain
