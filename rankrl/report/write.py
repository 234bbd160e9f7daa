"""Writing the report into a run folder: `report.html` and `plots/*.png`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from rankrl.files import atomic_path, write_atomically
from rankrl.report.data import LayerRow, RunReport
from rankrl.report.figures import fine_tuning_figure, layers_figure, reward_figure
from rankrl.report.quality import epoch_score
from rankrl.report.run_folder import read_episodes, read_metrics
from rankrl.report.run_page import run_page
from rankrl.training import EpochRow

_DOTS_PER_INCH = 160
METRICS = "metrics.json"
_FILES = {
    METRICS: "the numbers of this page, for programs",
    "plan.json": "the operations of every layer",
    "model.safetensors": "the compressed network with its plan",
    "model.onnx": "the same for onnxruntime, verified",
    "dense.safetensors": "the dense network, as trained here",
    "optimizer_step.onnx": "a step of the optimizer as an ONNX graph",
    "episodes.csv": "every plan that was tried",
    ".hydra/config.yaml": "the whole configuration",
    "rankrl.log": "the log",
}


def write_report(
    folder: str | Path,
    *,
    metrics: Mapping[str, Any] | None = None,
    layers: Sequence[LayerRow] = (),
    epochs: Sequence[EpochRow] = (),
    setup: Mapping[str, str] | None = None,
) -> Path:
    """Write the report of a run next to its other files.

    `episodes.csv` is read from the folder where there is one.
    """
    folder = Path(folder)
    report = RunReport(
        read_metrics(folder) if metrics is None else metrics,
        layers,
        read_episodes(folder),
        epochs,
        setup or {},
        _files(folder),
    )
    page = folder / "report.html"
    document = run_page(report)
    if report.episodes:
        save_figure(reward_figure(report.episodes), folder / "plots" / "reward.png")
    if report.layers:
        save_figure(layers_figure(report.layers), folder / "plots" / "layers.png")
    if report.epochs:
        figure = fine_tuning_figure(report.epochs, score=epoch_score(report.metrics))
        save_figure(figure, folder / "plots" / "finetune.png")
    write_atomically(page, document)
    return page


def _files(folder: Path) -> list[tuple[str, str]]:
    """Return the files of the folder that the page leads to; `metrics.json` is written after it."""
    return [(name, text) for name, text in _FILES.items() if name == METRICS or (folder / name).is_file()]


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, atomically."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=_DOTS_PER_INCH, facecolor="white")
