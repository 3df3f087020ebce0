"""The Tenstorrent device through ttnn: silicon, a simulator, a mocked board, and plain torch for the tests."""
