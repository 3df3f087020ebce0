"""The chip's model by itself: how tiles spread over cores, and what overlaps with what."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.wormhole.reproduce import stream, tile_count
from ttrain.device.ttnn.cost.wormhole import Product, Wormhole


def test_output_tiles_spread_over_the_grid() -> None:
    shares = {(4032, 7): (18 * 16, 56), (2048, 8): (64, 64), (2048, 7): (80, 56), (32, 8): (1, 1), (256, 7): (2, 32)}
    for (size, rows), share in shares.items():
        assert Wormhole(grid=(rows, 8)).distribution(Product(size, size, size)) == share


def test_fidelity_costs_passes_where_the_matrix_unit_is_the_bound() -> None:
    product = Product(4096, 4096, 4096)
    times = {name: Wormhole(fidelity=name).program(product).compute for name in ("LoFi", "HiFi2", "HiFi4")}
    assert times["LoFi"] == times["HiFi2"] < times["HiFi4"]  # unpacking operands takes longer than two passes
    assert Wormhole("eth").peak_flops() == pytest.approx(65.536e12)


def test_padding_is_paid_for() -> None:
    chip = Wormhole()
    assert tile_count((33, 65)) == 6 and tile_count((5,)) == 1 and tile_count(()) == 1
    assert chip.program(Product(33, 33, 33)) == chip.program(Product(64, 64, 64))


def bound_of(step: Any) -> str:
    return max(("host", "dispatch", "compute", "bandwidth"), key=vars(step).__getitem__)


def test_a_replay_leaves_the_host_out_which_long_programs_hide() -> None:
    chips = [Wormhole(issuer=issuer) for issuer in ("replay", "native")]
    replay, native = (chip.step([stream((32, 32))] * 50) for chip in chips)
    assert replay.host == 0 and bound_of(native) == "host"
    assert native.total == pytest.approx(native.host, rel=0.05) and replay.total < native.total / 4
    replay, native = (chip.step([Product(4096, 4096, 4096)] * 5) for chip in chips)
    assert bound_of(native) == bound_of(replay) == "compute"
    assert native.total == pytest.approx(replay.total, rel=0.01)
