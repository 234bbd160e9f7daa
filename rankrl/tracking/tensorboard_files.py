"""Tracking for TensorBoard: event files in the run folder, for `tensorboard --logdir runs`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rankrl.tracking.base import Tracker
from rankrl.tracking.registry import import_optional, register_tracker


@register_tracker("tensorboard")
class TensorBoardTracker(Tracker):
    """Writes `tensorboard/` in the run folder (`tensorboard --logdir runs`), beside the CSV files."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        writer = import_optional("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._writer = writer(str(folder / "tensorboard"))

    def configuration(self, values: Mapping[str, str]) -> None:
        """Keep it as a Markdown table."""
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
        """Flush and close the file."""
        self._writer.close()
