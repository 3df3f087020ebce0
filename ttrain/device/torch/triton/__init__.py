"""Kernels of a GPU in Triton: norms, rotary positions, cross-entropy, and elementwise programs, in few launches."""
