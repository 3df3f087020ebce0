"""The command line: flags, exit codes, sweeps. A fake task stands for the real ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from ttrain import __version__
from ttrain.cli import main, parse_arguments
from ttrain.config import registry
from ttrain.config.components import TaskConfig
from ttrain.config.schema import Config
from ttrain.core.errors import ConfigError, DeviceBusy, Interrupted, UserError
from ttrain.optim.settings import SGDConfig
from ttrain.sweep import run

REPO = Path(__file__).parents[2]


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Config]]:
    """Every config that task=train is run with. A seed of 1 to 5 makes the task fail in one way each."""
    configs: list[Config] = []

    def task(config: Config) -> float:
        configs.append(config)
        errors = [UserError("no"), DeviceBusy("busy"), RuntimeError("ours"), Interrupted("stop"), KeyboardInterrupt()]
        if config.run.seed <= len(errors):
            raise errors[config.run.seed - 1]
        return 1.0

    fake = registry.Component("task", "train", TaskConfig, task)
    monkeypatch.setitem(registry._ROWS, ("task", "train"), fake)
    monkeypatch.chdir(tmp_path)
    yield configs


@pytest.mark.parametrize(
    ("seed", "code", "said"), [(9, 0, ""), (1, 2, "no"), (2, 75, "busy"), (4, 130, "stop"), (5, 130, "interrupted")]
)
def test_exit_codes_and_nothing_is_written(
    ran: list[Config], capsys: Any, tmp_path: Path, seed: int, code: int, said: str
) -> None:
    assert main([f"run.seed={seed}"]) == code
    assert list(tmp_path.iterdir()) == [] and Path.cwd() == tmp_path
    errors = capsys.readouterr().err
    assert errors == (f"ttrain: {said}\n" if said else "")


def test_a_failure_of_ours_is_not_hidden(ran: list[Config]) -> None:
    with pytest.raises(RuntimeError, match="ours"):
        main(["run.seed=3"])


def test_bad_input_exits_with_2_before_any_task_and_without_a_traceback(ran: list[Config], capsys: Any) -> None:
    assert main(["train.stpes=5", "train.steps=x"]) == 2
    assert not ran
    errors = capsys.readouterr().err
    assert errors.startswith(
        "ttrain: 2 problems in the config:\n  1. train.steps='x': must be an integer or null, got text."
    )
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--train.steps=7"], ["train.steps=7"]),
        (["--run.dir=x", "-m", "--optimizer.lr=0.1,0.2"], ["run.dir=x", "optimizer.lr=0.1,0.2"]),
        (["a=b", "--cfg=job", "c=d"], ["a=b", "c=d"]),
        (["--config-dir=conf", "--config-name", "x", "+a=b", "~c"], ["+a=b", "~c"]),
    ],
)
def test_dashes_before_a_key_are_accepted_and_flags_stay_flags(overrides: list[str], expected: list[str]) -> None:
    assert parse_arguments(overrides)[1] == expected
    flags, _ = parse_arguments(["--config-dir=d", "x=1", "--cfg", "job", "--package=model", "-cn", "mine"])
    assert (flags.config_dir, flags.cfg, flags.package, flags.config_name) == ("d", "job", "model", "mine")


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["--multirum"], "--multirum: unknown flag. Did you mean '--multirun'?"),
        (["--cfg", "jbo"], "invalid choice: 'jbo'"),
        (["-m", "--cfg", "job"], "only one of"),
        *(([flag], f"{flag}: unknown flag. ") for flag in ("--hydra-help", "--info", "-sc", "--resolve", "--run")),
        (["--experimental-rerun", "x.pickle"], "Valid: --cfg, --config-dir, --config-name, --config-path, --help, --j"),
        (["--config-dir"], "expected one argument"),
    ],
)
def test_a_wrong_flag(overrides: list[str], part: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_arguments(overrides)
    assert part in str(caught.value)


@pytest.mark.parametrize(("flag", "columns"), [("--help", 60), ("-h", 200)])
def test_help_lists_groups_keys_and_examples_in_tables_that_fit(
    capsys: Any, monkeypatch: pytest.MonkeyPatch, flag: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([flag]) == 0
    text = capsys.readouterr().out
    tables, _, examples = text.partition("Groups")[2].partition("Examples")
    assert max(len(line) for line in tables.splitlines() if line.startswith("  ")) <= columns
    assert "ttrain task=sample" in examples
    found = "train.steps=1000", "optimizer steps of the whole run", "model agillm, gpt2, llama, mlp, [nano-gpt]"
    assert all(part in " ".join(tables.split()) for part in (*found, "recipe agillm_large_cpu, "))
    assert main(["-V"]) == 0
    assert capsys.readouterr().out == f"ttrain {__version__}\n"


def test_cfg_job_prints_the_complete_config(capsys: Any) -> None:
    assert main(["--cfg", "job", "optimizer=sgd", "-p", "optimizer"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == asdict(SGDConfig(momentum=0.9))
    for key, expected in [
        ("run.dir", "null"), ("train.steps", "1000"), ("model.tied", "true"), ("data.path", "${x"),
    ]:  # fmt: skip
        assert main(["--cfg", "job", "-p", key, "data.path=${x"]) == 0
        assert capsys.readouterr().out == f"{expected}\n"
    assert main(["--cfg", "job", "train.stpes=1"]) == 2
    assert main(["--cfg", "job", "-p", "modle"]) == 2
    assert main(["--cfg", "hydra"]) == 2


def test_only_the_public_part_of_hydra_is_used() -> None:
    sources = {str(path): path.read_text("utf-8") for path in (REPO / "ttrain").rglob("*.py")}
    assert not [path for path, text in sources.items() if "hydra._internal" in text]


def test_a_sweep_is_handed_on_with_the_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "defaults: [config, _self_]\nhydra: {mode: MULTIRUN, sweeper: {params: {engine: 'dynamic,static'}}}\n"
    (tmp_path / "mine.yaml").write_text(text, "utf-8")
    given: list[Any] = []
    monkeypatch.setattr(run, "run_sweep", lambda made, overrides: given.append((overrides, made.files.flags)) or 75)
    assert main(["-m", "run.seed=1,2"]) == 75
    assert main(["--config-dir", str(tmp_path), "--config-name", "mine", "run.seed=3"]) == 75  # a file may ask for it
    expected = ("--config-dir", str(tmp_path), "--config-name", "mine")
    assert given == [(["run.seed=1,2"], ()), (["run.seed=3"], expected)]


def process(*overrides: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    given = {**os.environ, "PYTHONPATH": str(REPO), **environment}
    return subprocess.run([sys.executable, *overrides], capture_output=True, env=given, timeout=170)


def test_composing_and_help_import_nothing_heavy() -> None:
    code = (
        "import sys\nfrom ttrain.cli import main\n"
        "assert main(['--cfg', 'job', 'model=gpt2']) == main(['--help']) == 0\n"
        "heavy = {'numpy', 'torch', 'ttnn', 'wandb', 'matplotlib', 'tokenizers', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = process("-c", code)
    assert done.returncode == 0, done.stderr.decode()


def test_the_module_under_the_c_locale(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [config, _self_]\nrun: {dir: données}\n", "utf-8")
    given = f"-m ttrain --config-dir {tmp_path} --config-name mine --cfg job -p run.dir".split()
    strict = process(*given, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING="ascii")
    assert strict.stdout == b"donn\\xe9es\n"
    done = process("-m", "ttrain", "train.stpes=1", "data.path=é", LC_ALL="C")
    assert done.returncode == 2
    assert done.stderr.startswith(b"ttrain: train.stpes: unknown key. Did you mean 'steps'?")
    assert not done.stdout
