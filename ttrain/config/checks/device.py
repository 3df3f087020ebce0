"""What a device, its replicas and its precisions allow."""

from __future__ import annotations

from collections.abc import Iterator

from ttrain.config.checks.check import check
from ttrain.config.components import TaskConfig
from ttrain.config.registry import family_that
from ttrain.config.schema import Source
from ttrain.device.family import family_of
from ttrain.device.settings import DeviceConfig
from ttrain.nn.precision import PrecisionConfig
from ttrain.train.settings import LoggerConfig, RecoverConfig, ReplicasConfig, RunConfig, SuperviseConfig, TrainConfig


@check
def _one_capture_at_a_time(train: TrainConfig, device: DeviceConfig) -> Iterator[str]:
    count = family_of(device).replicas(device)
    if train.length_schedule and count > 1:
        yield (
            f"train.length_schedule={train.length_schedule}: a phase captures steps anew, which would spoil "
            f"what the other of device.subdevices={count} has captured. Leave it empty, or give device.subdevices=1."
        )


@check
def _precision(precision: PrecisionConfig, device: DeviceConfig) -> Iterator[str]:
    yield from lacks_precision(device, "precision", precision.name, "precision=bf16")


@check
def _device(train: TrainConfig, device: DeviceConfig) -> Iterator[str]:
    yield from family_of(device).problems(device, train.batch_size // train.accumulation)


@check
def _replicas(task: TaskConfig, device: DeviceConfig, run: RunConfig, replicas: ReplicasConfig) -> Iterator[str]:
    count = family_of(device).replicas(device)
    divided = family_that(lambda each: each.divides)
    for key in ("seed", "lr"):
        given = getattr(replicas, key)
        if given is not None and count == 1:
            yield f"replicas.{key}={given}: there is one run. Give device.subdevices=2 on a {divided.title} device."
        elif given is not None and len(given) != count:
            yield f"replicas.{key}={given}: must hold one value for each of the {count} replicas."
        elif given is not None and min(given) < 0:
            yield f"replicas.{key}={given}: must be 0 or more."
    largest = max(replicas.seed or [run.seed + count - 1])
    if count > 1 and largest >= 2**31:
        key = "replicas.seed" if replicas.seed else "run.seed"
        yield f"{key}: the largest seed would be {largest}, above {2**31 - 1}."
    if count > 1 and task.name not in ("train", "plan", "doctor", "runs", "report"):
        yield f"device.subdevices={count}: task={task.name} runs on a whole chip. Give device.subdevices=1."


@check
def _shared_device(
    device: DeviceConfig, logger: LoggerConfig, supervise: SuperviseConfig, recover: RecoverConfig, source: Source
) -> Iterator[str]:
    count = family_of(device).replicas(device)
    if count == 1:
        return
    others = {
        "logger": (logger.name == "wandb", "console", "W&B follows one run per process"),
        "recover.oom": (recover.oom == "shrink", "stop", "the replicas share the memory"),
        "supervise.enabled": (supervised(supervise, source), "false", "a supervisor follows one run"),
    }
    for key, (wrong, instead, why) in others.items():
        if wrong:
            yield f"device.subdevices={count}: {why}. Give {key}={instead}."


def supervised(supervise: SuperviseConfig, source: Source) -> bool:
    """Whether training is wanted under a supervisor."""
    if supervise.enabled is None:
        return any(key.startswith("supervise.") for key in source.explicit)
    return supervise.enabled


def lacks_precision(device: DeviceConfig, key: str, name: str, instead: str) -> Iterator[str]:
    """Who has a precision that the device has not."""
    having = family_that(lambda each: name in each.precisions)
    if name in having.precisions and name not in family_of(device).precisions:
        yield f"{key}={name}: only on {having.title} devices. Give {instead}, or device={having.example}."
