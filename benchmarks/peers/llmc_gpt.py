"""A GPT-2 training step of llm.c on a CPU: `git clone https://github.com/karpathy/llm.c`, then --source=<its folder>.

It computes in fp32 with OpenMP and no BLAS, has biases at every size, and does not clip. It wants gcc and numpy.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from protocol import SIZES, STEPS, Size, arguments

MAGIC, VERSION, PADDED = 20240326, 3, 128
FLAGS = ["-Ofast", "-march=native", "-fopenmp", "-DOMP", "-Wno-unused-result"]


def write_weights(file: Path, size: Size) -> None:
    """Write random weights as gpt2_build_from_checkpoint reads them."""
    random, width, layers = np.random.default_rng(0), size.width, size.layers
    padded = -(-size.vocabulary // PADDED) * PADDED
    header = np.zeros(256, np.int32)
    header[:8] = MAGIC, VERSION, size.context, size.vocabulary, layers, size.heads, width, padded
    ones, zeros = np.ones, np.zeros

    def normal(*shape: int) -> np.ndarray:
        return 0.02 * random.standard_normal(shape, np.float32)

    parts = [
        normal(padded, width), normal(size.context, width),
        ones((layers, width)), zeros((layers, width)), normal(layers, 3 * width, width), zeros((layers, 3 * width)),
        normal(layers, width, width), zeros((layers, width)),
        ones((layers, width)), zeros((layers, width)), normal(layers, 4 * width, width), zeros((layers, 4 * width)),
        normal(layers, width, 4 * width), zeros((layers, width)), ones(width), zeros(width),
    ]  # fmt: skip
    with open(file, "wb") as target:
        header.tofile(target)
        for part in parts:
            part.astype(np.float32).tofile(target)


given = arguments("--source")
if given.precision != "fp32":
    sys.exit("llm.c computes in fp32 on a CPU. Give --precision=fp32.")
if given.source is None:
    sys.exit("Give --source=<folder of llm.c>.")
size, folder = SIZES[given.size], Path(tempfile.mkdtemp())
write_weights(folder / "weights.bin", size)
program = folder / "llmc_gpt"
source = Path(__file__).with_suffix(".c")
subprocess.run(["gcc", *FLAGS, "-I", given.source, str(source), "-o", str(program), "-lm"], check=True)
os.environ["OMP_NUM_THREADS"] = str(given.threads)
os.execv(program, [str(program), str(folder / "weights.bin"), str(size.rows), str(size.context), str(STEPS)])
