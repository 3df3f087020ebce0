"""`python -m ttrain` and the installed command `ttrain`."""

from __future__ import annotations

import sys


def main() -> int:
    """The command line, of which Ctrl-C is a part from the first import on."""
    try:
        from ttrain import cli

        return cli.main()
    except KeyboardInterrupt:
        print("ttrain: interrupted", file=sys.stderr)
        return 130  # EXIT_INTERRUPTED, which may not be imported yet


if __name__ == "__main__":
    sys.exit(main())
