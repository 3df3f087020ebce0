"""Replacements for keys and options that were removed or renamed, and for Hydra's keys that do nothing here.

Both are answered on the command line, those that went also in the recorded config of a run.
"""

from __future__ import annotations

# Old key, section or `key=option` -> the new one, or a sentence that says what to do.
RENAMED: dict[str, str] = {
    "bench=core_grid": "Give -m bench=chip device.core_grid=[7,8],[7,4].",
    "bench=dispatch": "Give -m bench=chip device.dispatch=worker,eth.",
    "bench=subdevices": "Give -m bench=chip device.core_grid=[7,8],[7,4].",
    "bench.batch": "Give bench.size=[<rows>x<width>,...].",
    "bench.beside": "Leave it out: run task=bench beside the other program, and compare both with benchmarks.compare.",
    "bench.compare": "In a clone of the repository give two results.json files to python -m benchmarks.compare.",
    "bench.dim": "Give bench.size=[<rows>x<width>,...].",
    "bench.layers": "Give bench.size=[<rows>x<width>x<layers>,...].",
    "bench.markdown": "Give results.json files to python -m benchmarks.page, which makes the tables of a page.",
    "bench.name": "Give bench=<preset>.",
    "bench.repeats": "bench.starts",
    "bench.startup": "Give bench.measure=[start,steps], or [steps] alone.",
    "bench.variants": "Give -m and several values of a key, such as device.threads=1,2.",
    "bench.work": "bench.size",
    "data.order=read": "data.order=sequential",
    "device.make_room": "device.yield_cores",
    "device.products": "device.matmul",
    "guard.search_seconds": "Leave it out: no steps are repeated. guard.nonfinite=skip names the first bad tensor.",
    "hydra.job.chdir": "ttrain never changes the folder; paths are those of the folder it is started in.",
    "hydra.job.env_set": "Set the variable in the shell, before the command.",
    "hydra.job.name": "Give logger.run_name=<name>, or run.dir=<folder>.",
    "hydra.job_logging": "A run writes metrics.jsonl and events.jsonl in its folder; a job of a sweep also log.txt.",
    "hydra.launcher": "ttrain starts jobs itself; give sweep.parallel=<jobs>, under SLURM sweep.srun.",
    "hydra.output_subdir": "Give run.dir=<folder>; the config lies in it.",
    "hydra.run.dir": "Give run.dir=<folder>.",
    "hydra.searchpath": "Give --config-dir <folder>.",
    "hydra.sweep": "Give sweep.dir=<folder>.",
    "hydra.sweeper": "ttrain runs sweeps itself: see sweep.search=tpe, sweep.trials, sweep.parallel.",
    "hydra.verbose": "HYDRA_FULL_ERROR=1 shows tracebacks.",
    "lr_finder.rise": "Leave it out: task=lr_finder stops where the loss has risen by half of what it had fallen.",
    "optimizer.group_lr": "optimizer.lr_multipliers",
    "precision=bf16_pure": "precision=bf16_true",
    "ramp": "lr_finder",
    "schedule.final": "schedule.min_lr_ratio",
    "supervise.max_backoff": "Leave it out: a restart waits at most 300 s.",
    "supervise.on_restart_timeout": "Leave it out: the command may take 300 s.",
    "task=lr": "task=lr_finder",
    "train.accumulation": "train.gradient_accumulation",
    "train.block_schedule": "train.length_schedule",
    "train.block_steps": "train.phase_steps",
    "train.eval_batches": "Give train.eval_sequences: it counts sequences, not batches.",
    "verify.golden": "Leave it out: a card's reference functions are a device of the tests now.",
    "verify.skip_ops": "Give verify.ops=none.",
}


def instead(old: str) -> str:
    """Return the sentence that answers a key, section or `key=option` that went; empty for any other."""
    if old.startswith("recipe=bench-"):
        return "Give task=bench bench=<preset>; --help lists the presets."
    new = RENAMED.get(old, "")
    return new if " " in new or not new else f"It is now {new}."


def instead_of_hydras(key: str) -> str:
    """Return the sentence that answers a key of Hydra, or a section of its keys, that does nothing with ttrain."""
    while key and key not in RENAMED:
        key = key.rpartition(".")[0]
    return RENAMED.get(key, "Leave it out.")
