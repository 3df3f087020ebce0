"""Kernels of the CPU that are generated for a plan's exact shapes and compiled once by the machine's C++ compiler."""
