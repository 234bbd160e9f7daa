"""Write tracked numbers to CSV files, TensorBoard, MLflow, or Weights & Biases."""

from __future__ import annotations

import csv
import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decomposition.files import announce_write
from rankrl.files import write_atomically
from rankrl.runs.tracking.tracker import Tracker, import_optional, register_tracker


@register_tracker("csv")
class CsvTracker(Tracker):
    """Writes `tracking/*.csv`: a file a stage, a line a step; `result.csv` has a line a final number."""

    def point(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Add a line to the stage's file."""
        self._append(stage, ["step", *values], [[step, *values.values()]])

    def result(self, values: Mapping[str, float]) -> None:
        """Write `result.csv` anew."""
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
        """Log metrics `result/NAME`."""
        self.point("result", 0, values)

    def close(self) -> None:
        """Mark the run as ended."""
        self._client.set_terminated(self._run)


# Options without effect on the results, which are no hyperparameters.
_NO_HYPERPARAMETERS = ("resume", "tracking", "runs", "weights", "plan", "export", "inspect")
# By their section of metrics.json.
_SECTIONS = {
    "finetuned": ("accuracy",),
    "compressed": ("accuracy",),
    "ratios": ("params", "macs", "latency"),
    "onnx": ("accuracy", "file_bytes"),
    "search": ("best_reward",),
}
_COMPARED = tuple(f"{section}.{name}" for section, names in _SECTIONS.items() for name in names)


@register_tracker("tensorboard")
class TensorBoardTracker(Tracker):
    """Writes `tensorboard/` in the run folder (`tensorboard --logdir runs`), in addition to the CSV files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        writer = import_optional("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(str(folder / "tensorboard"))
        self._configuration: dict[str, str] = {}

    def configuration(self, values: Mapping[str, str]) -> None:
        """Write the options as a Markdown table, and keep them for the tab HPARAMS."""
        self._configuration = dict(values)
        rows = "\n".join(f"| {name} | {value} |" for name, value in values.items())
        self._writer.add_text("configuration", f"| option | value |\n|---|---|\n{rows}")

    def point(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Add scalars `STAGE/NAME`."""
        for name, value in values.items():
            self._writer.add_scalar(f"{stage}/{name}", value, step)

    def result(self, values: Mapping[str, float]) -> None:
        """Add scalars `result/NAME`, and a row of the tab HPARAMS: options, final accuracy and size."""
        self.point("result", 0, values)
        summaries = import_optional("torch.utils.tensorboard.summary", "tensorboard").hparams
        options = {
            name: _plain(value)
            for name, value in self._configuration.items()
            if name.partition(".")[0] not in _NO_HYPERPARAMETERS
        }
        compared = {f"result/{name}": values[name] for name in _COMPARED if name in values}
        # Like `add_hparams`, which would open a file in a new folder.
        for summary in summaries(options, compared):
            self._writer.file_writer.add_summary(summary)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


def _plain(text: str) -> bool | float | str:
    """Convert text to a number or truth value if it is one, so that TensorBoard can filter and sort by it."""
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text)
    except ValueError:
        return text


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
            project=project,
            mode=mode,
            dir=str(folder),
            id=identifier,
            name=folder.name,
            resume="allow",
        )

    def configuration(self, values: Mapping[str, str]) -> None:
        """Set the run's configuration."""
        self._run.config.update(dict(values), allow_val_change=True)

    def point(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Log `STAGE/NAME` over `STAGE/step`."""
        self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        self._run.log({f"{stage}/step": step, **{f"{stage}/{name}": value for name, value in values.items()}})

    def result(self, values: Mapping[str, float]) -> None:
        """Write the numbers to the run's summary."""
        self._run.summary.update(dict(values))

    def close(self) -> None:
        """End the run."""
        self._run.finish()
