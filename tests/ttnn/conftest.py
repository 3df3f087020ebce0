"""What the tests on mocked boards share."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A kernel cache for this session; stub kernels must not outlive it."""
    return str(tmp_path_factory.mktemp("ttnn"))
