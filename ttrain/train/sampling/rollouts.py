"""Rollouts: completions that the model writes after prompts, and the training batches that they make.

Completion n of a run is drawn by (run.seed, n, place) from the weights at its step, so that a run that is killed writes
the same ones again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np

from ttrain.core.errors import ConfigError, DataError, raised_as
from ttrain.data.end_token import named_end
from ttrain.data.examples import ROW, ExampleDataset
from ttrain.engine.base import Step
from ttrain.models.base import Batch
from ttrain.objectives.grpo import advantages_of
from ttrain.objectives.rewards import BadReward, rewards_of
from ttrain.parallel.world import World
from ttrain.train.sampling.batch import BatchSource
from ttrain.train.sampling.decode import cache_tensors
from ttrain.train.sampling.stream import Stop, TextStream
from ttrain.train.steps.phases import BatchReader, Position
from ttrain.train.steps.session import Session
from ttrain.train.task_settings import SampleConfig

_SHOWN, _TRIED = 4, 100  # completions of a step that are shown, rows whose rewards are tried before training


class Completion(NamedTuple):
    """A text after a prompt, of values that JSON holds."""

    prompt: Any
    text: str  # without what ended it
    tokens: list[int]
    log_probs: str  # of the tokens, fp32 in hexadecimal
    ended: bool  # before it had the most tokens
    numbers: dict[str, float]  # rewards and lengths; metrics are their means


class Rollouts(BatchReader):
    """Training batches of completions. Each serves objective.num_iterations steps. Batches may not be read ahead.

    Ranks write the completions of their own slices, and exchange them: every rank has the whole batch.
    """

    def __init__(self, session: Session, built: Mapping[str, Step], config: Any, data: ExampleDataset, world: World):
        """Let a session build the steps that write completions, and find them in `built`. Call `begin` next.

        Raises ConfigError for a model or a device that can't write, and DataError for a row that can't be rewarded: the
        first rows are tried with an empty completion and with their answer.
        """
        graph, model, encoder = session.graph, cast("Any", session.graph.model), data.encoder
        self._config, self._data, self._world = graph.objective.config, data, world
        scales = self._config.temperature == 1 or getattr(model.config, "logit_cap", 0) is None
        if graph.chips > 1 or not (scales and hasattr(model, "extend")):
            raise ConfigError("objective=grpo: needs model=llama or gpt, no mesh, and beside logit_cap temperature=1.")
        for place, row in chain(*(islice(zip(data.places[x], data.rows[x], strict=True), _TRIED) for x in data.rows)):
            with raised_as(DataError, place, "Mend the row, the reward, or leave one out.", BadReward):
                _ = [rewards_of(self._config.reward, row, text) for text in ("", str(row.get("answer", "")))]
        rows, most = config.train.batch_size // world.ranks.slices, self._config.max_completion_length
        sample = SampleConfig(tokens=most, temperature=self._config.temperature, seed=config.run.seed)
        steps = SimpleNamespace(session=session, length=lambda tokens: tokens, get=lambda *_: built)
        given = min(rows, config.sample.batch_size), model.context
        self._source = BatchSource(steps, sample, encoder.tokenizer.vocabulary, *given, 1 / sample.temperature)
        traces = self._source.traces(model, *given)
        session.state.add(cache_tensors(list(traces.values())))
        session.graph = replace(graph, further={**graph.further, **traces})
        stop = Stop.of(encoder.tokenizer, config.sample.stop, named_end(config.data, encoder.tokenizer.config))
        self._stop = replace(stop, ids=stop.ids | {encoder.end})

    def begin(self, tell: Callable[[int, list[Completion]], object], *given: Any) -> Rollouts:
        """Return itself as the reader of an attempt: `given` are what BatchReader takes after the data.

        `tell` gets a step and its first completions.
        """
        super().__init__(self._data, *given)
        self._held = [Completion(*each) for each in json.loads(self._start.rollout or "[]")]
        self._tell, self._group, self._numbers = tell, self._place(self._step + 1)[0], dict[str, float]()
        return self

    def __call__(self, step: int) -> Batch:
        (group, rows, _), each = self._place(step), self._config.num_generations
        if self._newest is None or self._newest[0] != group:
            prompts = self._data.batch("train", self._seed, group * (rows // each), rows // each)
            prompts = {name: np.repeat(array, each, axis=0) for name, array in prompts.items()}  # [rows, ...]
            if group != self._group or len(self._held) != rows:
                self._held, self._group = self._written(prompts[ROW].tolist(), group * rows), group
                self._tell(step, self._held[:_SHOWN])
            self._newest = group, self._batch(prompts)
        return self._newest[1]

    def before(self, step: int) -> Position:
        """See BatchReader. Between two steps on the same completions, the position holds them."""
        (group, _, done), position = self._place(step), super().before(step)
        return position._replace(rollout=json.dumps(self._held)) if done and group == self._group else position

    def metrics(self, step: int) -> dict[str, float]:
        """Return the means of rewards and lengths over the newest completions."""
        return self._numbers

    def write(self, split: Any, rows: Sequence[int], numbers: Sequence[int], greedy: bool = False) -> list[Completion]:
        """Return a completion of each row's prompt; `numbers` tell them apart. `greedy` ones have the likeliest tokens.

        All ranks write at once. Raises BadReward on all of them where a reward can't be given on one.
        """
        data, source, names, problem = self._data, self._source, self._config.reward, None
        weights = self._config.reward_weights or np.ones(len(names))
        given, found, ended = [data.rows[split][row] for row in rows], list[Completion](), [False] * len(rows)
        prompts = [data.encoder.prompt(row["prompt"]) for row in given]
        streams = [TextStream(data.encoder.tokenizer, ids, len, self._stop, echo=False) for ids in prompts]

        def ends(number: int, token: int) -> bool:
            ended[number] = streams[number].push(token)
            return ended[number]

        source = replace(source, config=replace(source.config, temperature=0.0)) if greedy else source
        for at, (tokens, log_probs) in enumerate(source.sample(prompts, numbers, ends)):
            text, rewards = streams[at].close(), [np.nan] * len(names)
            try:
                rewards = rewards_of(names, given[at], text)
            except BadReward as error:
                problem = problem or (numbers[at], f"{data.places[split][rows[at]]}: {error}.")
            means = {"reward": float(np.dot(weights, rewards)), "completions/mean_length": len(tokens)}
            means |= {f"rewards/{name}/mean": reward for name, reward in zip(names, rewards, strict=True)}
            means["completions/clipped_ratio"] = float(not ended[at])
            found.append(Completion(given[at]["prompt"], text, tokens, log_probs.tobytes().hex(), ended[at], means))
        if (told := self._world.first(problem)) is not None:
            raise BadReward(told)
        return found

    def _place(self, step: int) -> tuple[int, int, int]:
        """Return the number of a step's batch of completions, its size, and how many samples of it were read before."""
        rows = self.schedule.at(step).rows
        group, done = divmod(super().before(step).samples, rows * self._config.num_iterations)
        return group, rows, done

    def _written(self, rows: list[int], first: int) -> list[Completion]:
        """Write completions of these rows slice by slice. `first` is the number of the first completion."""
        ranks, each = self._world.ranks, len(rows) // self._world.ranks.slices
        spans = (range(slice_ * each, (slice_ + 1) * each) for slice_ in ranks.own)
        own = [self.write("train", [rows[at] for at in span], [first + at for at in span]) for span in spans]
        parts = (self._world.broadcast(own, rank) for rank in range(ranks.count))
        return [Completion(*each) for part in parts for some in part for each in some]

    def _batch(self, prompts: Batch) -> Batch:
        """Return the fields of GRPO for the completions that are held, and note their metrics."""
        config, held = self._config, self._held
        self._numbers = {name: float(np.mean([each.numbers[name] for each in held])) for name in held[0].numbers}
        rewards = [each.numbers["reward"] for each in held]
        advantages, spread = advantages_of(np.array(rewards), config.num_generations, config.scale_rewards)
        self._numbers |= spread
        tokens, targets, old = (prompts[name] for name in ("tokens", "targets", "old_log_probs"))
        for row, (start, each) in enumerate(zip((targets >= 0).argmax(1), held, strict=True)):
            targets[row], stop = -1, start + len(each.tokens)  # the prompt's last token predicts the first of them
            tokens[row, start + 1 : stop] = each.tokens[:-1]
            if each.ended or not config.mask_truncated_completions:
                targets[row, start:stop] = each.tokens
                old[row, start:stop] = np.frombuffer(bytes.fromhex(each.log_probs), np.float32)
        return {"tokens": tokens, "targets": targets, "old_log_probs": old, "advantages": advantages[:, None]}
