"""Files of a release: versions, Dockerfile, workflow, templates; and the tests that docs/trouble.md names."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import ttrain
from tests.test_budget import parsed
from tools.check_release import LARGEST_IMAGE, build, check_dockerfile, copied, instructions

REPO = Path(__file__).parents[1]
HOSTS = re.compile(r"https?://|\b[\w-]+\.(?:org|com|io)\b")
TORCH_INDEX = os.environ.get("TTRAIN_TORCH_INDEX")  # with it the Dockerfile's commands run for real


def text(name: str) -> str:
    return (REPO / name).read_text("utf-8")


def test_every_file_has_the_same_version() -> None:
    citation = yaml.safe_load(text("CITATION.cff"))
    version, date = re.findall(r"^## \[(\d\S*)\] - (\S+)$", text("CHANGELOG.md"), re.MULTILINE)[0]
    assert version == ttrain.__version__ == citation["version"] and date == str(citation["date-released"])
    assert f"\nVersion {version}, licence" in text("README.md")
    assert text("CHANGELOG.md").index("## [Unreleased]") < text("CHANGELOG.md").index(f"## [{version}]")


def test_wheel_and_sdist_hold_the_same_package(tmp_path: Path) -> None:
    """The wheel is made from the sdist, so what lies in it works without a clone."""
    sdist, wheel = build(tmp_path)
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Dockerfile", "SECURITY.md", "CITATION.cff", "AGENTS.md", "examples/first_steps.ipynb"} <= packed
    with zipfile.ZipFile(wheel) as archive:
        inside = {name: archive.read(name) for name in archive.namelist() if name.startswith("ttrain/")}
    ours = {
        f"ttrain/{path.relative_to(top)}": path
        for top in (REPO / "ttrain", REPO)
        for path in (top / ("conf" if top == REPO else "")).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    ours |= {f"ttrain/conf/recipe/{path.name}": path for path in (REPO / "recipes").iterdir()}
    assert inside.keys() == ours.keys()
    assert all(ours[name].read_bytes() == data for name, data in inside.items())


def test_the_dockerfile_installs_what_the_project_asks_for(tmp_path: Path) -> None:
    found = instructions(text("Dockerfile"))
    names = [name for name, _ in found]
    assert names[0] == "FROM" and names[-1] == "ENTRYPOINT" and names.count("RUN") == 3
    assert ("ARG", "TORCH_INDEX=") in found and not HOSTS.search(text("Dockerfile"))
    (asked,) = re.findall(r'^    "(torch[^"]*)",$', text("pyproject.toml"), re.MULTILINE)
    assert f'"{asked}"' in found[names.index("RUN") + 1][1]
    (script,) = re.findall(r"^(\w+) = \"ttrain\.__main__:main\"$", text("pyproject.toml"), re.MULTILINE)
    assert found[-1][1] == f'["{script}"]'
    for program in ("apt-get", "rm", "pip", "python"):
        (tmp_path / program).write_text(f'#!/bin/sh\necho {program} "$@"\n')
        (tmp_path / program).chmod(0o700)
    for index in ("", "file:///packages"):
        for command in (rest for name, rest in found if name == "RUN"):
            done = subprocess.run(
                ["/bin/sh", "-euc", command], env={"TORCH_INDEX": index, "PATH": str(tmp_path)}, capture_output=True,
                text=True, check=True,
            )  # fmt: skip
            if "torch" in command:
                chosen = ["--index-url", index] if index else []
                assert done.stdout.splitlines()[0].split() == ["pip", "install", "--no-cache-dir", *chosen, asked]


def test_the_image_gets_what_a_wheel_is_made_of(tmp_path: Path) -> None:
    copied(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "ttrain", "conf", "recipes", "pyproject.toml", "README.md", "LICENSE",
    }  # fmt: skip
    assert (tmp_path / "conf" / "recipe" / "char-0.8m.yaml").is_file()


@pytest.mark.slow
@pytest.mark.skipif(TORCH_INDEX is None, reason="TTRAIN_TORCH_INDEX names no package index of torch")
@pytest.mark.timeout(1800)
def test_the_commands_of_the_dockerfile_in_a_fresh_environment() -> None:
    assert check_dockerfile(os.environ.get("TTRAIN_PYTHON", "python3"), str(TORCH_INDEX)) < LARGEST_IMAGE


def test_only_the_last_job_may_publish_and_a_person_switches_it_on() -> None:
    workflow = yaml.safe_load(text(".github/workflows/publish.yml"))
    assert workflow[True] == {"push": {"tags": ["v*"]}} and workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    assert "permissions" not in jobs["build"] and jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["needs"] == "build" and jobs["publish"]["environment"] and "PUBLISH" in jobs["publish"]["if"]
    assert jobs["publish"]["steps"][-1]["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert any("tools.check_release" in step.get("run", "") for step in jobs["build"]["steps"])


def test_templates_of_issues_are_forms() -> None:
    forms = [yaml.safe_load(path.read_text("utf-8")) for path in (REPO / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml")]
    assert len(forms) == 2
    for form in forms:
        assert {"name", "description", "body"} <= form.keys()
        assert len({field["id"] for field in form["body"]}) == len(form["body"])


def test_a_test_shows_each_trouble() -> None:
    rows = [line for line in text("docs/trouble.md").splitlines() if line.startswith("| ")][1:]
    named = [match for row in rows[1:] for match in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)` \|$", row)]
    assert len(named) == len(rows) - 1 >= 15 and "Out of memory" in rows[1]
    for file, name in named:
        assert name in {getattr(node, "name", "") for node in parsed(text(file)).body}, f"{file}::{name}"
