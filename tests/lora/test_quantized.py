"""A frozen base in fewer bits: its values are bitsandbytes', its training PEFT's, and runs keep its bits."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from tests.lora.test_adapters import CONTEXT, STEPS, VOCABULARY, Pair, losses_of, peft_losses
from tests.parallel.forks import Forks
from tests.parallel.kills import tensors as everything
from tests.train.reading import arrays as tensors
from ttrain.api import load_config
from ttrain.cli import main
from ttrain.config import build
from ttrain.core.spec import DType
from ttrain.device.quantized import BLOCK, NF4, PARTS, Quantized
from ttrain.graph import Kind
from ttrain.train.checkpoint.checkpoint import read_checkpoint
from ttrain.train.steps.step_graph import StepGraph

SHAPES = [(3, 64), (33, 192), (130, 128), (200, 448)]


def drawn(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Weights of different sizes, some rows of them zero or as bf16 has them."""
    generator = np.random.default_rng([seed, *shape])
    weight = generator.normal(size=shape) * generator.uniform(0.01, 3, (shape[0], 1))
    weight[1] = 0
    weight[2] = torch.from_numpy(weight[2]).bfloat16().double().numpy()
    return weight.astype(np.float32)


@contextmanager
def one_thread() -> Iterator[None]:
    """Several threads of torch add in another order, and those of bitsandbytes wait for them while they turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def theirs(code: str, weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the parts and the values that bitsandbytes makes of a weight."""
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    given, kinds = torch.from_numpy(weight), torch.ops.bitsandbytes
    if code == "int8":
        codes, absmax, _ = kinds.int8_vectorwise_quant(given)
        made, parts = kinds.int8_vectorwise_dequant(codes, absmax), [codes, absmax]
    else:
        with one_thread():
            codes, state = functional.quantize_4bit(given, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
            made = functional.dequantize_4bit(codes, state)
        blocks = [each.view(len(weight), -1) for each in (codes, state.absmax)]
        parts = [*blocks, state.state2.absmax, state.offset[None]]
    return dict(zip(PARTS[code], (part.numpy() for part in parts), strict=True)), made.numpy()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("code", PARTS)
def test_codes_scales_and_values_are_those_of_bitsandbytes(code: str, shape: tuple[int, int]) -> None:
    for seed in range(5):
        weight = drawn(shape, seed)
        if code == "int8":
            weight = weight[[0, *range(2, len(weight))]]  # 127 / 0 is no number there
        (parts, values), made = theirs(code, weight), Quantized.of(code, weight)
        for name, part in parts.items():
            assert made.parts[name].dtype == part.dtype and np.array_equal(made.parts[name], part), name
        assert np.array_equal(np.asarray(made), values)


def test_levels_are_quantiles_of_a_normal_distribution() -> None:
    """Nine from its upper half, eight from its lower, scaled to 1; the outermost are those of 0.9677083."""
    quantile, most = NormalDist().inv_cdf, 0.9677083
    upper = [quantile(p) for p in np.linspace(most, 0.5, 9)[:-1]]
    lower = [-quantile(p) for p in np.linspace(most, 0.5, 8)[:-1]]
    np.testing.assert_allclose(NF4, np.sort([*upper, *lower, 0]) / max(upper), atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_codes_are_the_nearest(shape: tuple[int, int]) -> None:
    weight = drawn(shape)
    exact = torch.from_numpy(weight).double()
    made = Quantized.of("int8", weight)
    largest = exact.abs().amax(1, keepdim=True)
    assert np.array_equal(made.parts["absmax"], largest[:, 0].numpy())
    assert ((torch.from_numpy(np.asarray(made)).double() - exact).abs() <= largest * (0.5 / 127 + 1e-6)).all()

    made, blocks = Quantized.of("nf4", weight), exact.view(-1, BLOCK)
    largest = blocks.abs().amax(1, keepdim=True)
    packed = torch.from_numpy(made.parts["nf4"]).view(-1)
    codes = torch.stack([packed >> 4, packed & 15], 1).view(-1, BLOCK).long()
    levels = torch.from_numpy(NF4).double()
    errors = (blocks[..., None] / largest.clamp(min=1e-30)[..., None] - levels).abs()
    assert (errors.gather(2, codes[..., None])[..., 0] <= errors.amin(2) + 1e-6).all()
    scales = torch.from_numpy(np.asarray(made)).double().view(-1, BLOCK) / levels[codes]
    known = codes != 7  # a level that is not zero
    spread = (largest - largest.mean()).abs().max()
    assert ((scales - largest).abs()[known] <= 0.0071 * spread + 1e-6).all()  # half a step of the largest numbers


LLAMA = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64,
         "intermediate_size": 128, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-6,
         "vocab_size": VOCABULARY}  # fmt: skip
OURS = ["model=llama", "model.preset=null", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.width=64",
        "model.hidden=128", "model.tied=false", "model.norm_eps=1e-6", f"model.context={CONTEXT}",
        f"model.vocabulary={VOCABULARY}", "device=cpu"]  # fmt: skip


def beside(code: str, folder: Path) -> Any:
    """PEFT's model: int8 on the values of our codes, NF4 on layers of bitsandbytes."""
    import peft
    import transformers

    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_config(transformers.LlamaConfig(**LLAMA))
    model.save_pretrained(folder / "base")
    if code == "int8":
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear) and "layers" in name:
                weight = layer.weight.detach().numpy()
                layer.weight.data = torch.from_numpy(np.array(Quantized.of(code, weight)))
    else:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
        compute = {"bnb_4bit_compute_dtype": torch.float32, "bnb_4bit_use_double_quant": True}
        kept = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **compute)
        given = {"quantization_config": kept, "dtype": torch.float32, "device_map": "cpu"}
        model = auto.from_pretrained(folder / "base", **given)
    lora = peft.LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, lora)
    for path, parameter in adapted.named_parameters():
        if "lora_B" in path:
            torch.nn.init.normal_(parameter, std=0.1)
    adapted.save_pretrained(folder / "adapter")
    return adapted


@pytest.mark.parametrize("code", PARTS)
def test_adapters_train_as_pefts_do(code: str, tmp_path: Path) -> None:
    with one_thread():
        adapted = beside(code, tmp_path)
        expected = peft_losses(adapted)
    config = load_config(*OURS, f"lora.from={tmp_path / 'adapter'}", f"lora.base={code}")
    config = replace(config, lora=build.with_adapters(config.lora, config.source.explicit))
    assert len(expected) == STEPS and max(np.diff(expected)) - min(np.diff(expected)) > 0.05
    found = [losses_of(Pair(tmp_path, adapted, config).open(engine)) for engine in ("dynamic", "static", "traced")]
    assert found[0] == found[1]
    for losses in found:
        np.testing.assert_allclose(losses, expected, atol=1e-4)


@pytest.mark.parametrize(("code", "bits"), [("int8", 8), ("nf4", 4)])
def test_the_matrices_of_the_blocks_take_so_many_bits(code: str, bits: int) -> None:
    config = load_config(*OURS, "lora.rank=2", f"lora.base={code}", "precision=bf16")
    model: Any = build.build_model(config)
    tensors = StepGraph(model, build.made("optimizer", config.optimizer), 2).state_tensors()
    sizes = {tensor.name: tensor.spec for tensor in tensors if tensor.kind is Kind.FROZEN}
    coded = {path: each for path, each in model.parameters(adapters=False).items() if "/" in next(iter(each.pieces))}
    assert len(coded) == 7 * 2 and all(path.startswith("blocks.") for path in coded)
    assert sum(sizes[f"{path}/{code}"].nbytes for path in coded) * 8 == bits * sum(p.count for p in coded.values())
    assert sizes["embedding.weight"].dtype is DType.BF16 and sizes["norm.weight"].dtype is DType.FP32


RUN = ["data=text", "data.path=text.txt", "schedule=constant", "train.batch_size=2", "train.eval_every=2",
       "train.eval_sequences=2", "train.save_every=2", "device=cpu", "device.threads=1", "logger=jsonl",
       "train.peak_tflops=1", "lora.rank=2", "lora.dropout=0.1", "optimizer.lr=0.02"]  # fmt: skip


@pytest.fixture(scope="module", params=PARTS)
def code(request: pytest.FixtureRequest, shared: Path) -> str:
    """A run `whole-<code>` of 4 steps from a folder of Transformers."""
    Path("text.txt").write_text("abcdefg hijk\n" * 400)
    sizes = [*OURS[:7], "model.tied=true", "model.context=16"]
    made = [*sizes, *RUN[:4], "train.steps=1", "logger=jsonl", "device=cpu", "run.dir=start"]
    if not Path("source").is_dir():
        assert main(made) == 0
        assert main(["task=export", "run.dir=start", "export.form=huggingface", "export.dir=source"]) == 0
    assert train(request.param, f"whole-{request.param}", "train.steps=4") == 0
    return str(request.param)


def train(code: str, run: str, *overrides: str) -> int:
    return main(["model.from=source", "model.context=16", *RUN, f"lora.base={code}", f"run.dir={run}", *overrides])


def beside_the_source(code: str, base: str) -> str:
    """Start a run from the source with the adapters of the run, and let it stand."""
    folder, run = f"peft-{code}", f"again-{code}-{base}"
    if not Path(folder).is_dir():
        assert main(["task=export", f"run.dir=whole-{code}", "export.form=peft", f"export.dir={folder}"]) == 0
    if not Path(run).is_dir():
        still = ["train.steps=1", "optimizer.lr=0", "guard.check_learning=null", f"lora.from={folder}"]
        assert train(base, run, *still) == 0
    return run


def loss_of(run: str, step: int) -> float:
    """Return the loss on held-out data that a checkpoint tells."""
    loss: float = read_checkpoint(Path(run) / "checkpoints" / f"step_{step:08d}").progress["val_loss"]
    return loss


def test_a_run_goes_on_to_the_bit_with_the_codes_it_began_with(code: str) -> None:
    assert train(code, f"parts-{code}", "train.steps=2") == 0
    assert main([f"run.dir=parts-{code}", "resume=auto", "train.steps=4"]) == 0
    parts, whole = tensors(f"parts-{code}", 4), tensors(f"whole-{code}", 4)
    assert parts.keys() == whole.keys() and all(np.array_equal(parts[name], value) for name, value in whole.items())
    named = (f"whole-{code}/checkpoints/step_{step:08d}/frozen-00001-of-00001.safetensors" for step in (2, 4))
    assert os.path.samefile(*named)
    key = "blocks.0.attention.key.weight"
    weight = load_file("source/model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
    for name, part in Quantized.of(code, weight).parts.items():
        assert np.array_equal(whole[f"{key}/{name}"], part)
    assert key not in whole


def test_sampling_and_evaluation_read_the_same_bits(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the run, and of a run that is exported with its adapters apart; not those of the merged model."""
    run, apart = f"whole-{code}", f"apart-{code}"
    assert main(["task=export", f"run.dir={run}", "export.merge=false", f"export.dir={apart}"]) == 0
    first, second = tensors(run, 4), tensors(apart, 4)
    assert second.keys() == {name for name in first if not name.endswith("_moment")}
    assert all(np.array_equal(first[name], value) for name, value in second.items())
    texts = set()
    for each in (run, apart):
        capsys.readouterr()
        assert main(["task=sample", f"run.dir={each}", "sample.temperature=0", "sample.tokens=30"]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1


def test_evaluation_and_sampling_are_those_of_the_values_in_torch(
    code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Transformers in fp64, with the values of the codes and the adapters added."""
    import transformers

    model, values = transformers.AutoModelForCausalLM.from_pretrained("source").double(), tensors(f"whole-{code}", 4)
    ours: Any = build.build_model(load_config(*OURS[:7], "model.context=16", "device=cpu"), 20)
    for path in ours.parameters():
        if f"{path}/{code}" in values:
            layer, parts = path.removesuffix(".weight"), {part: values[f"{path}/{part}"] for part in PARTS[code]}
            b, a = (torch.from_numpy(values[f"{layer}.lora.{x}.weight"]).double() for x in "ba")
            widened = torch.from_numpy(np.asarray(Quantized(code, parts))).double()
            model.get_parameter(ours.original_name(path)).data = widened + 16 / 2 * b @ a
    tokenizer = Tokenizer.from_file("source/tokenizer.json")
    Path("part.txt").write_text(text := "hijk\nabcdefg hijk\nabc")
    ids = torch.tensor(tokenizer.encode(text).ids)
    with torch.no_grad():
        scored = [model(ids[None, x : x + 16]).logits[0] for x in (0, len(ids) - 17)]
    scores = torch.cat([scored[0], scored[1][33 - len(ids) :]])  # 16 tokens, and the others with 16 before each at most
    expected = torch.nn.functional.cross_entropy(scores, ids[1:]).exp().item()
    given = [f"run.dir=whole-{code}", "device=cpu", "device.threads=1"]
    assert main(["task=eval", *given, "eval.text=[part.txt]", f"eval.out={code}.json"]) == 0
    assert json.loads(Path(f"{code}.json").read_text())["text"]["perplexity"] == pytest.approx(expected, rel=1e-5)
    texts = ids[:4]
    with torch.no_grad():
        for _ in range(12):
            texts = torch.cat([texts, model(texts[None]).logits[0, -1:].argmax(-1)])
    capsys.readouterr()
    assert main(["task=sample", *given, f"sample.prompt={text[:4]}", "sample.temperature=0", "sample.tokens=12"]) == 0
    assert capsys.readouterr().out.strip() == tokenizer.decode(texts.tolist()).strip()


def test_ranks_go_on_with_the_bits_of_one_process(code: str) -> None:
    words = ["model.from=source", "model.context=16", *RUN, f"lora.base={code}", "engine=static", "parallel.slices=4",
             "train.batch_size=4"]  # fmt: skip
    assert main([*words, "train.steps=6", f"run.dir=alone-{code}"]) == 0
    for step, mode, count in ((2, "zero3", 4), (4, "zero1", 2), (5, "zero3", 2), (6, "none", 1)):
        given = [*words, f"run.dir=ranks-{code}", "resume=auto", f"train.steps={step}", f"parallel={mode}"]
        ranks = Forks([given] * count, Path(f"ranks-{code}-{step}"))
        assert ranks.wait(240) and ranks.codes == [0] * count
    alone, others = (everything(Path(f"{name}-{code}")) for name in ("alone", "ranks"))
    assert alone.keys() == others.keys() and [name for name in alone if alone[name] != others[name]] == []


def test_merged_weights_are_those_of_the_source(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And the losses of both are told: that of the run, and that of the source with the same adapters."""
    run, whole, source = f"whole-{code}", tensors(f"whole-{code}", 4), load_file("source/model.safetensors")
    still = beside_the_source(code, "null")
    assert abs(loss_of(run, 4) - loss_of(still, 1)) > 6e-5
    for name in ("source", "gone"):
        Path("source").rename("gone") if name == "gone" else None
        capsys.readouterr()
        file = f"{name}-{code}.safetensors"
        assert main(["task=export", f"run.dir={run}", "export.form=ttrain", f"export.file={file}"]) == 0
        told = capsys.readouterr()
        assert ("14 of 14 frozen weights are exported as the run keeps" in told.err) == (name == "gone")
        said = re.search(rf"val/loss is (\S+) in {code}, and (\S+) as exported", told.out)
        if name == "gone":  # with the tokenizer that reads the data
            assert "not compared, for want of the run's data: data.tokenizer=source" in told.out and said is None
        else:
            assert said is not None and float(said[1]) == pytest.approx(loss_of(run, 4), abs=5.1e-5)
            assert float(said[2]) == pytest.approx(loss_of(still, 1), abs=5.1e-5)
        Path("gone").rename("source") if name == "gone" else None
        layer, base = "blocks.1.feed_forward.up", source["model.layers.1.mlp.up_proj.weight"]
        if name == "gone":
            parts = {part: whole[f"{layer}.weight/{part}"] for part in PARTS[code]}
            base = np.asarray(Quantized(code, parts))
        added = 16 / 2 * whole[f"{layer}.lora.b.weight"].astype(np.float64) @ whole[f"{layer}.lora.a.weight"]
        np.testing.assert_allclose(load_file(file)[f"{layer}.weight"], base + added, atol=1e-6)


def test_adapters_stand_beside_the_source_whatever_the_bits(code: str) -> None:
    """Their file names the weights of the source, so they fit it in other bits too."""
    for base in ("null", "nf4"):
        again, whole = tensors(beside_the_source(code, base), 1), tensors(f"whole-{code}", 4)
        assert all(np.array_equal(again[x], whole[x]) for x in again if x.endswith((".a.weight", ".b.weight")))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["lora.base=nf4", "model.width=32"], "lora.base=nf4: blocks.0.attention.query reads 32 features"),
        (["lora.base=int4"], "lora.base=int4: no such choice"),
        (["lora.base=nf4", "device=n150"], "lora.base=nf4: device=n150 has no products with such weights"),
    ],
)
def test_what_can_not_be_kept_so_is_refused(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*OURS[:-1], "task=plan", "data=text", "data.path=text.txt", "lora.rank=2", *given]
    assert main(words) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_resume_with_another_base_is_refused(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"run.dir=whole-{code}", "resume=auto", "train.steps=6", "lora.base=null"]) == 2
    assert f"has other adapters: lora.base: {code} there, None given" in capsys.readouterr().err
