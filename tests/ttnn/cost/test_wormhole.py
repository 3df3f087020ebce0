"""The chip's model by itself: how tiles spread over cores, and what overlaps with what."""

from __future__ import annotations

import pytest

from benchmarks.wormhole.reproduce import stream, tile_count
from ttrain.device.ttnn.cost.wormhole import Product, Scatter, Setting, Stream, Wormhole


@pytest.mark.parametrize(
    ("size", "grid", "share", "cores"),
    [
        (4032, (7, 8), 18 * 16, 56),
        (2048, (8, 8), 64, 64),
        (2048, (7, 8), 80, 56),
        (32, (8, 8), 1, 1),
        (256, (7, 8), 2, 32),
    ],
)
def test_output_tiles_spread_over_the_grid(size: int, grid: tuple[int, int], share: int, cores: int) -> None:
    assert Wormhole(Setting(grid=grid)).distribution(Product(size, size, size)) == (share, cores)


def test_fidelity_costs_passes_where_the_matrix_unit_is_the_bound() -> None:
    product = Product(4096, 4096, 4096)
    times = {name: Wormhole(Setting(fidelity=name)).program(product).compute for name in ("LoFi", "HiFi2", "HiFi4")}
    assert times["LoFi"] == times["HiFi2"] < times["HiFi4"]  # unpacking operands takes longer than two passes
    assert Wormhole(Setting("eth")).peak_flops() == pytest.approx(65.536e12)


def test_padding_is_paid_for() -> None:
    chip = Wormhole()
    assert tile_count((33, 65)) == 6 and tile_count((5,)) == 1 and tile_count(()) == 1
    assert chip.program(Product(33, 33, 33)) == chip.program(Product(64, 64, 64))


def test_a_replay_leaves_the_host_out_which_long_programs_hide() -> None:
    chips = [Wormhole(Setting(issuer=issuer)) for issuer in ("replay", "native")]
    replay, native = (chip.step([stream((32, 32))] * 50) for chip in chips)
    assert replay.host == 0 and native.bottleneck == "host"
    assert native.total == pytest.approx(native.host, rel=0.05) and replay.total < native.total / 4
    replay, native = (chip.step([Product(4096, 4096, 4096)] * 5) for chip in chips)
    assert native.bottleneck == replay.bottleneck == "compute"
    assert native.total == pytest.approx(replay.total, rel=0.01)


def test_memory_bounds_what_is_only_moved() -> None:
    chip = Wormhole()
    moved, scattered = chip.program(Stream(1e8, 50_000)), chip.program(Scatter(1e8, 50_000))
    assert all(time.bandwidth > max(time.dispatch, time.compute) for time in (moved, scattered))
    assert scattered.bandwidth > moved.bandwidth


def test_waiting_for_every_program_is_slower_than_a_queue() -> None:
    programs = [stream((256, 256))] * 10
    chip = Wormhole(Setting(issuer="native"))
    assert chip.step(programs).total < chip.blocking(programs).total
