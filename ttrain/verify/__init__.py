"""Gradients of every op and of whole models against PyTorch, as a report that people and scripts can act on."""
