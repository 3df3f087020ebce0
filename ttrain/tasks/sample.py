"""task=sample: text from the model of a run, `python -m ttrain task=sample run.dir=<run>`."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from pathlib import Path

from ttrain.config import build
from ttrain.config.saved import continued
from ttrain.config.schema import Config
from ttrain.core.errors import CheckpointError, UserError
from ttrain.core.waiting import Waiting
from ttrain.models.identity import FUNCTION
from ttrain.train.checkpoint.checkpoint import Checkpoint


def run(config: Config) -> None:
    """Prints `sample.count` samples. The model is rebuilt from what its checkpoint says; the data is not needed."""
    from ttrain.data.library_tokenizer import parse_tokenizer
    from ttrain.train.checkpoint.retention import find_checkpoint
    from ttrain.train.runs.resume import check_adapters, check_architecture
    from ttrain.train.sampling.decode import cache_tensors
    from ttrain.train.sampling.draw import Stop, encode_prompt
    from ttrain.train.sampling.source import Source, print_source, sampling_traces

    assert config.run.dir is not None  # the config's checks hold it so
    checkpoint = find_checkpoint(Path(config.run.dir), config.sample.checkpoint)
    config = continued(checkpoint.config, config, ("device", "sample", "engine", "logger"))
    tokenizer = parse_tokenizer(_tokenizer(checkpoint))
    end_token = getattr(config.data, "end_token", None)
    prompt = encode_prompt(tokenizer, config.sample.prompt, end_token)
    model = build.build_model(config, tokenizer.vocabulary)
    check_architecture(checkpoint.config, model.config, checkpoint.path, FUNCTION)
    check_adapters(checkpoint.config, config.lora, checkpoint.path)
    traces = sampling_traces(model, config.sample)
    source = Source(model, config.sample, tokenizer.vocabulary, traces)
    caches = cache_tensors([trace for steps in traces.values() for trace in steps.values()])
    with ExitStack() as stack:
        device = stack.enter_context(closing(build.build_device(config.device, config.precision)))
        if not device.computes:
            raise UserError(
                f"device {device.name} computes no values, so there is no text. Give device=cpu or another."
            )
        if device.caution is not None:
            print(f"WARNING: {device.caution}", file=sys.stderr)
        with Waiting("Loading the model"):
            session = stack.enter_context(closing(build.build_session(config, model, device, False, caches)))
            checkpoint.load(session.state, optimizer=False)
            source.build(session.engine.build, session.graph.trace_logits)
        print_source(source, tokenizer, prompt, Stop.of(tokenizer, config.sample.stop, end_token))


def _tokenizer(checkpoint: Checkpoint) -> str:
    if checkpoint.tokenizer is None:
        raise CheckpointError(
            f"{checkpoint.path} has no tokenizer, so its model makes no text. Give a language model's run."
        )
    return checkpoint.tokenizer
