"""Every tracker keeps what it is told, and none of them can disturb a run."""

import csv
import importlib.util
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rankrl.errors import ConfigError
from rankrl.plan_search.scores.evaluation import EpisodeRow
from rankrl.runs import tracking as tracking_module
from rankrl.runs.tracking import Tracker, Tracking, create_tracker, flattened, list_trackers, start_tracking
from rankrl.training import EpochRow

CONFIG = {"task": "pipeline", "seed": 0, "search": {"episodes": 2, "patience": None}, "hidden": [64, 64]}
METRICS = {"task": "pipeline", "finetuned": {"accuracy": 0.9}, "epochs": [{"loss": 1.0}], "ok": True}
OPTIONS: dict[str, dict[str, Any]] = {"wandb": {"mode": "offline"}}


def episode(number: int) -> EpisodeRow:
    return EpisodeRow(number, 0.5, 0.5, 0.6, 0.4, 0.45, 0.5, False, 0.1, "policy", "[[3]]")


def epoch(number: int) -> EpochRow:
    return EpochRow(number, 0.01, 1.5, 0.7, 2.0)


def track(tracking: Tracking) -> None:
    tracking.episode(episode(1))
    tracking.episode(episode(2))
    tracking.update(2, {"critic_loss": 0.25, "noise": 0.3})
    tracking.epochs("finetune")(epoch(1))
    tracking.result(METRICS)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def needs(name: str) -> None:
    """Skip where the tracker's package is not installed."""
    if importlib.util.find_spec(name if name != "csv" else "rankrl") is None:
        pytest.skip(f"{name} is not installed")


@pytest.fixture(autouse=True)
def _local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", list_trackers())
def test_every_tracker_takes_a_whole_run_and_a_resumed_one(name: str, tmp_path: Path) -> None:
    needs(name)
    for _ in range(2):
        with start_tracking(name, tmp_path / "run", CONFIG, OPTIONS.get(name)) as tracking:
            track(tracking)
            assert len(tracking._trackers) == (1 if name == "csv" else 2), "a tracker failed"
    assert [row["step"] for row in read(tmp_path / "run" / "tracking" / "search.csv")] == ["1", "2", "1", "2"]


def test_csv_files_hold_what_was_tracked(tmp_path: Path) -> None:
    with start_tracking("csv", tmp_path, CONFIG) as tracking:
        track(tracking)
    folder = tmp_path / "tracking"
    assert read(folder / "search.csv")[1] == {
        "step": "2",
        "reward": "0.5",
        "best_reward": "0.5",
        "accuracy": "0.6",
        "params_kept": "0.4",
        "macs_kept": "0.45",
    }
    assert read(folder / "finetune.csv") == [{"step": "1", "loss": "1.5", "accuracy": "0.7", "lr": "0.01"}]
    assert read(folder / "result.csv") == [{"name": "finetuned.accuracy", "value": "0.9"}]


def test_tensorboard_reads_what_was_tracked(tmp_path: Path) -> None:
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with start_tracking("tensorboard", tmp_path, CONFIG) as tracking:
        track(tracking)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("search/reward")] == [(1, 0.5), (2, 0.5)]
    assert events.Scalars("finetune/loss")[0].value == 1.5
    assert events.Scalars("result/finetuned.accuracy")[0].value == pytest.approx(0.9)
    assert any(tag.startswith("configuration") for tag in events.Tags()["tensors"])


def test_none_tracks_nothing(tmp_path: Path) -> None:
    with start_tracking("none", tmp_path, CONFIG) as tracking:
        track(tracking)
    assert not list(tmp_path.iterdir())


class Broken(Tracker):
    """Fails at every call, and counts them."""

    calls = 0

    def point(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        self.calls += 1
        raise OSError(28, "No space left on device")

    def result(self, values: Mapping[str, float]) -> None:
        self.calls += 1


def test_a_tracker_that_fails_is_reported_once_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken(tmp_path)
    tracking = Tracking([broken, create_tracker("csv", tmp_path)])
    with caplog.at_level(logging.WARNING):
        track(tracking)
        tracking.close()
    assert broken.calls == 1
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "Broken stopped tracking; the run goes on" in messages[0]
    assert len(read(tmp_path / "tracking" / "search.csv")) == 2


@pytest.mark.parametrize("extra", ["mlflow", "wandb"])
def test_a_missing_package_is_named_with_its_installation(
    extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(tracking_module.importlib, "import_module", missing)
    with (
        pytest.raises(ConfigError, match=rf"pip install 'rankrl\[{extra}\]'"),
        start_tracking(extra, tmp_path, CONFIG),
    ):
        pass


def test_unknown_trackers_and_options_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="Did you mean 'tensorboard'"),
        start_tracking("tensorbord", tmp_path, {}),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="tracker 'tensorboard' has no option"),
        start_tracking("tensorboard", tmp_path, {}, {"uri": "x"}),
    ):
        pass


def test_nested_values_get_dotted_names() -> None:
    assert flattened(CONFIG) == {
        "task": "pipeline",
        "seed": 0,
        "search.episodes": 2,
        "search.patience": None,
        "hidden": [64, 64],
    }
