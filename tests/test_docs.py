"""README.md, its neighbours and docs/: every command is checked, and run where it can be; names and links exist.

A page is run from top to bottom in an empty folder. Files that it shows, which begin with a comment that names them,
are written there first. Commands of ttrain run in this process with sizes made small; those in NOT_RUN are composed and
checked instead, and those of other programs are in OTHER_PROGRAMS, each with its reason.
"""

from __future__ import annotations

import json
import random
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from ttrain.cli import main, parse_arguments, run_task
from ttrain.config import registry
from ttrain.config.build import planned_ranks
from ttrain.config.compose import Composer
from ttrain.config.help import EXAMPLES
from ttrain.config.renamed import RENAMED
from ttrain.config.schema import Config, sections
from ttrain.config.validate import section_type
from ttrain.core.errors import ConfigError
from ttrain.core.options import key_of
from ttrain.data.tokenizer import ByteTokenizer
from ttrain.device.info import info_of

REPO = Path(__file__).parents[1]
TOP = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md", "CHANGELOG.md", "outputs/README.md")
PAGES = [*(REPO / name for name in TOP), *sorted((REPO / "docs").glob("*.md"))]
SHELL = ("sh", "bash", "shell", "console")
FILES = (".json", ".jsonl", ".yaml", ".bin", ".md", ".txt", ".png", ".py", ".html", ".csv")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

OTHER_PROGRAMS = {
    "pip install -e .": "installs for minutes; .ci/run does it in a fresh environment",
    "python -m pytest": "runs this test",
    "ruff ": "reads code; .ci/run does it",
    "mypy": "as above",
    "python3.12 -m venv .venv": "makes an environment; .ci/run does it",
    ". .venv/bin/activate": "as above",
    "wandb ": "needs an account",
    "tensorboard ": "serves until it is stopped",
    "torchrun": "waits for other machines; tests/parallel starts ranks",
    "srun": "needs a cluster",
    "export SRUN_CPUS_PER_TASK": "as above",
}
NOT_RUN: dict[str, Callable[[Config], bool]] = {
    "needs a card that this machine may not have": lambda config: (
        config.device.name not in ("auto", "cpu", "null", "my-cpu")
    ),
    "needs someone who writes; tests/train/sampling does it": lambda config: config.task.name == "chat",
    "measures for minutes; tests/bench does it at a small size": lambda config: config.task.name == "bench",
    "starts many runs; tests/sweep/test_trial.py does it": lambda config: config.task.name == "trial",
    "looks for cards in a process of its own; tests/ttnn does it": lambda config: config.task.name == "doctor",
}


@dataclass(frozen=True)
class Command:
    """A line of a page, and what the page shows below it."""

    line: str
    shown: str = ""

    @property
    def overrides(self) -> list[str] | None:
        """Arguments of ttrain; None for another program."""
        overrides = [override for override in shlex.split(self.line) if not re.fullmatch(r"[A-Z_]+=\S*", override)]
        if overrides[:3] == ["python", "-m", "ttrain"]:
            return overrides[3:]
        return overrides[1:] if overrides[0] == "ttrain" else None


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of every fenced block."""
    return [(match[1], match[2]) for match in FENCE.finditer(page.read_text("utf-8"))]


def commands(page: Path) -> list[Command]:
    """Every command of the shell blocks, in order. `a && b` is two; in a console block commands begin with `$ `."""
    found: list[Command] = []
    for language, text in blocks(page):
        if language not in SHELL:
            continue
        text = text.replace("\\\n", " ")
        if language != "console":
            text = "".join(f"$ {line}\n" for line in text.splitlines() if line and not line.startswith("#"))
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            line, _, shown = part.partition("\n")
            *before, last = line.split(" && ")
            found += [*map(Command, before), Command(last.strip(), shown)]
    return found


def spans(page: Path) -> list[str]:
    """Every `code span` outside fenced blocks."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", page.read_text("utf-8")))


def inline_commands() -> Iterator[str]:
    """Commands in running text and in the comments of recipes."""
    for page in PAGES:
        yield from (span for span in spans(page) if re.match(r"(python -m )?ttrain \S", span))
    for recipe in sorted((REPO / "conf" / "recipe").glob("*.yaml")):
        yield from re.findall(r"^#\s+(python -m ttrain .*)$", recipe.read_text("utf-8"), re.MULTILINE)


def name_of(page: Path) -> str:
    return str(page.relative_to(REPO))


@pytest.fixture
def folder(inside: Path, monkeypatch: pytest.MonkeyPatch, plugins_taken_back: None) -> Path:
    """An empty current folder with some text in it."""
    words = ["The", "cat", "def", "return", "a", "box", "of", "old", "maps", "\n"]
    text = " ".join(random.Random(0).choices(words, k=8000))
    (inside / "books").mkdir()
    for name in ("book.txt", "books/one.txt", "books/two.md"):
        (inside / name).write_text(text, "utf-8")
    sizes = dict.fromkeys(("num_hidden_layers", "num_attention_heads"), 2)
    sizes |= {"hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 8192, "vocab_size": 256}
    (inside / "hub").mkdir()
    (inside / "hub" / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    (inside / "hub" / "tokenizer.json").write_text(ByteTokenizer().to_json())
    monkeypatch.syspath_prepend(inside)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "120")
    return inside


def write_files(page: Path, place: Path) -> None:
    """The blocks that begin with the name of a file."""
    for _, text in blocks(page):
        if named := re.match(r"# ([\w./-]+\.(?:py|yaml|jsonl))\n", text):
            path = place / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.removeprefix(named[0]) if path.suffix == ".jsonl" else text, "utf-8")


def composed(overrides: list[str]) -> list[Config]:
    """The checked config of a command; of a sweep those of the first and the last job, of a search an example."""
    from ttrain.sweep.jobs import SweepOverrides, compose_job

    flags, overrides = parse_arguments(overrides)
    with Composer(flags.config_name, flags.config_dir) as composer:
        if not flags.multirun:
            return [composer.typed(overrides)]
        master = composer.compose(overrides, sweep=True)
        assert not master.problems
        sweep = SweepOverrides.read(composer, master)
        found = sweep.combinations() if sweep.setting("search", master) is None else [sweep.example()]
        jobs = [compose_job(composer, job) for job in (found[0], *found[1:][-1:])]
    assert not [job.problem for job in jobs if job.problem]
    return [job.config for job in jobs if job.config is not None]


def smaller(config: Config, steps: int) -> Config:
    """Return the command with keys added that make its run cheap."""
    small: dict[str, Any] = {"train.steps": steps, "train.batch_size": 2 * config.train.gradient_accumulation}
    several = 4 if config.parallel.name != "none" else 1  # as the page's runs have, which keep their slices
    small["train.batch_size"] *= max(planned_ranks(config.parallel).slices, several)
    small |= {"train.eval_sequences": 2, "train.peak_tflops": 1.0, "schedule.warmup": 0}
    small["train.log_every"] = steps  # one point is no curve, so nothing is drawn
    small |= {"sample.tokens": 4, "device.threads": 1}
    if config.train.length_schedule:
        small |= {"train.length_schedule": [8, 16], "train.phase_steps": 1}
    if config.train.batch_schedule:
        small |= {"train.batch_schedule": [2, small["train.batch_size"]], "train.phase_steps": 1}
    if config.device.name == "auto":
        small["device.name"] = "cpu"
    if config.engine.name == "traced":  # compiling takes longer than all else; tests/native does it
        small["engine.name"] = "static"
    sizes = {"preset": None, "layers": 1, "heads": 1, "width": 16, "rank": 24, "context": 16}
    sizes |= {"kv_heads": 1, "head_width": 16, "hidden": 24}
    known = {declared.name for declared in fields(config.model)}
    small |= {f"model.{name}": size for name, size in sizes.items() if name in known}
    if getattr(config.data, "loss_on", "all") == "replies":
        small["model.context"] = 128  # so that a reply fits
    if config.data.name == "text":
        small["data.max_bytes"] = 20_000
        if config.source.overrides:  # only the bare command looks through the standard library
            small["data.path"] = config.data.path or "book.txt"
    if config.objective.name == "grpo":
        small["objective.num_generations"] = 2
    if config.data.name == "regression":
        small["data.examples"] = 64
    if config.task.name in ("sample", "eval", "export"):  # the rest is that of the run, or of the file
        small = {key: value for key, value in small.items() if key.startswith(("sample.", "device."))}
    quick = {"plan.time": False, "plan.memory_gb": 0.01, "verify.ops": ["relu", "linear"]}  # all of it takes long
    for key, value in quick.items():
        if key not in config.source.explicit and config.task.name == key.partition(".")[0]:
            small[key] = value
    for key, value in small.items():
        section, _, name = key.partition(".")
        setattr(getattr(config, section), name, value)
    source = replace(config.source, explicit=config.source.explicit | small.keys())
    return replace(config, source=source)


def existing(override: str) -> str:
    """The override, with a checkpoint of ours in place of one that only a whole run would have."""
    named = re.fullmatch(r"(.*=)(.*/checkpoints)/step_\d+", override)
    return override if named is None else f"{named[1]}{max(Path(named[2]).glob('step_*'))}"


def run(command: Command, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """One command of a page; `number` grows from one to the next, so that a resumed run has steps to do."""
    overrides = command.overrides
    if overrides is None:
        plain = " ".join(shlex.split(command.line))
        assert any(plain.startswith(known) or command.line == known for known in OTHER_PROGRAMS), (
            f"{command.line}: add it to OTHER_PROGRAMS with a reason"
        )
        return
    capsys.readouterr()
    if command.shown.startswith("ttrain: "):
        assert main(overrides) == 2
        pattern = re.escape(command.shown.strip()).replace(re.escape("..."), ".*")
        assert re.fullmatch(pattern, capsys.readouterr().err.strip()), "the page shows another message"
        return
    flags, _ = parse_arguments(overrides)
    if flags.help or flags.cfg or flags.version:
        assert main(overrides) == 0
        return
    overrides = [existing(override) for override in overrides]
    try:
        configs = composed(overrides)
    except ConfigError as error:
        raise AssertionError(f"{command.line}: {error}") from None
    if flags.multirun or any(excluded(configs[0]) for excluded in NOT_RUN.values()):
        return  # the jobs of a sweep are processes: tests/sweep runs some
    run_task(smaller(configs[0], number + 1))


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_every_command_of_a_page(page: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_files(page, folder)
    for number, command in enumerate(commands(page), 1):
        run(command, number, capsys)
    if page.name == "extending.md":
        check_the_plugin()


def test_every_command_of_the_help(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "my_conf" / "model").mkdir(parents=True)
    (folder / "my_conf" / "model" / "mine.yaml").write_text("defaults: [nano-gpt]\ndropout: 0.1\n", "utf-8")
    lines = [line for line, _ in EXAMPLES]
    first = "ttrain run.dir=outputs/a"  # the run that others go on from
    for number, line in enumerate([first, *lines], 1):
        run(Command(line), number, capsys)


def test_commands_in_running_text_compose(folder: Path) -> None:
    wrong: dict[str, str] = {}
    for line in sorted(set(inline_commands())):
        line = line.replace("<model folder>", "hub")
        overrides = Command(re.sub(r"<[\w ]+>", "book.txt", re.sub(r"\[(\w+=\S+)\]", r"\1", line))).overrides
        assert overrides is not None
        flags, _ = parse_arguments(overrides)
        try:
            if not (flags.help or flags.version):
                composed(overrides)
        except ConfigError as error:
            wrong[line] = str(error)
    assert not wrong


def check_the_plugin() -> None:
    """The example of docs/extending.md against the same model in plain torch, with its own kernel and without."""
    import torch

    from ttrain.config import build

    sizes = "train.steps=5 train.batch_size=4 model.context=16 model.width=8 train.log_every=1 optimizer.clip_norm=0.5"
    overrides = ["plugins=[my_parts]", "model=bigram", "optimizer=adagrad", "data.path=book.txt", *sizes.split()]
    losses = {}
    for device in ("cpu", "my-cpu"):
        assert main([*overrides, f"device={device}", f"run.dir=outputs/{device}", "optimizer.weight_decay=0.01"]) == 0
        lines = [json.loads(line) for line in Path("outputs", device, "metrics.jsonl").read_text("utf-8").splitlines()]
        losses[device] = [line["train/loss"] for line in lines if "train/loss" in line]
    assert losses["cpu"] == losses["my-cpu"]
    assert main([*overrides, "model.widht=8"]) == 2

    from my_board import BoardConfig  # type: ignore[import-not-found]

    board = BoardConfig(name="my-board", memory_gb=2)
    assert info_of(board).memory(board) == (2 << 30, "the board's")
    assert [len(list(info_of(board).problems(board, rows))) for rows in (8, 12)] == [0, 1]

    config = composed(overrides)[0]
    dataset = build.build_dataset(config)
    model = build.build_model(config, dataset.vocabulary)
    from tests.models.session import initial_values

    start = initial_values(model, config.run.seed)
    weights = {path: torch.nn.Parameter(torch.tensor(value)) for path, value in start.items()}
    matrices = [weight for weight in weights.values() if weight.ndim == 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": [weights["head.bias"]], "weight_decay": 0.0}]
    optimizer = torch.optim.Adagrad(groups, lr=config.optimizer.lr)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: build.made("schedule", config.schedule, config.train.steps)(step + 1)
    )
    expected = []
    for step in range(config.train.steps):
        batch = dataset.batch("train", config.run.seed, step * 4, 4)
        hidden = torch.relu(weights["embedding.weight"][torch.from_numpy(batch["tokens"])]) ** 2
        scores = hidden @ weights["head.weight"].T + weights["head.bias"]
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), torch.from_numpy(batch["targets"]).flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 0.5)
        optimizer.step()
        rate.step()
        expected.append(loss.item())
    np.testing.assert_allclose(losses["cpu"], expected, rtol=1e-5)


def test_no_command_hides_outside_a_shell_block() -> None:
    hidden: list[str] = []
    for page in PAGES:
        outside = FENCE.sub(lambda match: "" if match[1] in SHELL else match[2], page.read_text("utf-8"))
        found = [line for line in outside.splitlines() if re.match(r"\s*(\$ |python -m ttrain|ttrain .*=)", line)]
        hidden += [f"{name_of(page)}: {line}" for line in found]
    assert not hidden, "put these into a ```sh block"


def anchors(page: Path) -> set[str]:
    """Return the names that a link may have after `#`."""
    titles = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles}


def dead_names(page: Path) -> Iterator[str]:
    """Links, paths and modules that a page names and that aren't there."""
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text("utf-8"))):
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        if "://" not in target and not (linked.exists() and (not anchor or anchor in anchors(linked))):
            yield target
    folders = tuple(f"{name}/" for name in ("conf", "docs", "examples", "tests", "ttrain", ".ci"))
    for span in spans(page):
        place = span.partition("::")[0]  # of a test
        if span.startswith(folders) and not re.search(r"[<*{ ]|\.\.\.", span) and not (REPO / place).exists():
            yield span
        if re.fullmatch(r"ttrain(\.\w+)+", span) and span != "ttrain.plugins" and find_spec(span) is None:
            yield span


def test_links_paths_and_modules_exist() -> None:
    assert not {name_of(page): dead for page in PAGES if (dead := list(dead_names(page)))}


def known_keys(former: bool = False) -> set[str]:
    """Keys of the config; with `former` also those that went."""
    found = {*sections(), *(RENAMED if former else ())}
    for section in sections():
        schemas = [row.config for row in registry.rows() if row.group == section] or [section_type(section, None)]
        listed = [declared for schema in schemas if schema for declared in fields(schema)]
        found |= {f"{section}.{key_of(declared)}" for declared in listed}
    return found


def test_keys_and_options_exist() -> None:
    keys = {page: known_keys(former=page.name == "CHANGELOG.md") for page in PAGES}
    plugin = {"bigram", "adagrad", "my-cpu"}
    wrong: list[str] = []
    with Composer() as composer:
        options = {group: composer.files.options(group) for group in composer.files.groups()}
    for page, span in [(of, span) for of in PAGES for span in spans(of)]:
        key, equals, value = span.partition("=")
        section = key.partition(".")[0]
        if re.fullmatch(r"[a-z_]+\.[a-z_]+", key) and section in sections() and Path(key).suffix not in FILES:
            wrong += [f"{name_of(page)}: the key {key}"] if key not in keys[page] else []
        if equals and key in options and re.fullmatch(r"[\w.,-]+", value) and "mine" not in value:
            wrong += [f"{name_of(page)}: {span}"] if set(value.split(",")) - {*options[key], *plugin} else []
    assert not wrong, "these keys and options don't exist"


def test_the_table_of_choices_lists_every_option() -> None:
    """An option that is added belongs there too."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \|", (REPO / "docs" / "choosing.md").read_text("utf-8"), re.MULTILINE)
    with Composer() as composer:
        options = {group: composer.files.options(group) for group in composer.files.groups()}
    assert len(rows) >= 8
    for group, listed in rows:
        assert sorted(re.findall(r"`([\w-]+)`", listed)) == sorted(options[group]), f"the row of {group}"


def test_blocks_of_code_are_valid() -> None:
    checks: dict[str, Callable[[str], Any]] = {"yaml": yaml.safe_load, "json": json.loads}
    checks["python"] = lambda text: compile(text, "page", "exec")
    wrong: dict[str, str] = {}
    for page in PAGES:
        for language, text in blocks(page):
            try:
                checks.get(language, str)(text)
            except (SyntaxError, ValueError, yaml.YAMLError) as error:
                wrong[f"{name_of(page)}: {text.splitlines()[0]}"] = str(error)
    assert not wrong
