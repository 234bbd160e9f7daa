"""Time the files of finished runs of `rankrl` in turns with the dense network and its 8-bit integers.

    RANKRL_DATA=data OMP_NUM_THREADS=1 python scripts/bench_latency.py --folders RUNS/resnet20-35

The runs are such as `scripts/results.py --grid scripts/latency.yaml` trains, which can be interrupted. All
files of a network are timed in turns, with sessions of their own in each of `--repeats` comparisons: times
are medians over the comparisons, with the range of the ratios. Accuracies are those that the runs wrote down.
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
from bench_frame import command_line, markdown, publish
from results import epochs_of

from rankrl.data import load_dataset
from rankrl.onnx.export import quantise_onnx
from rankrl.onnx.runtimes import DEFAULT_RUNTIME
from rankrl.options.decomposition import default_precisions
from rankrl.options.search import BudgetOptions
from rankrl.options.timing import ExportOptions
from rankrl.report.run_folder import read_metrics
from rankrl.timing.latency import TimedTurns, time_in_turns
from rankrl.verify.measure import range_batches

HEAD = (
    *("network", "chosen from", "asked", "time", "of the integers'", "ms", "before", "after", "in the file"),
    *("epochs", "agreement", "parameters", "smaller"),
)


@dataclass(frozen=True)
class Run:
    folder: Path

    @cached_property
    def metrics(self) -> dict[str, Any]:
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
        path = self.folder / "state" / "configuration.json"
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["config"]
        return config

    @property
    def network(self) -> tuple[str, str, str]:
        """Name, checkpoint and data of the dense network, which runs may share."""
        return self.metrics["model"], str(self.metrics["checkpoint"]), self.metrics["dataset"]

    @property
    def export(self) -> ExportOptions:
        """How its file was written and timed."""
        onnx = self.metrics["onnx"]
        return ExportOptions(batch=onnx["batch"], threads=onnx["threads"], preprocess=onnx["preprocess"])

    @property
    def choices(self) -> str:
        """Describe the candidates that the plan was chosen from."""
        decomposition, budget = self.settings["decomposition"], self.settings["budget"]
        formats = decomposition["formats"] or [decomposition["format"]]
        kinds = (
            "+".join(formats)
            + "+channels" * bool(decomposition["channels"])
            + "+blocks" * decomposition["blocks"]
        )
        usual = default_precisions(BudgetOptions(**budget))
        return f"{kinds}, {'+'.join(decomposition['precisions'] or usual)}"


def network_rows(runs: Sequence[Run], passes: int, repeats: int) -> list[tuple[str, ...]]:
    """Time the files of runs of one network in turns; the first rows are the dense network's."""
    first = runs[0]
    dense, options = first.folder / "state" / "dense.onnx", first.export
    with tempfile.TemporaryDirectory() as scratch:
        integers = Path(scratch) / "dense-int8.onnx"
        data = load_dataset(first.metrics["dataset"], seed=0)
        quantise_onnx(dense, integers, range_batches(data, options))
        files = [dense, integers, *(run.folder / "model.onnx" for run in runs)]
        turns = [_timed(files, options, passes) for _ in range(repeats)]
        rival_bytes = integers.stat().st_size
    times = np.array([[latency.ms for latency in each.latencies] for each in turns])
    ratios = times / times[:, :1]
    to_dense, low, high = np.median(ratios, axis=0), ratios.min(0), ratios.max(0)
    to_integers = np.median(times / times[:, 1:2], axis=0)
    milliseconds = np.median(times, axis=0)
    name, dense_bytes = first.metrics["model"], dense.stat().st_size
    accuracy, rival = (first.metrics[side]["accuracy"] for side in ("baseline", "dense_int8"))
    shown = [f"{each:.1f}" for each in milliseconds]
    integers_to_dense, smaller = f"{to_dense[1]:.3f}", f"{dense_bytes / rival_bytes:.1f}x"
    rows = [
        (name, "dense", "", "1", f"{to_integers[0]:.2f}", shown[0], "", "", f"{accuracy:.2%}", *[""] * 4),
        (
            name,
            "dense, int8",
            "",
            integers_to_dense,
            "1",
            shown[1],
            "",
            "",
            f"{rival:.2%}",
            *[""] * 3,
            smaller,
        ),
    ]
    for at, run in enumerate(runs, len(rows)):
        metrics = run.metrics
        epochs, onnx = epochs_of(metrics), metrics["onnx"]
        rows.append(
            (
                name,
                run.choices,
                str(run.settings["budget"]["latency"] or ""),
                f"{to_dense[at]:.3f} ({low[at]:.3f} to {high[at]:.3f})",
                f"{to_integers[at]:.2f}",
                shown[at],
                f"{metrics['compressed']['accuracy']:.2%}",
                f"{metrics['finetuned']['accuracy']:.2%}" if epochs else "",
                f"{onnx['accuracy']:.2%}",
                str(epochs),
                "" if onnx["agreement"] is None else f"{onnx['agreement']:.1%}",
                f"{metrics['ratios']['params']:.2f}x fewer",
                f"{dense_bytes / onnx['file_bytes']:.1f}x",
            )
        )
    return rows


def _timed(files: Sequence[Path], options: ExportOptions, passes: int) -> TimedTurns:
    pairs = [(DEFAULT_RUNTIME, file) for file in files]
    return time_in_turns(pairs, batch=options.batch, threads=options.threads, runs=passes)


def main() -> None:
    """Time the files, print and perhaps save the table."""
    parser = command_line(__doc__)
    parser.add_argument("--folders", type=Path, nargs="+", required=True, help="finished runs")
    parser.add_argument("--runs", type=int, default=30, help="timed passes of each file in a comparison")
    parser.add_argument("--repeats", type=int, default=5, help="comparisons")
    options = parser.parse_args()
    by_network: dict[tuple[str, str, str], list[Run]] = {}
    for folder in options.folders:
        run = Run(folder)
        by_network.setdefault(run.network, []).append(run)
    rows = [row for same in by_network.values() for row in network_rows(same, options.runs, options.repeats)]
    short: dict[Path | None, str] = {folder: f"RUNS/{folder.name}" for folder in options.folders}
    publish(
        markdown(HEAD, rows, left=range(2)),
        options.output,
        section="bench_latency",
        title="Budgets in time",
        shortened=short,
    )


if __name__ == "__main__":
    main()
