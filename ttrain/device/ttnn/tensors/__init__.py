"""How tensors lie on a Tenstorrent card: layouts of tiles, what is held of them, views of stacks, transfer."""
