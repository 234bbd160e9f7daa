"""Finished runs of `rankrl` as rows of one table, for which all files of a network are timed in turns.

A run's own report times its file when it is done, whatever else the machine does then. Here the files of all
runs of a network, its dense one and that in 8-bit integers are timed together, several times; the accuracies
are those that the runs wrote down.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from result_rows import epochs_of

from rankrl.data import load_dataset
from rankrl.onnx.export import quantise_onnx
from rankrl.onnx.runtimes import DEFAULT_RUNTIME
from rankrl.options.decomposition import default_precisions
from rankrl.options.search import BudgetOptions
from rankrl.options.timing import ExportOptions
from rankrl.report.run_folder import read_metrics
from rankrl.timing.latency import TimedTurns, time_in_turns
from rankrl.verify.measure import range_batches

HEAD = [
    "| network | chosen from | asked | time | of the integers' | ms | before | after | in the file | epochs "
    "| agreement | parameters | smaller |",
    "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
]


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: Its folder.
    """

    folder: Path

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """What it measured.

        Raises:
            SystemExit: If it has not finished.
        """
        path = self.folder / "metrics.json"
        if not path.exists():
            raise SystemExit(f"{self.folder} is no finished run: it has no metrics.json. Resume it first")
        metrics = read_metrics(self.folder)
        if "onnx" not in metrics:
            raise SystemExit(f"{self.folder} has written no ONNX file that could be timed")
        if metrics["dense_int8"] is None:
            raise SystemExit(f"{self.folder} did not measure the dense network in integers (export.int8)")
        return metrics

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The options it was run with."""
        path = self.folder / "state" / "configuration.json"
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["config"]
        return config

    @property
    def network(self) -> tuple[str, str, str]:
        """What runs that share a dense network have in common: its name, checkpoint and data."""
        return self.metrics["model"], str(self.metrics["checkpoint"]), self.metrics["dataset"]

    @property
    def export(self) -> ExportOptions:
        """How its file was written and timed."""
        onnx = self.metrics["onnx"]
        return ExportOptions(batch=onnx["batch"], threads=onnx["threads"], preprocess=onnx["preprocess"])

    @property
    def choices(self) -> str:
        """What the plan was chosen from, for the table."""
        decomposition, budget = self.settings["decomposition"], self.settings["budget"]
        formats = decomposition["formats"] or [decomposition["format"]]
        kinds = (
            "+".join(formats)
            + "+channels" * bool(decomposition["channels"])
            + "+blocks" * decomposition["blocks"]
        )
        usual = default_precisions(BudgetOptions(**budget))
        return f"{kinds}, {'+'.join(decomposition['precisions'] or usual)}"


def run_rows(folders: Sequence[Path], *, runs: int, repeats: int) -> list[str]:
    """Return the lines of the table.

    Args:
        folders: Folders of finished runs.
        runs: Forward passes of each file a comparison.
        repeats: Comparisons, each with sessions of its own; the middle one by the ratio is shown.
    """
    by_network: dict[tuple[str, str, str], list[Run]] = {}
    for folder in folders:
        run = Run(folder)
        by_network.setdefault(run.network, []).append(run)
    lines = list(HEAD)
    for same in by_network.values():
        lines += _network_rows(same, runs, repeats)
    return lines


def _network_rows(runs: Sequence[Run], passes: int, repeats: int) -> list[str]:
    first = runs[0]
    dense, options = first.folder / "state" / "dense.onnx", first.export
    with tempfile.TemporaryDirectory() as scratch:
        integers = Path(scratch) / "dense-int8.onnx"
        data = load_dataset(first.metrics["dataset"], seed=0)
        quantise_onnx(dense, integers, range_batches(data, options))
        files = [dense, integers, *(run.folder / "model.onnx" for run in runs)]
        turns = [_timed(files, options, passes) for _ in range(repeats)]
        rival_bytes = integers.stat().st_size
    medians = np.array([[latency.median_ms for latency in each.latencies] for each in turns])
    to_dense = np.median(medians / medians[:, :1], axis=0)
    to_integers = np.median(medians / medians[:, 1:2], axis=0)
    spread = medians[:, 2:] / medians[:, :1]
    milliseconds = np.median(medians, axis=0)
    accuracy, dense_bytes = first.metrics["baseline"]["accuracy"], dense.stat().st_size
    rival = first.metrics["dense_int8"]["accuracy"]
    name = first.metrics["model"]
    lines = [
        f"| {name} | dense | | 1 | {to_integers[0]:.2f} | {milliseconds[0]:.1f} | | | {accuracy:.2%} "
        "| | | | |",
        f"| {name} | dense, int8 | | {to_dense[1]:.3f} | 1 | {milliseconds[1]:.1f} | | | {rival:.2%} | | | "
        f"| {dense_bytes / rival_bytes:.1f}x |",
    ]
    for position, run in enumerate(runs):
        metrics, low, high = run.metrics, spread[:, position].min(), spread[:, position].max()
        epochs = epochs_of(metrics)
        after = f"{metrics['finetuned']['accuracy']:.2%}" if epochs else ""
        agreement = metrics["onnx"]["agreement"]
        at = position + 2
        lines.append(
            f"| {name} | {run.choices} | {run.settings['budget']['latency'] or ''} "
            f"| {to_dense[at]:.3f} ({low:.3f} to {high:.3f}) | {to_integers[at]:.2f} "
            f"| {milliseconds[at]:.1f} | {metrics['compressed']['accuracy']:.2%} | {after} "
            f"| {metrics['onnx']['accuracy']:.2%} | {epochs} "
            f"| {'' if agreement is None else f'{agreement:.1%}'} | {metrics['ratios']['params']:.2f}x fewer "
            f"| {dense_bytes / metrics['onnx']['file_bytes']:.1f}x |"
        )
    return lines


def _timed(files: Sequence[Path], options: ExportOptions, passes: int) -> TimedTurns:
    pairs = [(DEFAULT_RUNTIME, file) for file in files]
    return time_in_turns(pairs, batch=options.batch, threads=options.threads, runs=passes)
