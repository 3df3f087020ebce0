"""Benchmarks beside PyTorch: the same work by every contender, each in a process of its own, in turns."""
