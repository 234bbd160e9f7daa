"""What the run of a compressed network had for its network and its data need not be given again."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import QUICK, read_json, small_network, values
from omegaconf import OmegaConf

from rankrl.cli.app import checked_arguments
from rankrl.cli.config.compose import parsed_overrides
from rankrl.cli.config.run_files import options_of_run, resumed_arguments
from rankrl.cli.config.schema import store_groups
from rankrl.errors import ConfigError
from rankrl.files import FILE_LIST, write_json, written_files
from rankrl.runs.run_folder import RunFolder, locked, with_effect

RECORD = {
    "config": {"model": {"architecture": "custom", "checkpoint": None}, "dataset": {"name": "npz"}},
    "overrides": [
        *("task=pipeline", "model=custom", "model._target_=nets.Small", "+model.width=24", "seed=3"),
        *("finetune.epochs=3", "finetune.batch_size=8", "optim=sgd", "optim.lr=0.1"),
        *("model.checkpoint=gone.th", "dataset=npz", "dataset.path='own=1.npz'", "budget.params=0.5"),
    ],
}


@pytest.fixture
def weights(tmp_path: Path) -> str:
    write_json(tmp_path / "state" / "configuration.json", RECORD)
    (tmp_path / "dense.safetensors").touch()
    return f"weights={tmp_path / 'model.safetensors'}"


def test_network_data_and_dense_weights_are_taken_but_for_those_given(weights: str, tmp_path: Path) -> None:
    checkpoint = f"model.checkpoint='{tmp_path / 'dense.safetensors'}'"
    model = ["model=custom", "model._target_=nets.Small", "+model.width=24"]
    dataset = ["dataset=npz", "dataset.path='own=1.npz'"]
    assert options_of_run([weights]) == [*model, checkpoint, *dataset]
    assert options_of_run([weights, "model=resnet20"]) == dataset
    assert options_of_run([weights, "model.checkpoint=a.th", "dataset=digits"]) == model
    assert options_of_run([weights, "dataset.path=b.npz", "--cfg", "job"]) == [
        *model,
        checkpoint,
        "dataset=npz",
    ]


def test_nothing_is_taken_where_no_single_run_is_meant(weights: str, tmp_path: Path) -> None:
    assert options_of_run([]) == []
    assert options_of_run([weights, "experiment=first_run"]) == []
    assert options_of_run(["-m", f"{weights},other.safetensors"]) == []
    assert options_of_run(["weights=null"]) == []
    (tmp_path / "state" / "configuration.json").write_text("{}")
    assert options_of_run([weights]) == []


def test_a_run_gives_what_the_task_needs(weights: str, tmp_path: Path) -> None:
    run, files = f"run={tmp_path}", (tmp_path / "model.safetensors", tmp_path / "plan.json")
    network = options_of_run([weights])
    dense = ["seed=3", *network]
    assert options_of_run(["task=evaluate", run]) == dense
    for path in files:
        path.touch()
    model, plan = f"weights='{files[0]}'", f"plan='{files[1]}'"
    assert options_of_run(["task=evaluate", run, "seed=4"]) == [*network, model]
    assert options_of_run(["task=export", run, "weights=own.safetensors"]) == dense
    assert options_of_run(["task=apply", run, "experiment=own"]) == ["seed=3", plan]
    recipe = ["finetune.batch_size=8"]
    assert options_of_run(["task=finetune", run, "optim=onnx_adam"]) == [*dense, *recipe, model]
    recipe = ["optim=sgd", "optim.lr=0.1", *recipe]
    assert options_of_run(["task=finetune", run]) == [*dense, *recipe, model]


def test_a_run_without_what_the_task_needs_is_refused(weights: str, tmp_path: Path) -> None:
    run = f"run={tmp_path}"
    with pytest.raises(ConfigError, match=r"has no model.safetensors, which task=export needs"):
        options_of_run(["task=export", run])
    with pytest.raises(ConfigError, match="there is no run of the command line"):
        options_of_run(["task=export", "run=nowhere"])
    with pytest.raises(ConfigError, match="run names one run"):
        options_of_run(["-m", "task=export", f"{run},other"])
    with pytest.raises(ConfigError, match="task=search does not read it"):
        checked_arguments(["task=search", run])


Command = Callable[..., None]
Refused = Callable[..., str]


def a_run(*overrides: str, folder: str = "runs/a") -> Path:
    """The folder of a run that was begun from the current folder."""
    run = RunFolder(Path(folder))
    with run.held():
        config = values(*overrides)
        run.claim(config, overrides)
    return run.path


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files, the current one; another lies beside it."""
    (tmp_path / "other").mkdir()
    project = tmp_path / "proj"
    (project / "files").mkdir(parents=True)
    for name in ("net.th", "wide.th", "times.json", "more.json", "images.npz", "plan.json", "net.onnx"):
        (project / "files" / name).touch()
    monkeypatch.chdir(project)
    return project


def places_of(project: Path) -> Iterator[Path]:
    """The folder where it is, then where it was moved to."""
    yield project
    yield project.rename(project.parent / "moved")


def test_a_resumed_run_goes_on_where_it_was_started(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("model=conv4", "model.checkpoint=files/net.th", "finetune.teacher=[files/wide.th]")
    a_run(*overrides)
    assert set(overrides) <= set(resumed_arguments(["resume=runs/a"]))
    for place in places_of(project):
        monkeypatch.chdir(project.parent / "other")
        arguments = resumed_arguments([f"resume=../{place.name}/runs/a"])
        assert Path.cwd() == place
        assert {*overrides, f"hydra.run.dir='{place / 'runs' / 'a'}'"} <= set(arguments)


GIVEN: dict[str, tuple[tuple[str, ...], Any]] = {
    "model.checkpoint": (("model.checkpoint=files/net.th",), "net.th"),
    "finetune.teacher": (("finetune.teacher=[files/net.th,files/wide.th]",), ["net.th", "wide.th"]),
    "dataset.path": (("dataset=npz", "dataset.path=files/images.npz"), "images.npz"),
    "model.path": (("model=custom", "model._target_=a.b", "+model.path=files/net.onnx"), "net.onnx"),
}


@pytest.mark.parametrize("option", GIVEN)
def test_a_runs_files_are_found_from_elsewhere(
    option: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides, names = GIVEN[option]
    run = a_run("model=conv4", *overrides)
    for name in ("model.safetensors", "dense.safetensors"):
        (run / name).touch()

    def taken(folder: str) -> Any:
        arguments = parsed_overrides(options_of_run(["task=finetune", f"run={folder}"]))
        return {each.key_or_group: each.value() for each in arguments}[option]

    monkeypatch.chdir(project.parent / "other")
    for place in places_of(project):
        found = [str(place / "files" / name) for name in ([names] if isinstance(names, str) else names)]
        assert taken(f"../{place.name}/runs/a") == (found[0] if isinstance(names, str) else found)


def test_a_network_that_is_gone_is_not_replaced_by_another(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = a_run("model=conv4", "model.checkpoint=files/net.th", "finetune.teacher=files/wide.th")
    for name in ("plan.json", "model.safetensors"):
        (run / name).touch()
    monkeypatch.chdir(project.parent / "other")
    (project / "files" / "net.th").unlink()
    for task in ("apply", "evaluate", "export", "finetune"):
        taken = options_of_run([f"task={task}", "run=../proj/runs/a"])
        assert f"model.checkpoint='{project / 'files' / 'net.th'}'" in taken
        own = options_of_run([f"task={task}", "run=../proj/runs/a", "model.checkpoint=own.th"])
        assert not any("net.th" in each for each in own)


def test_a_plan_is_not_applied_to_a_network_trained_anew(project: Path) -> None:
    run = a_run("model=conv4")
    (run / "plan.json").touch()
    with pytest.raises(ConfigError, match=r"has no dense\.safetensors, the network that its plan is for"):
        options_of_run(["task=apply", "run=runs/a"])
    (run / "dense.safetensors").touch()
    assert f"model.checkpoint='{run / 'dense.safetensors'}'" in options_of_run(["task=apply", "run=runs/a"])


def test_a_file_that_was_put_elsewhere_is_named_to_the_resumed_run(project: Path) -> None:
    run = a_run("task=evaluate", "model=conv4", "model.checkpoint=files/net.th")
    (project / "files" / "net.th").rename(project / "files" / "kept.th")
    store_groups()
    with pytest.raises(ConfigError, match=r"there is no file files/net\.th"):
        checked_arguments([f"resume={run}"])
    taken = checked_arguments([f"resume={run}", "model.checkpoint=files/kept.th"])
    assert taken is not None
    assert "model.checkpoint=files/kept.th" in taken


def test_the_same_network_is_measured_from_anywhere(
    rankrl: Command, refused: Refused, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, target, checkpoint = small_network(project / "files")
    relative = f"model.checkpoint={Path(checkpoint.partition('=')[2]).relative_to(project)}"
    rankrl("task=evaluate", model, target, relative, "hydra.run.dir=runs/a", "tracking=none")
    known = read_json(Path("runs/a/metrics.json"))["baseline"]
    monkeypatch.chdir(project.parent / "other")
    rankrl("task=evaluate", "run=../proj/runs/a", "hydra.run.dir=b", "tracking=none")
    assert read_json(Path("b/metrics.json"))["baseline"] == known
    moved = project.rename(project.parent / "moved")
    rankrl("task=evaluate", f"run={moved / 'runs' / 'a'}", "hydra.run.dir=c", "tracking=none")
    assert read_json(Path("c/metrics.json"))["baseline"] == known
    (Path("c") / "metrics.json").unlink()
    rankrl("resume=c")
    assert read_json(Path("c/metrics.json"))["baseline"] == known
    shutil.rmtree(moved / "files")
    gone = refused("task=evaluate", f"run={moved / 'runs' / 'a'}", "tracking=none")
    assert "there is no file" in gone
    assert not list(Path().rglob("dense.safetensors"))


def test_modules_and_data_are_looked_for_where_the_run_did(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(project), *sys.path])
    monkeypatch.setenv("RANKRL_DATA", "restored afterwards")
    monkeypatch.delenv("RANKRL_DATA")
    Path("data").mkdir()
    a_run("plugins=[own_selectors]", "model=conv4")
    for place in places_of(project):
        monkeypatch.chdir(project.parent / "other")
        monkeypatch.setattr(sys, "path", [os.getcwd(), *sys.path[1:]])
        assert "plugins=[own_selectors]" in options_of_run(["task=evaluate", f"run={place / 'runs' / 'a'}"])
        assert sys.path[0] == str(place)
        assert os.environ.pop("RANKRL_DATA") == str(place / "data")
        assert "plugins=[own_selectors]" in resumed_arguments([f"resume={place / 'runs' / 'a'}"])
        assert Path.cwd() == place


def test_choices_of_ones_own_are_found_from_elsewhere(
    rankrl: Command, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, target, checkpoint = small_network(project / "files")
    own = project / "choices" / "tracking" / "quiet.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("name: none\n")
    rankrl(
        "task=evaluate",
        model,
        target,
        checkpoint,
        "tracking=quiet",
        "--config-dir=choices",
        "hydra.run.dir=a",
    )
    Path("a/metrics.json").unlink()
    monkeypatch.chdir(project.parent / "other")
    rankrl("resume=../proj/a")
    assert (project / "a" / "metrics.json").exists()
    (project / "a" / "metrics.json").unlink()
    moved = project.rename(project.parent / "moved")
    assert resumed_arguments([f"resume={moved / 'a'}"])[-1] == f"--config-dir={moved / 'choices'}"


@pytest.fixture
def finished(training: Path) -> Path:
    """A copy of a finished run, as if it had been started here."""
    run = RunFolder(Path(shutil.copytree(training, "runs/train")))
    write_json(run.record, {**read_json(run.record), "folder": [os.getcwd(), "../.."]})
    return run.path


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
        "that run is finished, and not with others (seed was 0, is now 1; train.epochs was 2, is now 3)"
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


@pytest.mark.parametrize("name", ["metrics.json", "state/files.json"])
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
