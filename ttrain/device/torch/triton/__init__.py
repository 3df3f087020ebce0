"""Kernels of a GPU in Triton, in few launches: norms, rotations, losses, products of experts, elementwise programs."""
