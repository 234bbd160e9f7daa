"""Tracking with MLflow: one MLflow run for one run folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from rankrl.files import write_atomically
from rankrl.runs.tracking.base import Tracker
from rankrl.runs.tracking.registry import import_optional, register_tracker

_LONGEST_VALUE = 500
_PARAMETERS_A_CALL = 100
# A run is named after its folder; a resumed run goes on with the id in this file.
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
        """Log it as parameters; MLflow refuses long values, which are cut."""
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
