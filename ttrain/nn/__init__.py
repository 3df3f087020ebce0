"""Layers and their initial values. A layer records ops; an engine holds its parameters."""
