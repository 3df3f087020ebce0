"""A run whose ranks, or one process alone, are killed is the undisturbed one, also on other numbers of ranks.

`kills.py --kills 50` is the long version, run by hand. Whatever reads a run reads what ranks wrote of it as what one
process wrote.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests import forked
from tests.parallel.kills import recorded
from ttrain.cli import main
from ttrain.core.errors import CheckpointError
from ttrain.core.files import read_object
from ttrain.core.spec import stored_part, stored_part_name
from ttrain.parallel.ranks import Ranks
from ttrain.train.checkpoint.checkpoint import MANIFEST, sealed
from ttrain.train.checkpoint.save import shared_out
from ttrain.train.checkpoint.tensor_files import lazy_tensors

STEPS = 150
pytestmark = pytest.mark.timeout(600)  # runs of several processes that are killed time and again


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with the run `whole` of one process and the run `killed`, which two ranks with ZeRO-1 ended."""
    folder = tmp_path_factory.mktemp("kills")
    words = ["--kills", "4", "--steps", str(STEPS), "--folder", str(folder)]
    done = forked.run("tests.parallel.kills", *words, seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, json.loads(done.stdout.splitlines()[-1])


def newest(run: Path) -> Path:
    return run / "checkpoints" / f"step_{STEPS:08d}"


def test_a_run_keeps_its_bits_through_kills_and_other_numbers_of_ranks(kills: tuple[Path, dict[str, Any]]) -> None:
    folder, result = kills
    assert (result["kills"], result["tensors"], result["codes"]) == (4, 27, {"-9": 4, "1": 4})
    assert result["alone"] >= 1
    checkpoint = newest(folder / "killed")
    sizes = [sum(file.stat().st_size for file in checkpoint.glob(f"*-rank{rank}-*")) for rank in range(2)]
    assert 0.4 < sizes[0] / sum(sizes) < 0.6  # of tiny files, whose headers are as large
    assert {file.name.partition("-0")[0] for file in checkpoint.glob("*.safetensors")} == {
        f"{stem}-rank{rank}" for stem in ("parameters", "optimizer") for rank in range(2)
    }


def _sampled(run: Path, out: Path) -> list[str]:
    return ["task=sample", f"run.dir={run}", "sample.prompt=def", "sample.tokens=8"]


def _evaluated(run: Path, out: Path) -> list[str]:
    return ["task=eval", f"run.dir={run}", f"eval.text=[{run.parent / 'text.txt'}]", "eval.limit=8", f"eval.out={out}"]


def _exported(run: Path, out: Path) -> list[str]:
    return ["task=export", f"run.dir={run}", f"export.file={out}.safetensors", "export.form=ttrain"]


def _begun(run: Path, out: Path) -> list[str]:
    sizes = [f"model.{key}" for key in ("layers=1", "width=16", "heads=2", "context=8")]
    own = ["train.steps=1", "train.batch_size=2", "train.eval_sequences=8", "logger=jsonl", f"run.dir={out}"]
    return [*sizes, *own, "data=text", f"data.path={run.parent / 'text.txt'}", f"train.init_from={run}"]


@pytest.mark.parametrize("reads", [_sampled, _evaluated, _exported, _begun])
def test_what_ranks_wrote_is_read_as_what_one_process_wrote(
    reads: Callable[..., list[str]], kills: tuple[Path, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found: list[Any] = []
    for name in ("whole", "killed"):
        assert main([*reads(kills[0] / name, tmp_path / name), "device=cpu", "device.threads=1"]) == 0
        said = capfd.readouterr().out.replace(str(kills[0] / name), "").replace(str(tmp_path / name), "")
        if reads is _exported:
            exported = load_file(tmp_path / f"{name}.safetensors")
            found.append({path: values.tobytes() for path, values in exported.items()})
        else:
            found.append(recorded(tmp_path / name) if reads is _begun else said)
    assert found[0] == found[1] and len(found[0]) > 1


@pytest.mark.parametrize(
    ("missing", "told"),
    [(True, "is missing, though the manifest lists it."), (False, "does not have the SHA-256 of the manifest")],
)
def test_a_checkpoint_with_a_bad_file_of_a_rank_is_refused_or_passed_over(
    missing: bool, told: str, kills: tuple[Path, dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "killed"
    shutil.copytree(kills[0] / "killed", run)
    shard = next(newest(run).glob("parameters-rank1-*"))
    content = shard.read_bytes()
    shard.unlink()
    if not missing:
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    sample = [*_sampled(run, tmp_path), "device=cpu"]
    assert main([*sample, f"sample.checkpoint={STEPS}"]) == 2
    refused = capfd.readouterr().err
    assert told in refused and refused.count("\n") == 1
    if missing:  # the others take the same way
        assert main(sample) == 0
        assert told in capfd.readouterr().err
        assert main([f"run.dir={run}", "resume=auto", "parallel=ddp", f"train.steps={STEPS}"]) == 0
        assert told in capfd.readouterr().err and newest(run).is_dir()


def test_a_checkpoint_that_lacks_a_rank_is_refused(
    kills: tuple[Path, dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for kind in ("parameters", "optimizer"):
        run = tmp_path / kind
        shutil.copytree(kills[0] / "killed", run)
        shard = next(newest(run).glob(f"{kind}-rank1-*"))
        shard.unlink()
        # As if the manifest had been written without this rank.
        manifest = {key: value for key, value in read_object(newest(run) / MANIFEST).items() if key != "sha256"}
        del manifest["files"][shard.name]
        (newest(run) / MANIFEST).write_text(sealed(manifest))
    more = ["resume=auto", "parallel=ddp", f"train.steps={STEPS + 1}"]
    commands = [[f"run.dir={tmp_path / kind}", *more] for kind in ("parameters", "optimizer")]
    commands += [[*reads(tmp_path / "parameters", tmp_path / "out"), "device=cpu"] for reads in (_sampled, _exported)]
    for overrides in commands:
        assert main(overrides) == 2
        assert capfd.readouterr().err.count("\n") == 1


def test_parts_are_joined_by_their_names(tmp_path: Path) -> None:
    whole = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    files = [tmp_path / f"{number}.safetensors" for number in range(3)]
    for file, part in zip(files, [(16, 24), (0, 5), (5, 16)], strict=True):
        assert stored_part(stored_part_name("a/first_moment", part, (2, 3, 4))) == ("a/first_moment", part, (2, 3, 4))
        save_file({stored_part_name("a/first_moment", part, (2, 3, 4)): whole.reshape(-1)[slice(*part)]}, file)
    found = lazy_tensors(files)
    assert list(found) == ["a/first_moment"] and np.array_equal(found["a/first_moment"], whole)
    for missing in files:
        with pytest.raises(CheckpointError, match="lack parts of a/first_moment"):
            lazy_tensors([file for file in files if file != missing])


@pytest.mark.parametrize("count", [1, 2, 4])
def test_ranks_share_whole_tensors_out(count: int) -> None:
    sizes = {f"{number}": 1 + 37 * number % 101 for number in range(60)}
    shards = [shared_out(sizes, Ranks(rank, count)) for rank in range(count)]
    assert sorted(name for shard in shards for name in shard) == sorted(sizes)
    loads = [sum(sizes[name] for name in shard) for shard in shards]
    assert max(loads) - min(loads) <= max(sizes.values()) / 10
