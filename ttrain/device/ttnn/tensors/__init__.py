"""How tensors lie on a Tenstorrent card: forms of tiles, what is held of them, views of stacks, transfer."""
