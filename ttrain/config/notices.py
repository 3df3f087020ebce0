"""What a config may say although it is seldom meant: told when a run starts, never refused."""

from __future__ import annotations

from collections.abc import Iterator

from ttrain.config.schema import Config
from ttrain.data.settings import TextConfig
from ttrain.models.settings import AGILLMConfig
from ttrain.optim.settings import ScheduleFreeConfig

_SHORTEST_PAIRS = 4  # tokens: a window of two and the two that it predicts


def notices(config: Config) -> Iterator[str]:
    """One sentence each."""
    train, model = config.train, config.model
    if config.optimizer.lr == 0:
        yield "optimizer.lr=0, so no parameter changes."
    if isinstance(config.optimizer, ScheduleFreeConfig) and config.schedule.name != "constant":
        yield "optimizer=schedule_free is meant for schedule=constant: its average takes the place of a falling rate."
    base = getattr(model, "from_", None) or train.init_from
    if config.lora.rank and base is None and not config.source.merged:
        yield (
            "lora.rank trains adapters beside a model of random numbers. train.init_from=<run or file> or model.from="
            "<folder> gives a trained one."
        )
    idle = [key for key in sorted(config.source.explicit) if key.startswith("lora.") and key != "lora.rank"]
    if idle and not config.lora.rank:
        yield f"{idle[0]} is given without lora.rank, so the whole model is trained."
    characters = isinstance(config.data, TextConfig) and config.data.tokenizer == "char"
    if config.source.choices.get("model") == "gpt2" and characters and "data.tokenizer" not in config.source.explicit:
        yield (
            "model=gpt2 reads characters here, but is made for tokens of several characters. data.tokenizer=bpe trains "
            "such a tokenizer on the text; data.vocabulary_size=50257 gives it as many tokens as GPT-2 has."
        )
    for key, unit in (("length_schedule", "sequences of {} tokens"), ("batch_schedule", "batches of {}")):
        sizes = getattr(train, key)
        reached = (len(sizes) - 1) * train.phase_steps + 1
        if train.steps < reached:
            yield (
                f"train.steps={train.steps} end before train.{key} does: {unit.format(sizes[-1])} begin at step "
                f"{reached}. A lower train.phase_steps gets there."
            )
    shortest = min([model.context or _SHORTEST_PAIRS, *train.length_schedule]) if isinstance(model, AGILLMConfig) else 0
    if 0 < shortest < _SHORTEST_PAIRS and model.objective == "joint":
        yield f"sequences of {shortest} tokens hold no SAT window, so they train the AR head alone."
