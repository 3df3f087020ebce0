"""Models: one file each, from a small config to a recorded forward pass."""
