"""The tasks of the command line, on digits with a small network."""

import csv
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import make_config_reference
import numpy as np
import onnx
import pytest
from command_line import BUDGET, QUICK, Killed, SmallNetwork, kill, read_json, small_network
from onnxruntime import InferenceSession
from safetensors import safe_open

from decomposition import CompressionPlan, Quantise, list_formats
from rankrl.cli.app import FIRST_RUN, main
from rankrl.cli.config.schema import TASKS, AppConfig
from rankrl.cli.tasks.compression import command
from rankrl.data import Preprocessing, load_dataset
from rankrl.errors import ExportError
from rankrl.verify import file_export, measure

Command = Callable[..., None]


@pytest.fixture
def run(rankrl: Command, tmp_path: Path) -> Callable[..., Path]:
    """Run a quick task in its own folder and return the folder."""

    def task(name: str, *arguments: str) -> Path:
        folder = tmp_path / name
        rankrl(*QUICK, f"hydra.run.dir={folder}", *arguments)
        return folder

    return task


def test_pipeline_writes_the_run_folder(whole_run: Path) -> None:
    folder = whole_run
    for name in (
        "plan.json",
        "episodes.csv",
        "metrics.json",
        "model.safetensors",
        "model.onnx",
        "report.html",
    ):
        assert (folder / name).stat().st_size > 0, name
    assert {path.name for path in (folder / "plots").iterdir()} >= {
        "reward.png",
        "layers.png",
    }
    assert (folder / ".hydra" / "config.yaml").exists()
    metrics = read_json(folder / "metrics.json")
    assert metrics["compressed"]["params"] <= 0.5 * metrics["baseline"]["params"]
    assert metrics["onnx"]["max_abs_difference"] <= 1e-4
    assert metrics["onnx"]["accuracy"] == pytest.approx(metrics["finetuned"]["accuracy"], abs=0.01)
    assert metrics["search"]["episodes"] == 3
    assert set(metrics["ratios"]) == {"params", "macs", "bytes", "file_bytes", "latency", "activation_bytes"}
    with (folder / "episodes.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    assert all(float(row["params_kept"]) <= 0.5 for row in rows)
    candidates = read_json(folder / "candidates.json")
    best = max(rows, key=lambda row: float(row["reward"]))
    chosen = dict(zip(candidates, json.loads(best["choices"]), strict=True))
    for layer in json.loads((folder / "plan.json").read_text())["layers"]:
        if layer["name"] in chosen:
            assert layer["operations"] == candidates[layer["name"]][chosen[layer["name"]]]["operations"]
    model = onnx.load(folder / "model.onnx")
    stored = {entry.key: entry.value for entry in model.metadata_props}
    plan = CompressionPlan.load(folder / "plan.json")
    assert CompressionPlan.from_json(stored["plan"]) == plan
    session = InferenceSession(folder / "model.onnx")
    assert session.get_inputs()[0].shape == ["batch", 1, 8, 8]
    assert metrics["onnx"]["latency_ratio_low"] <= metrics["ratios"]["latency"]
    assert metrics["ratios"]["latency"] <= metrics["onnx"]["latency_ratio_high"]
    times = metrics["onnx"]["baseline_latency_ms"], metrics["onnx"]["latency_ms"]
    assert metrics["ratios"]["latency"] == pytest.approx(times[0] / times[1])
    assert not (folder / "state" / "unverified.onnx").exists()
    rival = metrics["dense_int8"]
    assert rival["accuracy"] == pytest.approx(metrics["baseline"]["accuracy"], abs=0.02)
    assert rival["latency_ratio_low"] <= rival["latency_ratio"] <= rival["latency_ratio_high"]
    assert rival["file_bytes"] < metrics["baseline"]["params"] * 2
    assert not (folder / "state" / "dense-int8.onnx").exists()


def test_without_arguments_it_is_the_first_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[list[str]] = []
    shown: list[list[str]] = []
    monkeypatch.setattr("hydra.main", lambda **_: lambda _: lambda: given.append(sys.argv[1:]))
    for arguments in ([], ["seed=1"]):
        monkeypatch.setattr(sys, "argv", ["rankrl", *arguments])
        main()
        shown.append(command())
    assert [each[-1] for each in given] == [FIRST_RUN, "seed=1"]
    assert shown == [["rankrl", FIRST_RUN], ["rankrl", "seed=1"]]
    assert capsys.readouterr().out == f"rankrl {FIRST_RUN}\n"


@pytest.mark.parametrize(
    ("experiment", "formats", "objective"),
    [
        ("amc", "auto", {"reward": "amc(measure=macs)", "metric": "accuracy", "action": "ratio"}),
        (
            "icassp2020",
            "tensor_ring",
            {"reward": "weighted(compression=0.3, measure=params)", "metric": "accuracy", "action": "rank"},
        ),
    ],
)
def test_published_methods_are_experiments(
    run: Callable[..., Path], dense: str, experiment: str, formats: str, objective: dict[str, str]
) -> None:
    folder = run(experiment, "task=search", f"experiment={experiment}", dense, "selector.warmup_episodes=1")
    metrics = json.loads((folder / "metrics.json").read_text())
    assert (metrics["decomposition"], metrics["selector"], metrics["budget"]) == (formats, "ddpg", {})
    assert {name: metrics["search"][name] for name in objective} == objective
    assert metrics["search"]["episodes"] == 3
    assert "no budget" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_first_run_is_smaller_in_every_respect(
    rankrl: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = [each for each in QUICK if not each.startswith("decomposition.candidates")]
    rankrl(FIRST_RUN, *quick, f"hydra.run.dir={tmp_path / 'run'}")
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert metrics["ratios"]["params"] > 1
    assert metrics["ratios"]["macs"] > 1
    assert metrics["onnx"]["file_bytes"] < 0.25 * metrics["onnx"]["baseline_file_bytes"]
    assert CompressionPlan.load(tmp_path / "run" / "plan.json").chosen(Quantise)
    said = " ".join(capsys.readouterr().out.split())
    assert "The compressed network needs" in said
    places = [said.index(each) for each in ("% of the time", "% of the bytes", "for a test accuracy of")]
    assert places == sorted(places)


def accuracy_of_a_stranger(session: InferenceSession, said: dict[str, Any]) -> float:
    """Accuracy on the digits' test set for somebody who has the file's own words and numpy, nothing else."""
    test = load_dataset("digits").test.for_report()
    images = test.x.permute(0, 2, 3, 1).numpy()  # bytes as a scanner gives them
    if said["dtype"] == "float32":
        planes = (images * said["scale"] - np.array(said["mean"])) / np.array(said["std"])
        images = planes.transpose(0, 3, 1, 2).astype(np.float32)
    scores = session.run(None, {session.get_inputs()[0].name: images})[0]
    names = [said["class_names"][index] for index in scores.argmax(1)]
    return float(np.mean([name == str(label) for name, label in zip(names, test.y.tolist(), strict=True)]))


@pytest.mark.slow
@pytest.mark.parametrize("preprocess", [False, True])
def test_model_onnx_is_enough_to_use_the_network(
    run: Callable[..., Path], dense: str, preprocess: bool
) -> None:
    folder = run(
        "run", dense, "+dataset.mean=[0.31]", "+dataset.std=[0.37]", f"export.preprocess={preprocess}"
    )
    metrics = read_json(folder / "metrics.json")
    stored = {entry.key: entry.value for entry in onnx.load(folder / "model.onnx").metadata_props}
    said = json.loads(stored["preprocessing"])
    session = InferenceSession(folder / "model.onnx")
    (entry,) = session.get_inputs()
    assert said["in_graph"] is metrics["onnx"]["preprocess"] is preprocess
    assert entry.type == ("tensor(uint8)" if preprocess else "tensor(float)")
    assert entry.shape == (["batch", 8, 8, 1] if preprocess else ["batch", 1, 8, 8])
    dense = InferenceSession(folder / "state" / "dense.onnx").get_inputs()[0]
    assert (dense.type, dense.shape) == (entry.type, entry.shape), "both are timed in the same form"
    assert (said["mean"], said["std"]) == ([0.31], [0.37])
    assert accuracy_of_a_stranger(session, said) == pytest.approx(metrics["finetuned"]["accuracy"], abs=1e-9)
    assert metrics["onnx"]["accuracy"] == metrics["finetuned"]["accuracy"]
    assert metrics["onnx"]["max_abs_difference"] <= 1e-4
    assert "preprocessing" not in json.loads(stored["metrics"])
    plan = CompressionPlan.load(folder / "plan.json")
    described = Preprocessing.from_dict(plan.metadata["preprocessing"])
    assert described == load_dataset("digits", mean=[0.31], std=[0.37]).preprocessing
    assert metrics["preprocessing"] == plan.metadata["preprocessing"]
    with safe_open(folder / "model.safetensors", framework="numpy") as file:
        assert CompressionPlan.from_json(file.metadata()["rankrl.plan"]) == plan


@pytest.mark.usefixtures("staged")
def test_an_unverified_file_never_has_the_name(
    run: Callable[..., Path],
    whole_run: Path,
    dense: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def differs(*_: Any, **__: Any) -> float:
        assert not (tmp_path / "run" / "model.onnx").exists()
        raise ExportError("it differs")

    monkeypatch.setattr("rankrl.verify.measure.verify_onnx", differs)
    with pytest.raises(SystemExit):
        run("run", "task=export", dense, f"weights={whole_run / 'model.safetensors'}")
    assert "it differs" in capfd.readouterr().err
    assert not (tmp_path / "run" / "model.onnx").exists()
    assert not (tmp_path / "run" / "metrics.json").exists()


@pytest.mark.slow
def test_all_files_of_a_run_have_the_same_mode(run: Callable[..., Path], whole_run: Path) -> None:
    before = os.umask(0o027)
    try:
        folder = run("run")
    finally:
        os.umask(before)
    for each, mode in ((whole_run, 0o644), (folder, 0o640)):  # the first was made under the usual umask
        modes = {path: path.stat().st_mode & 0o777 for path in each.rglob("*") if path.is_file()}
        assert len(modes) > 10
        assert {str(path): oct(found) for path, found in modes.items() if found != mode} == {}


def test_weights_made_with_other_images_are_warned_of(
    run: Callable[..., Path], whole_run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = f"weights={whole_run / 'model.safetensors'}"
    capfd.readouterr()
    run("same", "task=evaluate", weights)
    assert "was made with" not in capfd.readouterr().out
    run("other", "task=evaluate", weights, "+dataset.mean=[0.5]")
    shown = capfd.readouterr().out
    assert "was made with images of mean [0.3" in shown
    assert "those of dataset=digits have [0.5]; dataset.mean sets it" in shown


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "cp" else pytest.mark.slow) for name in list_formats()]
)
def test_every_format_goes_through_search_and_apply(
    run: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    network = (*small_network(tmp_path), f"decomposition={name}")
    searched = run("search", "task=search", *network, "selector=greedy")
    assert "baseline" not in read_json(searched / "metrics.json")
    applied = run("apply", "task=apply", *network, f"plan={searched / 'plan.json'}")
    metrics = read_json(applied / "metrics.json")
    assert metrics["compressed"]["params"] <= 0.4 * metrics["baseline"]["params"]


@pytest.mark.slow
def test_tasks_in_a_row_do_what_the_pipeline_does(
    run: Callable[..., Path], whole_run: Path, dense: str
) -> None:
    searched = run("search", "task=search", dense, *BUDGET)
    applied = run("apply", "task=apply", dense, f"plan={searched / 'plan.json'}")
    weights = f"weights={applied / 'model.safetensors'}"
    tuned = run("finetune", "task=finetune", dense, weights)
    exported = run("export", "task=export", dense, f"weights={tuned / 'model.safetensors'}")
    evaluated = run("evaluate", "task=evaluate", dense, f"weights={tuned / 'model.safetensors'}")
    expected = read_json(whole_run / "metrics.json")
    assert (searched / "plan.json").read_bytes() == (whole_run / "plan.json").read_bytes()
    assert read_json(applied / "metrics.json")["compressed"].items() <= expected["compressed"].items()
    assert read_json(tuned / "metrics.json")["finetuned"] == expected["finetuned"]
    assert read_json(exported / "metrics.json")["onnx"]["accuracy"] == expected["onnx"]["accuracy"]
    assert (
        read_json(evaluated / "metrics.json")["compressed"]["accuracy"] == expected["finetuned"]["accuracy"]
    )


def test_train_and_inspect(
    run: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = small_network(tmp_path)[:2]
    learning = ("train.epochs=6", "train.batch_size=32", "train.optim.lr=0.1")
    folder = run("train", "task=train", *network, *learning)
    assert 0.5 < read_json(folder / "metrics.json")["baseline"]["accuracy"] <= 1
    given = ("task=inspect", *network, f"model.checkpoint={folder / 'dense.safetensors'}")
    run("inspect", *given, "inspect.errors=true", "decomposition=tensor_ring")
    shown = capsys.readouterr().out
    assert "rank: params, error" in shown
    rows = {line.split()[1]: line for line in shown.splitlines() if line.count("│") == 9}
    assert set(rows) == {"conv1", "conv2", "fc1", "fc2"}
    assert rows["conv2"].count("%") == 2 + 3  # the shares and the errors of all that were fitted


def test_inspect_lists_the_layers_without_fitting_any(
    run: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fit(*_: Any, **__: Any) -> None:
        raise AssertionError("a layer was fitted")

    monkeypatch.setattr("decomposition.choose.library.FitLibrary.fit", fit)
    monkeypatch.setattr("decomposition.choose.library.collect_moments", fit)
    run(
        "inspect",
        "task=inspect",
        *small_network(tmp_path),
        "decomposition=auto",
        "decomposition.skip=['fc?']",
        "decomposition.only=['fc?','*1']",
    )
    shown = capsys.readouterr().out
    assert shown.count("stays as it is, as asked (skip)") == 2
    assert shown.count("others alone may change (only)") == 1
    assert "16x1x3x3" in shown
    assert "cp 1-" in shown
    assert "inspect.errors=true" in shown


@pytest.mark.slow
def test_interrupted_pipeline_goes_on_to_the_same_result(
    run: Callable[..., Path],
    rankrl: Command,
    whole_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("rankrl.networks.module.apply_plan", kill)
        with pytest.raises(Killed):
            run("broken", *BUDGET)
    broken = tmp_path / "broken"
    assert not (broken / "metrics.json").exists()
    # Which form of the file is faster is measured, and kept for a run that goes on.
    (form,) = (whole_run / "state").glob("form-*.json")
    shutil.copy(form, broken / "state" / form.name)
    rankrl(f"resume={broken}")
    assert read_json(broken / "state" / form.name) == read_json(form)
    for name in ("plan.json", "model.safetensors", "dense.safetensors", "model.onnx"):
        assert (broken / name).read_bytes() == (whole_run / name).read_bytes(), name


def test_run_that_dies_while_reporting_does_not_look_finished(
    run: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rankrl.result.write_report", kill)
    with pytest.raises(Killed):
        run("broken", "task=train", *small_network(tmp_path)[:2], "dataset.train_images=64")
    assert not (tmp_path / "broken" / "metrics.json").exists()


def test_ctrl_c_says_how_to_go_on(
    run: Callable[..., Path],
    whole_run: Path,
    dense: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rankrl.networks.module.apply_plan", interrupt)
    with pytest.raises(SystemExit) as stopped:
        run("stopped", "task=apply", dense, f"plan={whole_run / 'plan.json'}")
    assert stopped.value.code == 130
    message = capfd.readouterr().err
    assert "`rankrl resume=" in message
    assert "Traceback" not in message


def test_a_new_run_refuses_the_folder_of_an_earlier_one(
    run: Callable[..., Path],
    rankrl: Command,
    training: Path,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(training, tmp_path / "train")
    before = (folder / ".hydra" / "overrides.yaml").read_text()
    same = "holds a run already"
    changed = "holds a run with another configuration (task was train, is now search"
    for task, words in (("train", same), ("search", changed)):
        with pytest.raises(SystemExit) as refused:
            run("train", f"task={task}")
        assert refused.value.code == 2
        message = capfd.readouterr().err
        assert words in message
        assert "`rankrl resume=" in message
        assert "Traceback" not in message
    assert (folder / ".hydra" / "overrides.yaml").read_text() == before
    rankrl(f"resume={folder}", "tracking=csv")
    assert not (tmp_path / "runs").exists()


def test_a_resumed_run_stays_in_its_folder(refused: Callable[..., str], tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("another run's record")
    for option in ("hydra.run.dir=b", "hydra.run.dir='b'", "++hydra.run.dir=b", "hydra.run.dir=new"):
        assert f"{option} names another folder than resume=a" in refused("resume=a", option)
        assert option in refused(option, "resume=a")
    assert (tmp_path / "b" / "run.json").read_text() == "another run's record"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize(("name", "named"), [("train", True), ("a=1,b='x y'", False)])
def test_a_resumed_runs_folder_may_be_named_too_and_have_unusual_characters(
    rankrl: Command, training: Path, tmp_path: Path, name: str, named: bool
) -> None:
    folder = shutil.copytree(training, tmp_path / name)
    (folder / "metrics.json").unlink()
    rankrl(f"resume={folder}", *([f"hydra.run.dir={folder}"] if named else []))
    assert (folder / "metrics.json").exists()


def test_a_finished_run_says_so_when_it_is_to_be_resumed(
    rankrl: Command, training: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in training.rglob("*")}
    rankrl(f"resume={training}")
    assert f"{training} is finished already; its report is" in capfd.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in training.rglob("*")} == before


@pytest.mark.slow
def test_a_pipeline_without_fine_tuning(run: Callable[..., Path], tmp_path: Path) -> None:
    network = small_network(tmp_path)
    given = (*BUDGET, "finetune.epochs=0", "export.int8=false", "export.training=true")
    folder = run("pipeline", *network, *given)
    metrics = read_json(folder / "metrics.json")
    assert metrics["finetuned"]["accuracy"] == metrics["compressed"]["accuracy"]
    assert "finetune" not in metrics.get("trainings", {})
    assert (folder / "report.html").exists()
    assert (folder / "optimizer_step.onnx").exists()


def test_overrides_may_stand_around_flags(rankrl: Command, capfd: pytest.CaptureFixture[str]) -> None:
    rankrl("seed=1", "--cfg", "job", "task=train")
    shown = capfd.readouterr().out
    assert "task: train" in shown
    assert "seed: 1" in shown


def test_help_names_the_tasks_and_the_groups(rankrl: Command, capfd: pytest.CaptureFixture[str]) -> None:
    rankrl("--help", "-m", "seed=1,2")
    shown = capfd.readouterr().out
    formats = sorted(["auto", *list_formats()])
    groups = (f"decomposition  {', '.join(formats)}", "tracking       csv, ")
    for expected in (*TASKS, *groups, "search:", "joblib, local, ray", "seed: 1"):
        assert expected in shown


def test_version_is_that_of_the_package(rankrl: Command, capfd: pytest.CaptureFixture[str]) -> None:
    rankrl("--version")
    assert capfd.readouterr().out == f"rankrl {version('rankrl')}\n"


def test_shell_completion_can_be_installed(rankrl: Command, capfd: pytest.CaptureFixture[str]) -> None:
    rankrl("-sc", "install=bash")
    assert "hydra_bash_completion" in capfd.readouterr().out


def test_every_task_is_named_in_the_configuration() -> None:
    named = (
        make_config_reference.explanations(AppConfig)["task"]
        .removeprefix("What to do: ")
        .replace("(all of it)", "")
    )
    assert set(TASKS) == {name.strip() for name in named.strip(".").split(",")}


OPTIONS = (
    *("dataset=digits", "selector=greedy", "decomposition=tucker", "budget.params=0.6", "finetune.epochs=0"),
    *("calibration.images=64", "decomposition.candidates=3", "export.runs=2", "export.batch=8"),
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the dense network is exported, quantised and tested."""
    counted: Counter[str] = Counter()

    def count(module: Any, name: str) -> None:
        own = getattr(module, name)

        def counting(*args: Any, **options: Any) -> Any:
            counted[name] += 1
            return own(*args, **options)

        monkeypatch.setattr(module, name, counting)

    count(file_export, "export_onnx")
    count(file_export, "quantise_onnx")
    count(measure, "correct_tests")
    return counted


def test_runs_with_one_dense_network_export_and_test_it_once(
    rankrl: Command, staged: None, calls: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = small_network(tmp_path)
    for name, rank in enumerate((8, 4)):
        rankrl(*network, *OPTIONS, f"decomposition.rank_multiple={rank}", f"hydra.run.dir={name}")
    assert calls == {"export_onnx": 1, "quantise_onnx": 1, "correct_tests": 1 + 2}
    first, second = (read_json(Path(f"{name}/metrics.json")) for name in (0, 1))
    assert first["baseline"] == second["baseline"]
    for name in ("accuracy", "file_bytes"):
        assert first["dense_int8"][name] == second["dense_int8"][name]
    assert Path("0/state/dense.onnx").read_bytes() == Path("1/state/dense.onnx").read_bytes()
    assert "export of the dense network: " in Path("1/rankrl.log").read_text()

    own = SmallNetwork.forward  # the same weights, another computation
    monkeypatch.setattr(SmallNetwork, "forward", lambda self, x: 2 * own(self, x))
    rankrl(*network, *OPTIONS, "export.int8=false", "hydra.run.dir=2")
    assert calls == {"export_onnx": 2, "quantise_onnx": 1, "correct_tests": 2 + 3}


def test_a_run_without_export_has_all_but_the_file(
    rankrl: Command, calls: Counter[str], tmp_path: Path
) -> None:
    rankrl(*small_network(tmp_path), *OPTIONS, "export=false", "hydra.run.dir=run")
    metrics = read_json(Path("run/metrics.json"))
    assert not set(metrics) & {"onnx", "runtimes"}
    assert set(metrics["ratios"]) == {"params", "macs", "bytes"}
    assert metrics["certificate"]
    assert metrics["finetuned"]
    assert Path("run/report.html").exists()
    assert not list(Path("run").rglob("*.onnx"))
    assert calls["export_onnx"] == calls["quantise_onnx"] == 0
