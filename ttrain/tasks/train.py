"""task=train: train a model, from its first step or from a checkpoint."""

from __future__ import annotations

import gc
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from ttrain.config import build
from ttrain.config.saved import continued
from ttrain.config.schema import Config, to_dict
from ttrain.core.errors import OutOfMemory
from ttrain.device.ttnn.settings import TenstorrentConfig
from ttrain.tasks.job import Job, tokenizer_json
from ttrain.tasks.recover import shrunk_config
from ttrain.train import resume as resuming
from ttrain.train.heartbeat import Heartbeat
from ttrain.train.warm_start import open_warm_start

if TYPE_CHECKING:
    from ttrain.data.batches import Dataset
    from ttrain.train.resume import ResumePoint


def run(config: Config) -> float | None:
    """Trains, prints a sample and a summary, and returns the best val/loss.

    Where memory runs out and recover.oom=shrink, trains on with half the micro-batch and twice the accumulation.
    """
    if isinstance(config.device, TenstorrentConfig) and config.device.subdevices > 1:
        from ttrain.tasks.replicas import run as run_replicas

        return run_replicas(config)
    while True:
        try:
            return _run(config)
        except OutOfMemory as error:
            smaller = shrunk_config(config, error)
            if smaller is None:
                raise
        config = smaller
        gc.collect()  # what the failed try still holds


def _run(config: Config) -> float | None:
    from ttrain.train.step import last_value

    job = prepared(config)
    with ExitStack() as stack:
        device = stack.enter_context(closing(build.build_device(job.config.device, job.config.precision)))
        job.place(device, build.build_console(job.config.logger))
        if device.computes:
            return last_value(job.turns(stack))
        job.rehearse(stack) if device.step_facts() else job.dry_run(stack)
        return None


def prepared(config: Config) -> Job:
    """Data, model and what a run continues from, checked before a device is touched."""
    heartbeat = Heartbeat.of_process()
    heartbeat.beat()
    point = resuming.find_resume_point(config.resume, config.run.dir)
    if point is not None:
        config = continued(point.checkpoint.config, config)
    dataset = build.build_dataset(config, lambda built: _check_tokenizer(point, built))
    model = build.build_model(config, dataset.vocabulary)
    stored = {**to_dict(config), "model": build.stored_model(config, model)}
    stored["run"]["dir"] = None  # a run does not know where it lies, so it can be moved
    if point is not None:
        resuming.check_architecture(point.checkpoint.config, model.config, point.checkpoint.path)
        resuming.check_documents(point, dataset.description)
    prompt = _prompt(config, dataset)
    warm = None
    if point is None and config.train.init_from is not None:
        warm = open_warm_start(config.train.init_from, model, tokenizer_json(dataset), anyway=config.train.init_anyway)
    shorter = {length: build.shorter_model(config, model, length) for length in config.train.block_schedule}
    return Job(config, stored, dataset, model, prompt, point, heartbeat, shorter, warm)


def _check_tokenizer(point: ResumePoint | None, dataset: Dataset) -> None:
    """Comes before checks of the vocabulary, whose advice would not help where it is the text that changed."""
    if point is not None:
        resuming.check_tokenizer(point.checkpoint.tokenizer, tokenizer_json(dataset), point.checkpoint.path)


def _prompt(config: Config, dataset: Dataset) -> list[int] | None:
    """Token ids of the sample's prompt, checked before training starts; None where no text can be made."""
    from ttrain.train.sample import encode_prompt

    end_token = getattr(config.data, "end_token", None)
    return None if dataset.tokenizer is None else encode_prompt(dataset.tokenizer, config.sample.prompt, end_token)
