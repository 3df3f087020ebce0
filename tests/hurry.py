"""What runs of tests leave out, as it took most of their time."""

from __future__ import annotations


def hurry() -> None:
    """From now on runs in this process draw no loss curve and time only small products and copies."""
    from ttrain.train.forecast import peak
    from ttrain.train.runs import summary

    summary.draw_loss_curve = lambda *_: False  # type: ignore[assignment]
    peak._FIRST = peak._AGAIN = 0.0
    peak._SIZES["cpu"], peak._MOVED = 256, 2**20
