"""Notices on settings that are allowed but seldom meant. A run prints them at its start."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from ttrain.config.schema import Config
from ttrain.core.files import read_json
from ttrain.data.settings import TextConfig
from ttrain.device.info import info_of
from ttrain.models.gpt_weights import dropouts
from ttrain.models.settings import AGILLMConfig, GPTConfig
from ttrain.optim.settings import ScheduleFreeConfig
from ttrain.train.checkpoint.hub_folder import find_folder

_SHORTEST_PAIRS = 4  # tokens: a window of two and the two that it predicts


def notices(config: Config) -> Iterator[str]:
    """One sentence each."""
    train, model, weights = config.train, config.model, getattr(config.data, "weights", [])
    if config.optimizer.lr == 0:
        yield "optimizer.lr=0, so no parameter changes."
    if isinstance(config.optimizer, ScheduleFreeConfig) and config.schedule.name != "constant":
        yield "optimizer=schedule_free is meant for schedule=constant: its average takes the place of a falling rate."
    base = getattr(model, "from_", None) or train.init_from
    if config.lora.rank and base is None and not config.source.merged:
        told = "lora.rank trains adapters beside a model of random numbers"
        yield f"{told}. train.init_from=<run or file> or model.from=<folder> gives a trained one."
    alone = [key for key in sorted(config.source.explicit) if key.startswith("lora.") and key != "lora.rank"]
    if alone and not config.lora.rank:
        yield f"{alone[0]} is given without lora.rank, so the whole model is trained."
    best, reason = info_of(config.device).best_precision(config.device)
    if reason and best == "fp32" and config.precision.name != "fp32":
        yield f"precision={config.precision.name}: {reason} than precision=fp32. precision=auto takes what is faster."
    if config.objective.name == "grpo" and not config.device.batch_invariant:
        why = config.engine.lacks_invariance(config.device)
        told = "what was drawn has other last bits of its probability when it is trained on"
        yield f"{told}: device.batch_invariant is off{f', since it needs {why}' if why else ''}."
    yield from idle(config, ("model", "optimizer", "schedule", "train", "sample"))
    yield from _unequal_dropouts(config)
    characters = isinstance(config.data, TextConfig) and config.data.tokenizer == "char"
    if config.source.choices.get("model") == "gpt2" and characters and "data.tokenizer" not in config.source.explicit:
        yield "model=gpt2 reads characters here. data.tokenizer=bpe data.vocabulary_size=50257 is like the original."
    schedules = [("train.length_schedule", train.length_schedule, "sequences of {} tokens")]
    schedules += [("train.batch_schedule", train.batch_schedule, "batches of {}")]
    for key, sizes, unit in (*schedules, ("data.sources", weights, "the weights {}")):
        reached = (len(sizes) - 1) * train.phase_steps + 1
        if train.last < reached:
            told = f"train.steps={train.steps} end before {key} does: {unit.format(sizes[-1])} begin at step {reached}"
            yield f"{told}. A lower train.phase_steps gets there."
    shortest = min([model.context or _SHORTEST_PAIRS, *train.length_schedule]) if isinstance(model, AGILLMConfig) else 0
    if 0 < shortest < _SHORTEST_PAIRS and model.objective == "joint":
        yield f"sequences of {shortest} tokens hold no SAT window, so they train the AR head alone."


def _unequal_dropouts(config: Config) -> Iterator[str]:
    """Tell which probability is taken where a folder of GPT-2 has several."""
    folder, chosen = getattr(config.model, "from_", None), config.source.explicit
    if folder is None or not isinstance(config.model, GPTConfig) or config.source.merged or "model.dropout" in chosen:
        return
    found = dropouts(read_json(find_folder(folder) / "config.json"))
    if len({*found.values()}) > 1:
        told = ", ".join(f"{key}={value}" for key, value in found.items())
        yield f"model.from={folder} has {told}; all take {config.model.dropout}. model.dropout=<p> gives another."


def idle(config: Config, sections: Collection[str]) -> Iterator[str]:
    """One sentence for each key of these sections that another key leaves nothing to change for."""
    for key, without, why in _idle(config):
        section, _, name = key.partition(".")
        settings = getattr(config, section)
        declared = {each.name: each.default for each in dataclasses.fields(settings)}
        if section in sections and without and name in declared and getattr(settings, name) != declared[name]:
            yield f"{key}={getattr(settings, name)} changes nothing: {why}."


def _idle(config: Config) -> Iterator[tuple[str, bool, str]]:
    """Yield keys, True if they are idle, and why they are then."""
    model, optimizer, schedule = config.model, config.optimizer, config.schedule
    train, sample, none = config.train, config.sample, optimizer.decay_rule == "none"
    yield "schedule.min_lr_ratio", schedule.name == "constant", "schedule=constant does not fall"
    yield "schedule.decay", schedule.name != "wsd", "it is for schedule=wsd"
    yield "schedule.decay", schedule.decay_from is not None, "schedule.decay_from takes its place"
    yield "optimizer.weight_decay", none, "with optimizer.decay_rule=none nothing decays"
    yield "optimizer.decay_rule", optimizer.weight_decay == 0 and not none, "optimizer.weight_decay is 0"
    yield "optimizer.cautious", none or optimizer.weight_decay == 0, "nothing decays"
    phases = train.length_schedule, train.batch_schedule, getattr(config.data, "weights", [])[1:]
    yield "train.phase_steps", not any(phases), "there are no phases"
    yield "train.early_stop", train.eval_every is None, "with train.eval_every=null there is one evaluation, at the end"
    yield "train.init_anyway", train.init_from is None, "there is no train.init_from"
    for key in ("base_width", "base_head_width"):
        yield f"model.{key}", getattr(model, "parametrization", "") == "standard", "it is for model.parametrization=mup"
    for key in ("expert_step", "router", "router_normalised", "balance_weight", "router_z_weight"):
        yield f"model.{key}", not getattr(model, "experts", None), "the model has no experts"
    scaling = getattr(model, "rotary_scaling", None)
    for key in ("factor", "low", "high", "context"):
        unread = scaling in (None, "none") or (scaling == "linear" and key != "factor")
        yield f"model.rotary_{key}", unread, f"model.rotary_scaling={scaling} does not read it"
    for key in ("sat_target", "sat_stride", "sat_max_windows", "gate_weight"):
        yield f"model.{key}", getattr(model, "objective", "") == "ar_only", "model.objective=ar_only has no SAT pass"
    for key in ("top_k", "top_p", "min_p", "seed"):
        yield f"sample.{key}", sample.temperature == 0, "sample.temperature=0 always takes the likeliest token"
    unpunished = sample.repetition == 1 and not (sample.presence or sample.frequency)
    yield "sample.penalty_window", unpunished, "sample has no penalty"
