"""task=eval: how well a trained model predicts texts, and which endings of questions it finds likeliest."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from ttrain.config.schema import Config
from ttrain.core.errors import ConfigError
from ttrain.core.files import to_json, write_chosen
from ttrain.core.folders import RESULTS, claim_results
from ttrain.core.units import counted, format_bytes, format_count
from ttrain.tasks.evaluating.measures import Choices, Documents, opened
from ttrain.train.runs.run_directory import chosen_model

ROOT = Path("outputs/eval")


def run(config: Config) -> dict[str, Any]:
    """Prints what eval.text and eval.choices ask for, writes it to eval.out or a new folder, and returns it."""
    wanted = config.eval
    if not wanted.text and wanted.choices is None:
        told = "task=eval: nothing to measure"
        raise ConfigError(f"{told}. Give eval.text=[<files>] or eval.choices=<file of questions>.")
    with opened(config) as scorer:
        given = scorer.given
        results: dict[str, Any] = {
            "source": given.origin,
            "step": given.step,
            "adapters": None if config.run.dir else config.lora.from_,
            "model": chosen_model(Path(config.run.dir or "")) or given.model.config.name,
            "context": scorer.context,
            "tokenizer": scorer.tokenizer.hash,
            "device": config.device.name,
            "precision": given.config.precision.name,
            "command": config.source.command(),
        }
        label = f"{results['model']}_{Path(given.origin).name}"
        folder = None if wanted.out else claim_results("eval.out", None, ROOT, label)
        out = Path(wanted.out or "") if folder is None else folder / RESULTS
        try:
            if wanted.text:
                texts = Documents.read(scorer, "eval.text", wanted.text, wanted.limit, wanted.text_key, wanted.stride)
                results["text"] = texts.measure(scorer)
                write_chosen("eval.out", out, to_json(results), folders=True)
            if wanted.choices is not None:
                questions = Choices.read(scorer, "eval.choices", Path(wanted.choices), wanted.limit)
                results["choices"] = questions.measure(scorer)
                write_chosen("eval.out", out, to_json(results), folders=True)
        finally:
            if folder is not None:
                with suppress(OSError):  # one that is used is not empty, and stays
                    folder.rmdir()
    results["out"] = str(out)
    for label, value in _lines(results, out):
        print(f"{label.ljust(15)}{value}")
    return results


def _lines(results: dict[str, Any], out: Path) -> list[tuple[str, str]]:
    step = "" if results["step"] is None else f", step {results['step']}"
    adapters = "" if results["adapters"] is None else f", with the adapters of {results['adapters']}"
    lines = [("model", f"{results['model']} of {results['source']}{step}{adapters}")]
    if text := results.get("text"):
        size = f"{format_count(text['tokens'])} tokens, {format_bytes(text['bytes'])}"
        lines.append(("text", f"{', '.join(text['source'])}: {counted(text['documents'], 'document')}, {size}"))
        numbers = ("loss", "perplexity", "bits_per_byte")
        lines += [(name.replace("_", " "), f"{text[name]:.4f}") for name in numbers]
        lines += [("note", notice) for notice in text["notices"]]
    if choices := results.get("choices"):
        lines.append(("choices", f"{choices['source']}: {counted(choices['questions'], 'question')}"))
        for name in (name for name in choices if f"{name}_stderr" in choices):
            lines.append((name, f"{choices[name]:.4f} ± {choices[f'{name}_stderr']:.4f}"))
        lines.append(("centred", f"{choices['centred_accuracy']:.4f} (acc_norm; 0 is guessing)"))
    return [*lines, ("results", str(out))]
