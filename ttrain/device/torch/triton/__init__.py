"""Kernels of a GPU in Triton: norms, their gradients, rotary positions, and elementwise programs, in few launches."""
