"""The command line: compose the config, check it, run one task (or a sweep of them), turn errors into exit codes."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from hydra._internal.utils import get_args_parser
from hydra.types import RunMode
from omegaconf import OmegaConf

import ttrain
from ttrain.config import registry
from ttrain.config.compose import Composer, one_sentence
from ttrain.config.help import help_text
from ttrain.config.help import shown as as_word
from ttrain.config.schema import Config, sections, to_dict
from ttrain.config.validate import owner_of
from ttrain.core.errors import (
    EXIT_DONE,
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    ConfigError,
    Interrupted,
    RankFailed,
    TtrainError,
)
from ttrain.core.folders import settle_without_home
from ttrain.core.names import did_you_mean
from ttrain.parallel.place import leader_speaks, place, rank_here

_ABSENT = object()
VERSION_FLAGS = ("--version", "-V")
DASHES = "-‐‑‒–—−"  # the one of the keyboard, and those that text is set with
FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's own switch: 1 shows the traceback of every error


class Flags(argparse.ArgumentParser):
    """Hydra's flags, with errors as ours."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}. Flags: {', '.join(sorted(flag_names()))}; all else is key=value.")


def flag_names() -> list[str]:
    """Hydra's real flags, such as --cfg and -m."""
    return [name for action in get_args_parser()._actions for name in action.option_strings]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Both `python -m ttrain` and the script `ttrain` come here."""
    _prepare_streams()
    try:
        with leader_speaks():
            code = _run(list(sys.argv[1:] if arguments is None else arguments))
            sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        _say("interrupted", mark=False)
        return EXIT_INTERRUPTED
    except TtrainError as error:
        return _failed(error)
    except OSError as error:  # a full disk, a folder that went away: the system's own words tell it best
        if not isinstance(error, BrokenPipeError):  # the reader of our output went away, as in `ttrain --help | head`
            where = f"{error.filename}: " if error.filename else ""
            _say(f"{where}{error.strerror or error}. {FULL_ERROR}=1 shows where it happened.")
        return EXIT_FAILURE
    except (MemoryError, RuntimeError) as error:  # outside a run, which tells what it needs itself
        from ttrain.train.forecast.out_of_memory import is_out_of_memory

        if not is_out_of_memory(error):
            raise
        _say(f"Out of memory: {error}. {FULL_ERROR}=1 shows where it happened.")
        return EXIT_FAILURE
    finally:
        _drop_what_nobody_reads()


def _failed(error: TtrainError) -> int:
    """Tells the user, where no other rank does."""
    here = place() if rank_here() is not None else None
    if here is not None and not error.shared and not isinstance(error, RankFailed):
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
        from ttrain.parallel.distributed import ended_early

        error = ended_early(error, here)
    if not (isinstance(error, RankFailed) and error.reported):
        _say(str(error), mark=not isinstance(error, RankFailed | Interrupted))
    return error.exit_code


def _run(arguments: list[str]) -> int:
    flags, overrides = parse_arguments(arguments)
    if flags.version:
        print(f"ttrain {ttrain.__version__}")
        return EXIT_DONE
    with Composer(flags.config_name, flags.config_dir, flags.config_path) as composer:
        if flags.help:
            print(help_text(composer))
        elif flags.hydra_help:
            composer.hydra.hydra_help(None, get_args_parser(), argparse.Namespace(overrides=[]))
        elif flags.shell_completion:
            sys.argv[0] = "ttrain"  # the command to complete, also when started as python -m ttrain
            composer.hydra.shell_completion(composer.config_name, overrides)
        elif flags.info:
            with one_sentence(composer.loader):
                composer.hydra.show_info(flags.info, composer.config_name, overrides)
        elif flags.cfg:
            _show_config(composer, overrides, flags)
        else:
            if settled := settle_without_home():
                _say(settled)
            if not flags.multirun:
                composed = composer.compose(overrides)
                if composed.hydra.mode != RunMode.MULTIRUN:  # which a config file may ask for too
                    return _run_one(composer.check(composed), overrides)
            from ttrain.sweep import command

            return command.run(composer, overrides)
    return EXIT_DONE


def _run_one(config: Config, overrides: list[str]) -> int:
    from ttrain.tasks.training import supervised
    from ttrain.train.supervise import launch
    from ttrain.train.supervise.heartbeat import Heartbeat

    if supervised.wanted(config.task.name, config.supervise, config.source):
        return supervised.run(config.supervise, config.parallel, overrides, config.source.flags)
    heartbeat = Heartbeat.of_process()
    if config.task.name == "train" and launch.wanted(config.parallel):

        def note(error: RankFailed) -> None:
            _say(str(error))
            heartbeat.tell(error=type(error).__name__, message=str(error))

        return launch.launch(config.parallel, [*config.source.flags, *overrides], note)
    try:
        run_task(config)
    except Exception as error:  # a supervisor decides by this whether another start can help
        if not (isinstance(error, RankFailed) and error.reported):
            step = getattr(error, "step", None)
            heartbeat.tell(error=type(error).__name__, message=str(error), step=step)
        raise
    return EXIT_DONE


def parse_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Hydra's flags and the overrides, key=value. `--a=b` means `a=b` unless --a is a flag; W&B agents write it so.

    So do `-a=b` and a dash as a word processor sets it.
    """
    real = {*flag_names(), *VERSION_FLAGS}
    plain = []
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if argument and argument[0] in DASHES and (name not in real or (equals and name == "--run")):
            bare = argument.lstrip(DASHES)
            argument = bare if equals and not bare.startswith("=") else argument if argument.isascii() else f"--{bare}"
        plain.append(argument)
    parser = Flags(add_help=False, allow_abbrev=False, conflict_handler="resolve", parents=[get_args_parser()])
    parser.add_argument(*VERSION_FLAGS, action="store_true", help="Show ttrain's version and exit")
    flags, unknown = parser.parse_known_intermixed_args(plain)
    if unknown:
        raise ConfigError(f"{unknown[0]}: unknown flag. {_key_hint(unknown[0]) or did_you_mean(unknown[0], real)}")
    if flags.experimental_rerun:
        raise ConfigError("--experimental-rerun: refused, because it would load a pickle. Use resume=<run>.")
    if sum(map(bool, (flags.run, flags.multirun, flags.cfg, flags.shell_completion, flags.info))) > 1:
        raise ConfigError("only one of --run, --multirun, --cfg, --info and --shell-completion can be given.")
    return flags, flags.overrides


def _key_hint(flag: str) -> str:
    """How a key that was given as a flag, such as `--train.steps 5` or `--lr 1e-3`, is written; empty for a flag."""
    key = flag.lstrip("-").replace("-", "_")
    if key.partition(".")[0] in sections():
        return f"A key is given as {key}=<value>, with an equals sign."
    owner = owner_of(key)
    return f"Give {owner}.{key}=<value>." if owner else ""


def run_task(config: Config) -> Any:
    """Run `task.name`; what it returns is the value that a sweeper may optimize."""
    return registry.component("task", config.task.name).load()(config)


def _show_config(composer: Composer, overrides: list[str], flags: argparse.Namespace) -> None:
    """Print the composed config. What we print is complete and has passed every check."""
    config = composer.typed(overrides)
    if flags.cfg != "job":
        composer.hydra.show_cfg(composer.config_name, overrides, flags.cfg, flags.package, flags.resolve)
        return
    shown: Any = OmegaConf.create(to_dict(config))
    if flags.package not in (None, "_global_"):
        shown = OmegaConf.select(shown, flags.package, default=_ABSENT)
        if shown is _ABSENT:
            raise ConfigError(f"--package {flags.package}: no such key. {did_you_mean(flags.package, to_dict(config))}")
    print(OmegaConf.to_yaml(shown).rstrip() if OmegaConf.is_config(shown) else as_word(shown))


def _prepare_streams() -> None:
    """A terminal that can't show a character gets an escape instead of an error, a closed stream a place to go."""
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115 - for as long as the process
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _say(message: str, mark: bool = True) -> None:
    """The one line that an error ends in, after its traceback where that was asked for, with a `mark` of the rank."""
    rank = rank_here() if mark else None
    with contextlib.suppress(OSError):
        if os.environ.get(FULL_ERROR) == "1":
            traceback.print_exc()
        print(f"ttrain: {'' if rank is None else f'rank {rank}: '}{message}", file=sys.stderr, flush=True)


def _drop_what_nobody_reads() -> None:
    """Keep Python from failing at its end over output that could not be written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
