"""Settings of the whole suite, made before anything imports torch."""

from __future__ import annotations

import os

# Several test processes share the cores: threads that wait for one another cost more than they give.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
