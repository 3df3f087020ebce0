"""Tensors on a Tenstorrent card: layouts of tiles, buffers, views of stacks, transfer."""
