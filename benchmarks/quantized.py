"""Times adapters of rank 16 beside SmolLM2-1.7B's shape, and tells peak memory: `python -m benchmarks.quantized`.

Each contender is a process of its own, which reads the same folder of random weights in bf16 and trains on one sequence
of 512 tokens: ttrain by lora.base, and PEFT in bf16. `--folder` keeps the folder for a later call.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.sampling import write_tokenizer

VOCABULARY, WIDTH, HIDDEN, LAYERS, TOKENS, RANK, LR = 49_152, 2048, 8192, 24, 512, 16, 1e-4
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": WIDTH, "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192, "rope_theta": 130_000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "hidden_act": "silu", "dtype": "bfloat16",
}  # fmt: skip
MATRICES = {f"self_attn.{name}_proj": (WIDTH, WIDTH) for name in "qkvo"}
MATRICES |= {"mlp.gate_proj": (HIDDEN, WIDTH), "mlp.up_proj": (HIDDEN, WIDTH), "mlp.down_proj": (WIDTH, HIDDEN)}
BASES = ("nf4", "int8", "null")  # of ttrain


def write_folder(folder: Path) -> None:
    """Write random weights, one layer in memory at a time."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    places: dict[str, str] = {}

    def shard(number: int, shapes: dict[str, tuple[int, ...]]) -> None:
        name = f"model-{number:05d}-of-{LAYERS + 1:05d}.safetensors"
        made = {
            key: torch.randn(shape) * 0.02 if len(shape) > 1 else torch.ones(shape) for key, shape in shapes.items()
        }
        save_file({key: value.bfloat16() for key, value in made.items()}, folder / name, {"format": "pt"})
        places.update(dict.fromkeys(shapes, name))

    for layer in range(LAYERS):
        shapes = {f"model.layers.{layer}.{name}.weight": shape for name, shape in MATRICES.items()}
        norms = ("input_layernorm", "post_attention_layernorm")
        shard(layer + 1, {**shapes, **{f"model.layers.{layer}.{norm}.weight": (WIDTH,) for norm in norms}})
    shard(LAYERS + 1, {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(folder)


def batches() -> Iterator[dict[str, Any]]:
    """Yield sequences with their targets."""
    generator = np.random.default_rng(0)
    while True:
        tokens = generator.integers(0, VOCABULARY, (1, TOKENS + 1))
        yield {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def ours(folder: str, base: str, threads: int, words: list[str]) -> Callable[[dict[str, Any]], float]:
    """Return a step of ttrain."""
    from ttrain.api import Training, load_config

    given = [f"model.from={folder}", f"model.context={TOKENS}", "train.batch_size=1", "precision=bf16", "device=cpu"]
    given += [f"device.threads={threads}", f"lora.rank={RANK}", f"lora.base={base}", f"optimizer.lr={LR}", *words]
    training = Training(load_config(*given, "optimizer.clip_norm=null", "schedule=constant"))
    return lambda batch: float(training.step(batch).loss)


def theirs(folder: str, threads: int) -> Callable[[dict[str, Any]], float]:
    """Return a step of PEFT."""
    import peft
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    lora = peft.LoraConfig(r=RANK, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, lora).train()
    optimizer = torch.optim.AdamW([each for each in adapted.parameters() if each.requires_grad], LR)

    def step(batch: dict[str, Any]) -> float:
        logits = adapted(input_ids=torch.from_numpy(batch["tokens"]), use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), torch.from_numpy(batch["targets"]).flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def measured(who: str, folder: str, threads: int, steps: int, words: list[str]) -> dict[str, Any]:
    """Return losses, seconds of the first step and of the others, and the peak of resident memory in bytes."""
    began = time.perf_counter()
    step = theirs(folder, threads) if who == "peft" else ours(folder, who, threads, words)
    times, losses = [time.perf_counter() - began], []
    for _, batch in zip(range(steps + 1), batches()):
        began = time.perf_counter()
        losses.append(step(batch))
        times.append(time.perf_counter() - began)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(who, *(f"{each:.1f} s" for each in times), f"{peak / 2**30:.2f} GiB", file=sys.stderr, flush=True)
    found = {"contender": who, "built_s": times[0], "first_s": times[1], "step_s": statistics.median(times[2:])}
    return {**found, "peak_bytes": peak, "loss": losses[-1]}


def main() -> None:
    """Print a line of JSON for each contender."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contenders", nargs="*", default=[BASES[0], "peft"], help=f"{', '.join(BASES)} or peft")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--words", nargs="*", default=[], help="more options of ttrain")
    parser.add_argument("--alone", action="store_true", help="measure in this process")
    asked = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = asked.folder or Path(temporary)
        if not (folder / "config.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            write_folder(folder)
        for who in asked.contenders:
            if asked.alone:
                found = measured(who, str(folder), asked.threads, asked.steps, asked.words)
                print(json.dumps(found), flush=True)
                continue
            given = [who, "--folder", str(folder), "--alone", "--threads", str(asked.threads)]
            given += ["--steps", str(asked.steps), "--words", *asked.words]
            subprocess.run([sys.executable, "-m", "benchmarks.quantized", *given], check=True)


if __name__ == "__main__":
    main()
