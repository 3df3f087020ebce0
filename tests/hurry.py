"""What runs of tests leave out, as it took most of their time."""

from __future__ import annotations

import gc

QUICKLY = ("-O1", "-fexpensive-optimizations")  # half as long as -O3, with the same multiply-adds


def hurry() -> None:
    """From now on runs in this process draw no loss curve, time only small products and copies, and compile in a hurry.

    What was imported by now is never garbage: runs that look for the memory of old steps need not search it.
    """
    from ttrain.device.torch.native import toolchain
    from ttrain.train.forecast import peak
    from ttrain.train.runs import summary

    summary.draw_loss_curve = lambda *_: False  # type: ignore[assignment]
    peak._FIRST = peak._AGAIN = 0.0
    peak._SIZES["cpu"], peak._MOVED = 256, 2**20
    toolchain.FLAGS = (*toolchain.FLAGS, *QUICKLY)
    gc.freeze()
