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

import yaml
from hydra.types import RunMode

import ttrain
from ttrain.config import registry
from ttrain.config.compose import Composer
from ttrain.config.help import help_text
from ttrain.config.help import shown as as_word
from ttrain.config.schema import Config, sections, to_dict
from ttrain.config.validate import owner_of
from ttrain.core.errors import EXIT_DONE, EXIT_FAILURE, ConfigError, Interrupted, RankFailed, TtrainError
from ttrain.core.files import to_json
from ttrain.core.folders import settle_without_home
from ttrain.core.names import did_you_mean
from ttrain.parallel.settings import place, rank_here, rank_zero_only

DOCUMENTS = ("plan", "doctor", "runs", "eval")  # tasks that return what --json prints
DASHES = "-‐‑‒–—−"  # the one of the keyboard, and those that text is set with
FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's own switch: 1 shows the traceback of every error


class Flags(argparse.ArgumentParser):
    """The flags of the command line; whatever else is on it are overrides."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("overrides", nargs="*")
        self.add_argument("--help", "-h", action="store_true")
        self.add_argument("--version", "-V", action="store_true")
        self.add_argument("--multirun", "-m", action="store_true")
        self.add_argument("--cfg", "-c", choices=["job"])
        self.add_argument("--json", action="store_true")
        self.add_argument("--package", "-p")
        self.add_argument("--config-name", "-cn")
        self.add_argument("--config-dir", "-cd")
        self.add_argument("--config-path", "-cp")

    @property
    def names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}. Flags: {', '.join(sorted(self.names))}; all else is key=value.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code. Both `python -m ttrain` and the script `ttrain` come here."""
    _prepare_streams()
    try:
        with rank_zero_only():
            code = _run(list(sys.argv[1:] if arguments is None else arguments))
            sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        _say("interrupted", mark=False)
        return Interrupted.exit_code
    except TtrainError as error:
        return _failed(error)
    except OSError as error:  # a full disk, a folder that went away: the system's own words tell it best
        if not isinstance(error, BrokenPipeError):  # the reader of our output went away, as in `ttrain --help | head`
            where = f"{error.filename}: " if error.filename else ""
            _say(f"{where}{error.strerror or error}. {FULL_ERROR}=1 shows where it happened.")
        return EXIT_FAILURE
    except (MemoryError, RuntimeError) as error:  # outside a run, which tells what it needs itself
        from ttrain.train.forecast.limits import is_out_of_memory

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
        elif flags.cfg:
            _show_config(composer.typed(overrides), flags.package)
        elif flags.json:
            _print_document(composer.typed(overrides))
        else:
            if settled := settle_without_home():
                _say(settled)
            if not flags.multirun:
                composed = composer.compose(overrides)
                if composed.root.hydra.mode != RunMode.MULTIRUN:  # which a file may ask for
                    return _run_one(composer.check(composed), overrides)
            from ttrain.sweep import run

            return run.run_sweep(composer, overrides)
    return EXIT_DONE


def _run_one(config: Config, overrides: list[str]) -> int:
    from ttrain.tasks.training import supervised
    from ttrain.train.supervise import launch
    from ttrain.train.supervise.child import Heartbeat

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
    """Return flags and overrides, key=value. `--a=b` means `a=b` unless --a is a flag; W&B agents write it so.

    So do `-a=b` and a dash as a word processor sets it.
    """
    parser, plain = Flags(), []
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if argument and argument[0] in DASHES and name not in parser.names:
            bare = argument.lstrip(DASHES)
            argument = bare if equals and not bare.startswith("=") else argument if argument.isascii() else f"--{bare}"
        plain.append(argument)
    flags, unknown = parser.parse_known_intermixed_args(plain)
    if unknown:
        hint = _key_hint(unknown[0]) or did_you_mean(unknown[0], parser.names)
        raise ConfigError(f"{unknown[0]}: unknown flag. {hint}")
    given = [f"--{name}" for name in ("multirun", "cfg", "json") if getattr(flags, name)]
    if len(given) > 1:
        raise ConfigError(f"only one of {' and '.join(given)} can be given.")
    return flags, flags.overrides


def _key_hint(flag: str) -> str:
    """Return how to write a key that was given as a flag, such as `--lr 1e-3`; empty where it is no key."""
    key = flag.lstrip("-").replace("-", "_")
    if key.partition(".")[0] in sections():
        return f"A key is given as {key}=<value>, with an equals sign."
    owner = owner_of(key)
    return f"Give {owner}.{key}=<value>." if owner else ""


def run_task(config: Config) -> Any:
    """Run `task.name`; what it returns is the value that a sweeper may optimize."""
    return registry.component("task", config.task.name).load()(config)


def _print_document(config: Config) -> None:
    """Run a task and print what it returns as JSON; what it prints itself, in any language, goes to stderr."""
    if config.task.name not in DOCUMENTS:
        raise ConfigError(f"--json: task={config.task.name} returns no document. Give task={', '.join(DOCUMENTS)}.")
    with contextlib.redirect_stdout(sys.stderr), os.fdopen(os.dup(1)) as stdout:
        os.dup2(2, 1)
        try:
            document = to_json(run_task(config))
        finally:
            os.dup2(stdout.fileno(), 1)
    print(document, end="")


def _show_config(config: Config, package: str | None) -> None:
    """Print the composed config, or a part of it. What we print is complete and has passed every check."""
    shown: Any = to_dict(config)
    for key in [] if package in (None, "_global_") else str(package).split("."):
        if not isinstance(shown, dict) or key not in shown:
            raise ConfigError(f"--package {package}: no such key. {did_you_mean(str(package), to_dict(config))}")
        shown = shown[key]
    many = isinstance(shown, dict | list)
    print(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True).rstrip() if many else as_word(shown))


def _prepare_streams() -> None:
    """A terminal that can't show a character gets an escape instead of an error, a closed stream a place to go."""
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")  # noqa: SIM115 - for as long as the process
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - for as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_MININTERVAL", "5")  # a bar that is redrawn often would fill a file
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
