"""`python -m ttrain` and the installed command `ttrain`."""

from __future__ import annotations

import gc
import sys


def main() -> int:
    """The command line, of which Ctrl-C is a part from the first import on."""
    gc.set_threshold(20_000, 50)  # modules are no garbage, and looking at all of them often takes time
    try:
        from ttrain import cli

        return cli.main()
    except KeyboardInterrupt:
        print("ttrain: interrupted", file=sys.stderr)
        return 130  # EXIT_INTERRUPTED, which may not be imported yet
    finally:
        gc.freeze()  # the process ends: nothing is worth looking for


if __name__ == "__main__":
    sys.exit(main())
