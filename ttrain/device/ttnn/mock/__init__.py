"""Mocked boards, and the compiler of empty kernels that they need."""
