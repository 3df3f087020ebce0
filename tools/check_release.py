"""Build wheel and sdist, and use them as a stranger would: `python -m tools.check_release --python python3.10`.

Each Python gets two fresh environments: the wheel without extras, and the sdist with them. In an empty folder they run
the default command, a recipe, plan, sample, the schema and the notebook. With `--torch-index` the commands of the
Dockerfile run in one more, with that package index for torch. Nothing is left behind. The exit code is 1 if a check
fails. pip's own settings say where packages come from.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import hatchling.build

import ttrain

REPO = Path(__file__).parents[1]
EXTRAS = {  # modules that each brings
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "search": "optuna",
    "hf": "huggingface_hub",
    "gguf": "gguf",
    "data": "pyarrow, zstandard",
}
SYSTEM = 1.3e8 + 2.6e8  # bytes of a slim Python image, and of g++ in it
LARGEST_IMAGE = 1.5e9  # bytes, with CPU builds of torch
RUN_CELLS = """
import json, sys
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]).replace("STEPS = 300", "STEPS = 20"), cell["id"], "exec"))
"""


class Failed(Exception):
    """A command that did not do what it should."""


def build(out: Path) -> tuple[Path, Path]:
    """Return the sdist, and the wheel that is made from what lies in it."""
    here = Path.cwd()
    try:
        os.chdir(REPO)
        sdist = out / hatchling.build.build_sdist(str(out))
        shutil.unpack_archive(sdist, out, filter="data")
        os.chdir(out / sdist.name.removesuffix(".tar.gz"))
        return sdist, out / hatchling.build.build_wheel(str(out))
    finally:
        os.chdir(here)


@contextmanager
def environment(python: str) -> Iterator[Path]:
    """Give the folder of programs of a fresh environment, which is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        run([python, "-m", "venv", folder])
        yield Path(folder, "bin")


def run(command: Sequence[str], code: int = 0, cwd: str | None = None, env: Mapping[str, str] | None = None) -> str:
    """Return the output of a command, run with further variables `env`. Raises Failed for another exit code."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env={**variables, **(env or {})}, capture_output=True, text=True)
    if done.returncode != code:
        raise Failed(f"{' '.join(command)}: exit code {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}")
    return str(done.stdout)


def use(programs: Path) -> None:
    """Run what the README promises, in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        here = partial(run, cwd=folder, env={"XDG_CACHE_HOME": f"{folder}/cache", "MPLBACKEND": "agg"})
        program = str(programs / "ttrain")
        assert here([program, "--version"]) == f"ttrain {ttrain.__version__}\n"
        here([program, "run.dir=a"])
        here([program, "recipe=agillm_tiny", "train.steps=4", "schedule.warmup=1", "run.dir=b"])
        assert json.loads(here([program, "task=plan", "plan.time=false", "--json"]))["parameters"]["total"]
        assert here([program, "task=sample", "run.dir=a", "sample.prompt=def ", "sample.tokens=20"])
        assert json.loads(here([program, "task=schema"]))["$defs"]
        here([program, "train.stpes=1"], code=2)
        here([str(programs / "python"), "-c", RUN_CELLS, str(REPO / "examples" / "first_steps.ipynb")])
        assert Path(folder, "outputs", "first-steps", "metrics.jsonl").is_file()


def check(python: str, built: Path, extras: Mapping[str, str]) -> None:
    """Install one file into a fresh environment and use it."""
    with environment(python) as programs:
        wanted = f"{built}[{','.join(extras)}]" if extras else str(built)
        run([str(programs / "pip"), "install", "--quiet", wanted])
        run([str(programs / "pip"), "check"])
        for modules in extras.values():
            run([str(programs / "python"), "-c", f"import {modules}"])
        use(programs)


def instructions(text: str) -> list[tuple[str, str]]:
    """Return name and rest of each instruction of a Dockerfile."""
    joined = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE))
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines()) if name]


def copied(folder: Path) -> None:
    """Copy what .dockerignore lets through: nothing but the entries after an exclamation mark."""
    for name in re.findall(r"^!(\S+)$", (REPO / ".dockerignore").read_text("utf-8"), re.MULTILINE):
        source, target = REPO / name, folder / name
        shutil.copytree(source, target, symlinks=True) if source.is_dir() else shutil.copy(source, target)


def check_dockerfile(python: str, index: str) -> float:
    """Run its commands, but for those of the system, in a fresh environment. Return estimated bytes of the image."""
    with environment(python) as programs, tempfile.TemporaryDirectory() as source:
        copied(Path(source))
        variables = {"TORCH_INDEX": index, "PATH": f"{programs}:{os.environ['PATH']}"}
        for name, rest in instructions((REPO / "Dockerfile").read_text("utf-8")):
            if name == "RUN" and not rest.startswith("apt-get"):
                run(["sh", "-ec", rest.replace("/source", source)], env=variables)
        use(programs)
        files = (path for path in programs.parent.rglob("*") if path.is_file() and not path.is_symlink())
        return SYSTEM + sum(path.stat().st_size for path in files)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks, and tell each."""
    parser = argparse.ArgumentParser(prog="python -m tools.check_release")
    parser.add_argument("--python", action="append", help="a Python to check with; give it again for another")
    parser.add_argument("--out", type=Path, help="folder that takes wheel and sdist once they have passed")
    parser.add_argument("--torch-index", help="package index of torch: check the Dockerfile with it too")
    given = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            sdist, wheel = build(Path(folder))
            for python in given.python or ([] if given.torch_index else [sys.executable]):
                for built, extras in ((wheel, {}), (sdist, EXTRAS)):
                    start = time.monotonic()
                    check(python, built, extras)
                    print(f"{python} {built.name} extras {[*extras]}: {time.monotonic() - start:.0f} s", flush=True)
            if given.out:
                given.out.mkdir(parents=True, exist_ok=True)
                for built in (sdist, wheel):
                    shutil.copy(built, given.out)
        if given.torch_index:
            size = check_dockerfile(sys.executable, given.torch_index)
            print(f"Dockerfile: about {size / 1e9:.2f} GB")
            if size > LARGEST_IMAGE:
                raise Failed(f"more than {LARGEST_IMAGE / 1e9} GB")
    except (Failed, AssertionError) as error:
        print(f"check_release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
