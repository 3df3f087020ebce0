"""Products in matrix units. Plain loops stand for the instructions, so that any processor with AVX-512 runs these."""

from __future__ import annotations

import ctypes
import mmap
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from zlib import crc32

import pytest
import torch

from tests.native.conftest import open_device, require_compiler
from tests.native.test_numbers import Runs, assert_near_reference, large_runs, run_all
from ttrain.core.processor import VARIABLE, vector_extensions
from ttrain.device.torch.native import toolchain
from ttrain.device.torch.native.codegen import call, function_name, library_sources, template
from ttrain.device.torch.native.native import Sizing
from ttrain.device.torch.native.products import scratch_size
from ttrain.device.torch.native.threads import join_pool
from ttrain.device.torch.native.toolchain import HEADERS, Toolchain, find_compiler

HEADER = Path(__file__).with_name("emulated_amx.h")
EMULATION = ("-include", str(HEADER), f"-DVERSION={crc32(HEADER.read_bytes())}")  # which changes with the header
needs_avx512 = pytest.mark.skipif("avx512f" not in vector_extensions(), reason="no AVX-512")


@dataclass(frozen=True)
class Form:
    """One instance of the template `product`."""

    turn_a: bool
    turn_b: bool
    bias: bool = False
    adding: bool = False
    after: str = "nothing"
    kind: str = "bf16"  # of what it writes
    read: str = "bf16"  # the kind of A, B and the bias

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.kind == "bf16" else torch.float32

    @property
    def operands(self) -> torch.dtype:
        return torch.bfloat16 if self.read == "bf16" else torch.float32

    @property
    def body(self) -> str:
        name = template("product", self.turn_a, self.turn_b, self.bias, self.adding, f"After::{self.after}")
        sizes = ", ".join(f"number(a, {5 + index})" for index in range(6))
        return call(
            name, f"Sizes{{{sizes}}}", *(f"in<{self.read}>(a, {index})" for index in range(3)),
            f"out<{self.kind}>(a, 3)", "out<float>(a, 4)", "number(a, 11)", "int(number(a, 12))",
        )  # fmt: skip


TURNS = [(turn_a, turn_b) for turn_a in (False, True) for turn_b in (False, True)]
FORMS = [
    *(Form(*turns) for turns in TURNS),
    *(Form(*turns, adding=True, kind="float") for turns in TURNS),
    Form(True, False, adding=True),
    Form(False, True, bias=True, kind="float"),
    Form(False, True, bias=True, after="gelu"),
]


def emulate(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(toolchain, "FLAGS", (*toolchain.FLAGS, *EMULATION))


@pytest.fixture(scope="module")
def library(folder: Path) -> Iterator[ctypes.CDLL]:
    with pytest.MonkeyPatch.context() as patch:
        emulate(patch)
        made = Toolchain(folder).load(library_sources([form.body for form in FORMS], 1))
    join_pool(made, 3)
    yield made


def count(library: ctypes.CDLL, name: str = "tile_products") -> int:
    return ctypes.c_long.in_dll(library, name).value


class Guarded:
    """Memory that begins right behind a page which nobody may touch, or ends right before one. At first all NaN."""

    def __init__(self, elements: int, dtype: torch.dtype, at_end: bool) -> None:
        size, page = -(-elements * dtype.itemsize // 4) * 4, mmap.PAGESIZE
        whole = -(-size // page) * page
        self._map = mmap.mmap(-1, whole + 2 * page)
        first = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        for guard in (first, first + page + whole):
            assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0
        place = page + (whole - size if at_end else 0)
        self.address = first + place
        self.all = torch.frombuffer(self._map, dtype=dtype, offset=place, count=elements).fill_(float("nan"))


class Matrix(Guarded):
    """Rows with gaps in between, but none after the last."""

    def __init__(self, values: torch.Tensor, stride: int, at_end: bool) -> None:
        rows, width = values.shape
        super().__init__((rows - 1) * stride + width, values.dtype, at_end)
        self.stride, self.values = stride, self.all.as_strided((rows, width), (stride, 1))
        self.values.copy_(values)

    def gaps_are_untouched(self) -> bool:
        inside = torch.zeros(self.all.shape, dtype=torch.bool)
        inside.as_strided(self.values.shape, (self.stride, 1)).fill_(True)
        return bool(self.all[~inside].isnan().all())


@dataclass(frozen=True)
class Problem:
    """A product's operands: A [M, K], B [K, N], a bias [N] and what C holds before."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor
    c: torch.Tensor

    @staticmethod
    @cache
    def draw(m: int, n: int, k: int, dtype: torch.dtype) -> Problem:
        generator = torch.Generator().manual_seed(m + 1000 * n + 1000_000 * k)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).bfloat16()

        return Problem(normal(m, k) / k**0.5, normal(k, n), normal(n), normal(m, n).to(dtype))

    def run(self, library: ctypes.CDLL, form: Form, threads: int, at_end: bool, gap: int) -> torch.Tensor:
        (m, k), n = self.a.shape, self.b.shape[1]
        stored = [x.T if turn else x for x, turn in ((self.a, form.turn_a), (self.b, form.turn_b))]
        a, b = (Matrix(x.to(form.operands), x.shape[1] + gap, at_end) for x in stored)
        c, bias = Matrix(self.c, n + gap, at_end), Matrix(self.bias[None].to(form.operands), n, at_end)
        own = scratch_size(k)
        scratch = Guarded(threads * own, torch.float32, at_end)
        addresses = [memory.address for memory in (a, b, bias, c, scratch)]
        arguments = (ctypes.c_void_p * 13)(*addresses, m, n, k, a.stride, b.stride, c.stride, own, threads)
        function = getattr(library, function_name(form.body))
        function.argtypes, function.restype = [ctypes.c_void_p], None
        function(ctypes.addressof(arguments))
        assert c.gaps_are_untouched()
        return c.values.clone()

    @cached_property
    def product(self) -> torch.Tensor:
        return self.a.double() @ self.b.double()

    @cached_property
    def terms(self) -> torch.Tensor:
        return self.a.double().abs() @ self.b.double().abs() + 1

    def expected(self, form: Form) -> torch.Tensor:
        y = self.product
        y = y + self.bias.double() if form.bias else y
        y = torch.nn.functional.gelu(y) if form.after == "gelu" else y
        return y + self.c.double() if form.adding else y

    def limit(self, form: Form) -> torch.Tensor:
        """Return the limit of the error: fp32 sums of products in any order, and one rounding to the stored dtype.

        A sum is rounded before a function is applied to it, too.
        """
        exact, unit = self.expected(form), 2**-8 if form.kind == "bf16" else 2**-23
        before = 0 if form.after == "nothing" else self.expected(replace(form, after="nothing", adding=False)).abs()
        return 2e-6 * self.terms + (exact.abs() + before) * unit


# Less than a register; whole ones and all but; several blocks of rows, of columns, of the inner axis, and of all three.
SHAPES = [
    (1, 1, 2), (2, 3, 6), (1, 70, 34), (70, 1, 30), (16, 16, 32), (17, 15, 30), (32, 32, 64), (33, 31, 34),
    (64, 96, 128), (31, 65, 66), (257, 40, 62), (40, 50, 1024), (36, 70, 1026), (20, 490, 1030), (560, 33, 1058),
    (130, 290, 2050),
]  # fmt: skip


@needs_avx512
@pytest.mark.parametrize("form", FORMS, ids=lambda form: re.sub(r"product<|After::|>\(.*", "", form.body))
def test_products_are_those_of_torch(library: ctypes.CDLL, form: Form) -> None:
    for m, n, even in SHAPES:
        # An odd inner axis is for matrices whose rows do not run along it.
        for k in (even, even - 1) if form.turn_a and not form.turn_b else (even,):
            problem, before = Problem.draw(m, n, k, form.dtype), count(library)
            first = problem.run(library, form, 1, False, 0)
            assert count(library) > before
            error = (first.double() - problem.expected(form)).abs()
            assert bool((error <= problem.limit(form)).all()), (m, n, k, float(error.max()))
            for threads, at_end, gap in ((1, True, 2), (2, True, 0), (3, False, 6)):
                assert torch.equal(first, problem.run(library, form, threads, at_end, gap)), (m, n, k, threads)
    assert count(library, "tiles_open") == 0, "every part releases what it has configured"


@needs_avx512
@pytest.mark.parametrize(("turn_a", "turn_b"), TURNS)
def test_what_is_no_number_stays_in_its_row_and_column(library: ctypes.CDLL, turn_a: bool, turn_b: bool) -> None:
    form = Form(turn_a, turn_b)
    problem = Problem.draw.__wrapped__(45, 50, 70, form.dtype)  # of its own, as it is changed
    problem.a[3, 5], problem.a[44, 69] = float("nan"), float("inf")
    problem.b[11, 49], problem.b[69, 31] = float("nan"), -float("inf")
    got, expected = problem.run(library, form, 2, True, 4), problem.expected(form)
    assert torch.equal(got.isfinite(), expected.isfinite()) and torch.equal(got.isnan(), expected.isnan())
    kept = expected.isfinite()
    torch.testing.assert_close(got.double()[kept], expected[kept], rtol=2**-8, atol=1e-5)


def narrow_runs() -> Runs:
    """Ops that multiply bf16. The head's loss comes in chunks, whose gradients are summed in fp32."""
    runs = [run for run in large_runs() if run[0] in ("matmul", "linear")]
    generator = torch.Generator().manual_seed(4)
    x, head, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in ((300, 34), (41, 34), (41,)))
    chunks = {"smoothing": 0.1, "live": 39, "gradients": True}
    inputs = [x, head, torch.arange(300) * 7 % 39, torch.tensor(0.01), bias]
    return [*runs[len(runs) // 2 :], ("head_cross_entropy", inputs, chunks)]


@needs_avx512
def test_ops_multiply_in_tiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulate(monkeypatch)
    device = open_device(Sizing(3, thread_cost=1, logits=650), folder)
    results = run_all(device, narrow_runs())
    assert count(device.native._loaded[-1]) > 1000
    device.close()
    assert_near_reference(narrow_runs(), results)


@needs_avx512
def test_vectors_multiply_where_tiles_are_refused_or_wrong(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)  # the last case is of this processor
    form, results = Form(False, True, bias=True), []
    problem = Problem.draw(45, 50, 70, form.dtype)
    # The check multiplies a square over two blocks. The last are real instructions, which most processors do not have.
    cases = [((*EMULATION, "-DAMX_REFUSED"), 0), ((*EMULATION, "-DAMX_WRONG"), 8), (("-mamx-tile", "-mamx-bf16"), None)]
    for flags, tried in cases:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(toolchain, "FLAGS", (*toolchain.FLAGS, *flags))
            library = Toolchain(folder).load(library_sources([form.body], 1))
        results.append(problem.run(library, form, 1, True, 0))
        assert tried is None or count(library) == tried
        assert bool(((results[-1].double() - problem.expected(form)).abs() <= problem.limit(form)).all())
    assert torch.equal(results[0], results[1])
    assert "amx_bf16" in vector_extensions() or torch.equal(results[0], results[2])


def test_real_instructions_compile_and_the_loop_has_no_others(tmp_path: Path) -> None:
    """Without a warning; a loop is a block of instructions that jumps back to its own label."""
    require_compiler()
    text, result = tmp_path / "source.cpp", tmp_path / "source.s"
    text.write_text(library_sources([FORMS[1].body, FORMS[2].body], 1)[0], "utf-8")
    command = [*find_compiler()[0], *toolchain.FLAGS, "-march=sapphirerapids"]
    if subprocess.run([*command, "-E", "-xc++", "/dev/null"], capture_output=True, check=False).returncode:
        pytest.skip("the compiler knows no processor with tiles")
    strict = ["-Wall", "-Wextra", "-Werror", f"-I{HEADERS}", "-S", str(text), "-o", str(result)]
    done = subprocess.run([*command, *strict], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:2000]
    blocks = r"^(\.L\w+):.*\n((?:(?!\.L\w+:).*\n)*?\s+j\w+\s+\1\b)"
    loops = [body for _, body in re.findall(blocks, result.read_text("utf-8"), re.MULTILINE) if "tdpbf16ps" in body]
    assert loops
    for loop in loops:
        assert loop.count("tdpbf16ps") == loop.count("tileloadd") and "(%rsp" not in loop, loop
