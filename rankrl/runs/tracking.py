"""Track the numbers of a run for a dashboard while it goes on.

A tracker is a class with a few methods, registered by name (`tracker`). `Tracking` passes the numbers on to
the trackers of a run, whose errors never stop the run.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from decomposition.files import announce_write
from decomposition.registry import Registry
from rankrl.errors import ConfigError, RankrlError
from rankrl.files import recording_entries, write_atomically
from rankrl.option_types import check_options, parameter_types

if TYPE_CHECKING:
    from rankrl.plan_search.scores.evaluation import EpisodeRow
    from rankrl.training import EpochRow

log = logging.getLogger(__name__)


class Tracker(ABC):
    """Writes the numbers of one run somewhere; subclasses are registered with `@register_tracker`.

    A tracker is made once for each run before anything is computed, so missing packages or settings show up
    early. A resumed run makes it anew in the same folder: points that were written stay.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def configuration(  # noqa: B027 - a tracker may leave it out
        self, values: Mapping[str, str]
    ) -> None:
        """Keep the run's configuration, flattened: `search.episodes` to `100`. Nothing by default."""

    @abstractmethod
    def point(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Keep the numbers of one step.

        Args:
            stage: `search`, `agent` (updates of a learning agent), `train` or `finetune`.
            step: Number of the episode or epoch, from 1 on.
            values: Numbers by name; a stage always has the same names.
        """

    @abstractmethod
    def result(self, values: Mapping[str, float]) -> None:
        """Keep the final numbers, flattened: `finetuned.accuracy` to `0.91`."""

    def close(self) -> None:  # noqa: B027 - a tracker may leave it out
        """Flush and close; does nothing by default."""


_TRACKERS: Registry[type[Tracker]] = Registry("tracker", ConfigError)
T = TypeVar("T", bound=type[Tracker])


def register_tracker(name: str) -> Callable[[T], T]:
    """Register the decorated class as the tracker `name`.

    Raises:
        ConfigError: The name is taken.
    """

    def register(tracker: T) -> T:
        return _TRACKERS.add(name, tracker)  # type: ignore[return-value]

    return register


def list_trackers() -> list[str]:
    return _TRACKERS.names()


def tracker_class(name: str) -> type[Tracker]:
    return _TRACKERS[name]


def create_tracker(name: str, folder: Path, **options: Any) -> Tracker:
    tracker = tracker_class(name)
    types = parameter_types(tracker, without=("folder",))
    check_options(f"tracker {name!r}", "tracking.options", options, types)
    return tracker(folder, **options)


def import_optional(module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"tracking={extra} needs the package {module.partition('.')[0]} ({error}); install it with "
            f"`pip install 'rankrl[{extra}]'`, or choose tracking=csv"
        ) from error


class Tracking:
    """Passes numbers on to trackers; a tracker that fails is reported once and dropped."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def configuration(self, config: Mapping[str, Any]) -> None:
        values = {name: str(value) for name, value in flattened(config).items()}
        self._call_all(lambda tracker: tracker.configuration(values))

    def episode(self, row: EpisodeRow) -> None:
        names = ("reward", "best_reward", "accuracy", "params_kept", "macs_kept")
        self._point("search", row.episode, {name: getattr(row, name) for name in names})

    def update(self, episode: int, values: Mapping[str, float]) -> None:
        self._point("agent", episode, values)

    def epochs(self, stage: str) -> Callable[[EpochRow], None]:
        """Return a function that tracks the epochs of `train` or `finetune`."""

        def epoch(row: EpochRow) -> None:
            self._point(stage, row.epoch, {"loss": row.loss, "accuracy": row.accuracy, "lr": row.lr})

        return epoch

    def result(self, metrics: Mapping[str, Any]) -> None:
        values = {
            name: float(value)
            for name, value in flattened(metrics).items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }
        self._call_all(lambda tracker: tracker.result(values))

    def close(self) -> None:
        self._call_all(lambda tracker: tracker.close())

    def _point(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        self._call_all(lambda tracker: tracker.point(stage, step, values))

    def _call_all(self, call: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                call(tracker)
            except Exception as error:  # a full disk or a lost server must not end hours of work
                self._trackers.remove(tracker)
                log.warning(
                    "%s stopped tracking; the run goes on: %s: %s",
                    type(tracker).__name__,
                    type(error).__name__,
                    error,
                )


NOT_TRACKED = Tracking(())
"""Tracks nothing."""


@contextmanager
def start_tracking(
    name: str, folder: Path, config: Mapping[str, Any], options: Mapping[str, Any] | None = None
) -> Iterator[Tracking]:
    tracking = Tracking(_trackers(name, folder, options or {}))
    tracking.configuration(config)
    try:
        yield tracking
    finally:
        tracking.close()


def _trackers(name: str, folder: Path, options: Mapping[str, Any]) -> list[Tracker]:
    if name == "none":
        return []
    trackers = [create_tracker("csv", folder)]
    if name != "csv":
        try:
            with recording_entries(folder, name):
                trackers.append(create_tracker(name, folder, **options))
        except RankrlError:
            raise
        except Exception as error:  # a server that does not answer, a folder that cannot be written
            log.warning("tracking=%s does not work; the run goes on without: %s", name, error)
    return trackers


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by dotted names; lists stay as they are.

    >>> flattened({"search": {"episodes": 100}, "seed": 0})
    {'search.episodes': 100, 'seed': 0}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


@register_tracker("csv")
class CsvTracker(Tracker):
    """Writes `tracking/*.csv`: a file a stage, a line a step; `result.csv` has a line a final number."""

    def point(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        self._append(stage, ["step", *values], [[step, *values.values()]])

    def result(self, values: Mapping[str, float]) -> None:
        announce_write(self.folder / "tracking" / "result.csv")
        (self.folder / "tracking" / "result.csv").unlink(missing_ok=True)
        self._append("result", ["name", "value"], list(values.items()))

    def _append(self, name: str, columns: list[str], rows: list[Any]) -> None:
        path = self.folder / "tracking" / f"{name}.csv"
        announce_write(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                writer.writerow(columns)
            writer.writerows(rows)


_LONGEST_VALUE = 500
_PARAMETERS_A_CALL = 100
# Holds the id with which a resumed run continues; the run is named after its folder.
_RUN_FILE = "mlflow-run"


@register_tracker("mlflow")
class MlflowTracker(Tracker):
    """Logs to MLflow (extra `mlflow`) through its client, in addition to the CSV files.

    Args:
        folder: The run folder.
        uri: Tracking server or folder; None takes MLflow's own default (MLFLOW_TRACKING_URI).
        experiment: Name of the experiment, made where it does not exist.
    """

    def __init__(self, folder: Path, uri: str | None = None, experiment: str = "rankrl") -> None:
        super().__init__(folder)
        mlflow = import_optional("mlflow", "mlflow")
        self._metric = mlflow.entities.Metric
        self._parameter = mlflow.entities.Param
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        known = folder / "state" / _RUN_FILE
        if known.is_file():
            self._run = known.read_text(encoding="utf-8").strip()
            self._client.update_run(self._run, status="RUNNING")
            return
        earlier = self._client.get_experiment_by_name(experiment)
        identifier = self._client.create_experiment(experiment) if earlier is None else earlier.experiment_id
        self._run = self._client.create_run(identifier, run_name=folder.name).info.run_id
        write_atomically(known, self._run)

    def configuration(self, values: Mapping[str, str]) -> None:
        """Log the options as parameters; long values, which MLflow refuses, are cut."""
        parameters = [self._parameter(name, value[:_LONGEST_VALUE]) for name, value in values.items()]
        for start in range(0, len(parameters), _PARAMETERS_A_CALL):
            self._client.log_batch(self._run, params=parameters[start : start + _PARAMETERS_A_CALL])

    def point(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Log metrics `STAGE/NAME`."""
        metrics = [self._metric(f"{stage}/{name}", value, 0, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def result(self, values: Mapping[str, float]) -> None:
        self.point("result", 0, values)

    def close(self) -> None:
        self._client.set_terminated(self._run)


@register_tracker("tensorboard")
class TensorBoardTracker(Tracker):
    """Writes `tensorboard/` in the run folder (`tensorboard --logdir runs`), in addition to the CSV files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        writer = import_optional("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(str(folder / "tensorboard"))

    def configuration(self, values: Mapping[str, str]) -> None:
        """Write the options as a Markdown table."""
        rows = "\n".join(f"| {name} | {value} |" for name, value in values.items())
        self._writer.add_text("configuration", f"| option | value |\n|---|---|\n{rows}")

    def point(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Add scalars `STAGE/NAME`."""
        for name, value in values.items():
            self._writer.add_scalar(f"{stage}/{name}", value, step)

    def result(self, values: Mapping[str, float]) -> None:
        """Add scalars `result/NAME`."""
        self.point("result", 0, values)

    def close(self) -> None:
        self._writer.close()


@register_tracker("wandb")
class WandbTracker(Tracker):
    """Logs to W&B (extra `wandb`), in addition to the CSV files; each stage has its own step.

    Args:
        folder: The run folder.
        project: W&B's project.
        mode: "online", "offline" (no network; `wandb sync` sends it later) or None for W&B's own default.
    """

    def __init__(self, folder: Path, project: str = "rankrl", mode: str | None = None) -> None:
        super().__init__(folder)
        wandb = import_optional("wandb", "wandb")
        identifier = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        self._run: Any = wandb.init(
            project=project, mode=mode, dir=str(folder), id=identifier, name=folder.name, resume="allow"
        )

    def configuration(self, values: Mapping[str, str]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def point(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Log `STAGE/NAME` over `STAGE/step`."""
        self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        self._run.log({f"{stage}/step": step, **{f"{stage}/{name}": value for name, value in values.items()}})

    def result(self, values: Mapping[str, float]) -> None:
        """Write the numbers to the run's summary."""
        self._run.summary.update(dict(values))

    def close(self) -> None:
        self._run.finish()
