"""A folder belongs to one run: another, or the same with other options, leaves every byte of it alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import QUICK, read_json, small_network
from omegaconf import OmegaConf

from rankrl.errors import ConfigError
from rankrl.files import FILE_LIST, written_files
from rankrl.runs.run_folder import locked, with_effect

Command = Callable[..., None]
Refused = Callable[..., str]


@pytest.fixture
def finished(training: Path) -> Path:
    return Path(shutil.copytree(training, "runs/train"))


@pytest.fixture
def unfinished(finished: Path) -> Path:
    (finished / "metrics.json").unlink()
    return finished


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("arguments", [("task=train",), ("resume=runs/train",), ("task=search", "seed=3")])
def test_a_second_run_is_refused_while_one_goes_on(
    refused: Refused, unfinished: Path, arguments: tuple[str, ...]
) -> None:
    folder = () if "resume" in arguments[0] else (f"hydra.run.dir={unfinished}", *QUICK)
    with locked(unfinished):
        before = content(unfinished)
        assert f"{unfinished} is in use by process " in refused(*arguments, *folder)
        assert content(unfinished) == before


def test_a_run_that_has_just_begun_keeps_its_folder_from_one_that_is_refused(
    tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "new" / ".hydra").mkdir(parents=True)
    with locked(tmp_path / "new"):
        before = content(tmp_path / "new")
        assert "is in use by process " in refused("task=train", *QUICK, f"hydra.run.dir={tmp_path / 'new'}")
        assert content(tmp_path / "new") == before


def test_options_that_a_finished_run_does_not_have_are_refused(refused: Refused, finished: Path) -> None:
    before = content(finished)
    message = refused("resume=runs/train", "train.epochs=3", "seed=1")
    assert (
        "that run is finished, with other options (seed was 0, is now 1; train.epochs was 2, is now 3)"
        in message
    )
    assert "hydra.run.dir=FOLDER" in message
    assert content(finished) == before


def test_a_finished_run_is_finished_with_options_that_change_nothing(
    rankrl: Command, finished: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = content(finished)
    rankrl("resume=runs/train", "train.epochs=2", "tracking=csv")
    assert "is finished already" in capfd.readouterr().out
    assert content(finished) == before


def test_a_run_goes_on_to_the_results_of_its_own_options_alone(
    rankrl: Command, refused: Refused, unfinished: Path
) -> None:
    before = content(unfinished)
    message = refused("resume=runs/train", "dataset.heldout=20", "tracking=csv")
    assert "not with others (dataset.heldout was None, is now 20)" in message
    assert content(unfinished) == before
    (unfinished / "run.lock").write_text('{"process": 1')  # what a killed run left
    rankrl("resume=runs/train", "tracking=csv")
    assert (unfinished / "metrics.json").exists()
    assert OmegaConf.load(unfinished / ".hydra" / "config.yaml").tracking.name == "csv"
    assert not (unfinished / "run.lock").exists()


@pytest.mark.parametrize("name", ["metrics.json", "state/configuration.json", "state/files.json"])
def test_a_resumed_run_makes_up_for_a_damaged_file(rankrl: Command, finished: Path, name: str) -> None:
    path = finished / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    if name != "metrics.json":
        (finished / "metrics.json").unlink()
    rankrl("resume=runs/train", "tracking=csv")
    assert read_json(finished / "metrics.json")["baseline"]
    assert read_json(finished / "state" / "configuration.json")["config"]["task"] == "train"


def test_a_damaged_state_of_a_training_is_named_and_can_be_removed(
    rankrl: Command, refused: Refused, unfinished: Path
) -> None:
    state = unfinished / "state" / "train.safetensors"
    state.write_bytes(state.read_bytes()[:1000])
    message = refused("resume=runs/train")
    assert f"{state} is damaged or no training state" in message
    assert "remove that file: the same call, or `rankrl resume=`, then begins that part anew" in message
    state.unlink()
    rankrl("resume=runs/train", "tracking=csv")
    assert read_json(unfinished / "metrics.json")["baseline"]


def test_the_record_of_a_run_is_hydras(finished: Path) -> None:
    config = OmegaConf.load(finished / ".hydra" / "config.yaml")
    recorded = json.loads((finished / "state" / "configuration.json").read_text())
    assert with_effect(OmegaConf.to_container(config, resolve=True)) == recorded["config"]
    assert OmegaConf.load(finished / ".hydra" / "overrides.yaml") == recorded["overrides"]
    assert OmegaConf.load(finished / ".hydra" / "hydra.yaml").hydra.job.name == "rankrl"


def test_a_run_that_overwrites_and_fails_leaves_the_other(
    rankrl: Command, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = (*small_network(tmp_path), "task=evaluate", "hydra.run.dir=runs/a")
    rankrl(*options)
    files = {
        path: path.read_bytes() for path in Path("runs/a").rglob("*") if path.suffix in (".json", ".yaml")
    }

    def fails(*_: object, **__: object) -> None:
        raise ConfigError("it cannot be")

    with monkeypatch.context() as patch:
        patch.setattr("rankrl.cli.tasks.compression.network_numbers", fails)
        assert "it cannot be" in refused(*options, "seed=1", "overwrite=true")
    assert {path: path.read_bytes() for path in files} == files
    rankrl(*options, "seed=1", "overwrite=true")
    assert read_json(Path("runs/a/metrics.json"))["seed"] == 1
    assert not Path("runs/a/.previous").exists()


THEIRS = ("plots/fig.png", ".hydra/old.yaml", "state/mine.json", "tracking/mine.csv", "searches/mine.txt")


def test_a_run_among_a_users_files_removes_its_own_alone(
    rankrl: Command, refused: Refused, tmp_path: Path
) -> None:
    """The folder is the current one, with folders of our names in it before the first run."""
    options = (*small_network(tmp_path), "task=evaluate", "hydra.run.dir=.")
    for name in THEIRS:
        Path(name).parent.mkdir()
        Path(name).write_text("mine")
    before = content(tmp_path)
    rankrl(*options)
    rankrl(*options, "seed=1", "overwrite=true")
    assert read_json(Path("metrics.json"))["seed"] == 1
    assert before.items() <= content(tmp_path).items()
    listed = {path for path in content(tmp_path).keys() - before.keys() if path.suffix != ".log"}
    assert {tmp_path / name for name in written_files(tmp_path) or ()} | {tmp_path / FILE_LIST} == listed
    Path("metrics.json").unlink()
    shutil.rmtree("state")
    assert "report.html, which no run wrote" in refused(*options, "overwrite=true")
