"""Side by side with PyTorch: the same work, interleaved in one process, with everything that the figures rest on."""
