"""Tracking for TensorBoard: event files in the run folder, for `tensorboard --logdir runs`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rankrl.runs.tracking.base import Tracker
from rankrl.runs.tracking.registry import import_optional, register_tracker

# Options that change nothing in what is computed.
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
        """Keep it as a Markdown table, and for the tab HPARAMS."""
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
        # As `add_hparams` does, but into this run's file rather than a new folder.
        for summary in summaries(options, compared):
            self._writer.file_writer.add_summary(summary)

    def close(self) -> None:
        """Flush and close the file."""
        self._writer.close()


def _plain(text: str) -> bool | float | str:
    """Return a number or a truth value as such, so that TensorBoard can filter and sort by it."""
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text)
    except ValueError:
        return text
