"""Times sampling of several texts: `python -m benchmarks.sampling --texts 1 8 32`.

A llama of SmolLM2-135M's shape with random weights continues prompts of 16 tokens by 64, drawn at temperature 0.8.
The contenders take turns, each with the same weights: engines of ttrain, and `generate` of Transformers. Tokens/s are
all new tokens by the whole time of a call, with the reading of prompts. With --llama-cpp llama.cpp takes part, which
gets the weights as a GGUF file in fp32 and writes all texts at once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ttrain.api import load_config, run
from ttrain.data.library_tokenizer import train_bpe
from ttrain.tasks.opening import of_given
from ttrain.train.sampling.source import TokenSource

PROMPT, TOKENS, VOCABULARY = 16, 64, 49_152
SHAPE = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": VOCABULARY, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
Contender = Callable[[list[list[int]]], None]


def ours(stack: ExitStack, folder: str, engine: str, threads: int, rows: int) -> Contender:
    """Return what writes texts by an engine, while the stack is open."""
    words = [f"model.from={folder}", f"engine={engine}", "device=cpu", f"device.threads={threads}"]
    sample = [f"sample.tokens={TOKENS}", f"sample.batch_size={rows}", "sample.temperature=0.8"]
    config = load_config("task=sample", *words, *sample)
    given = of_given(config, config.sample, "makes no text.", "Give another.")
    steps = stack.enter_context(given.on_device())
    source = TokenSource(steps, given.config.sample, VOCABULARY)
    return lambda prompts: [*source.sample(prompts, range(len(prompts)), lambda *_: False)].clear()


def theirs(model: Any, threads: int) -> Contender:
    """Return what writes texts by Transformers."""
    import torch

    torch.set_num_threads(threads)
    given = {"do_sample": True, "temperature": 0.8, "top_k": 0, "eos_token_id": None, "pad_token_id": 0}

    def write(prompts: list[list[int]]) -> None:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            model.generate(torch.tensor(prompts), max_new_tokens=TOKENS, **given)

    return write


def llama_cpp(file: str, threads: int, rows: int) -> Contender:
    """Return what writes texts by llama.cpp, each as a sequence of its own, at temperature 1."""
    import llama_cpp as cpp

    options, draw = cpp.llama_context_default_params(), cpp.llama_sampler_init_dist(0)
    options.n_ctx, options.n_batch, options.n_seq_max = 256 * rows, PROMPT * rows, rows
    options.n_threads = options.n_threads_batch = threads
    model = cpp.llama_model_load_from_file(file.encode(), cpp.llama_model_default_params())
    context, batch = cpp.llama_init_from_model(model, options), cpp.llama_batch_init(PROMPT * rows, 0, 1)

    def write(texts: list[list[int]]) -> None:
        cpp.llama_memory_clear(cpp.llama_get_memory(context), True)
        for start in (0, *range(PROMPT, PROMPT + TOKENS - 1)):
            places = [(row, at) for row, text in enumerate(texts) for at in range(len(text))]
            batch.n_tokens = len(places)
            for n, (row, at) in enumerate(places):
                batch.token[n], batch.pos[n], batch.n_seq_id[n], batch.seq_id[n][0] = texts[row][at], start + at, 1, row
                batch.logits[n] = at == len(texts[row]) - 1
            assert cpp.llama_decode(context, batch) == 0
            texts = [[cpp.llama_sampler_sample(draw, context, n)] for n in range(len(places)) if batch.logits[n]]

    return write


def timed(contender: Contender, texts: int, seed: int) -> float:
    """Return tokens/s."""
    prompts = np.random.default_rng(seed).integers(0, VOCABULARY, (texts, PROMPT)).tolist()
    began = time.perf_counter()
    contender(prompts)
    return texts * TOKENS / (time.perf_counter() - began)


def main() -> None:
    """Print a line of JSON for each number of texts and contender."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--engines", nargs="*", default=["static", "traced"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--llama-cpp", action="store_true")
    asked = parser.parse_args()
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).eval()
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        model.save_pretrained(folder)
        Path(folder, "tokenizer.json").write_text(train_bpe(["of bytes"], 256).to_json())  # since a folder has one
        if asked.llama_cpp:
            with redirect_stdout(sys.stderr):
                run("task=export", f"model.from={folder}", "export.form=gguf", f"export.file={folder}/model.gguf")
        for texts in asked.texts:
            who = {engine: ours(stack, folder, engine, asked.threads, texts) for engine in asked.engines}
            who |= {} if asked.no_transformers else {"transformers": theirs(model, asked.threads)}
            who |= {"llama.cpp": llama_cpp(f"{folder}/model.gguf", asked.threads, texts)} if asked.llama_cpp else {}
            found: dict[str, list[float]] = {name: [] for name in who}
            for turn in range(asked.rounds + 1):  # the first one compiles
                for name, contender in who.items():
                    found[name].append(timed(contender, texts, turn))
                    print(texts, name, f"{found[name][-1]:.1f}", file=sys.stderr, flush=True)
            for name, values in found.items():
                rates = {"median": statistics.median(values[1:]), "min": min(values[1:]), "max": max(values[1:])}
                print(json.dumps({"texts": texts, "contender": name, "tokens_per_s": rates}), flush=True)


if __name__ == "__main__":
    main()
