"""What stands in for a card: mocked boards, a compiler of empty kernels, ttnn's reference functions."""
