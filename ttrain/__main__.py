"""`python -m ttrain`: the same entry point as the installed command `ttrain`."""

from __future__ import annotations

import sys

from ttrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
