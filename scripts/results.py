"""Fill the table of results: every cell of a grid trained at length, with the published figures.

    RANKRL_DATA=data python scripts/results.py --checkpoints CHECKPOINTS --folder results --hours 8

The grid is scripts/results.yaml. A cell is a run of `rankrl` in a folder of its
own: one that is finished is not run again, one that was interrupted goes on where it was, to the bit. With
`--hours` the script stops in time, and the next call goes on. Every network has a control: the dense
checkpoint trained on by the same recipe for as many epochs.

What finished cells came to is kept in `--records`, with the hardware, so that a table can be filled on
several machines and outlives their folders.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from bench_frame import ResultRows, command_line, hardware_line, markdown, say, shown_command, write_section

from rankrl.cli.app import BUDGET_MISSED, COLLAPSED

GRID = Path(__file__).with_suffix(".yaml")
CPU_EPOCHS, GPU_EPOCHS = 60, 200
KEY = ("cell", "epochs")
RECORDED = ("dense", "before", "after", "params", "macs", "latency", "file", "hardware")
# A run that is told to stop ends its step and writes its state.
_PATIENCE_SECONDS = 300


@dataclass(frozen=True)
class Published:
    """Hold a row of another paper's table; accuracies in %."""

    method: str
    accuracy: float
    base: float | None = None
    cost: str = ""
    protocol: str = ""

    def __str__(self) -> str:
        base = "" if self.base is None else f" from {self.base:g}"
        details = "; ".join(each for each in (self.cost, self.protocol) if each)
        return f"{self.method}: {self.accuracy:g}{base}" + (f" ({details})" if details else "")


@dataclass(frozen=True)
class Cell:
    """One row: a run of `rankrl`."""

    name: str
    network: str
    method: str
    options: tuple[str, ...]
    epochs: int  # of fine-tuning; 0 for a network that is trained from scratch
    seed: int
    goal: float | None = None
    published: tuple[Published, ...] = field(default=())

    def command(self, folder: Path) -> list[str]:
        """Make the command that runs it in a folder, or goes on there."""
        start = [sys.executable, "-c", "from rankrl.cli.app import main; main()"]
        if (folder / ".hydra").exists():
            return [*start, f"resume={folder}"]
        epochs = [f"finetune.epochs={self.epochs}"] if self.epochs else []
        return [*start, *self.options, *epochs, f"seed={self.seed}", f"hydra.run.dir={folder}"]


def read_grid(path: Path, checkpoints: Path, epochs: int) -> list[Cell]:
    grid: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    cells = []
    for entry in grid["cells"]:
        network = grid["networks"].get(entry["network"])
        if network is None:
            raise SystemExit(
                f"{path}: cell {entry['name']!r} is of the network {entry['network']!r}; there are "
                f"{', '.join(grid['networks'])}"
            )
        options = [*network["options"], *entry["options"]]
        if "checkpoint" in network and not entry.get("from_scratch", False):
            # What a cell says comes last, so that it may differ from the recipe.
            weights = f"model.checkpoint={checkpoints / network['checkpoint']}"
            plan = [] if any(each.startswith("task=") for each in options) else grid.get("plan", [])
            teachers = entry.get("teacher", [])
            teachers = [teachers] if isinstance(teachers, str) else teachers
            teacher = _teachers([grid["networks"][each] for each in teachers], checkpoints)
            options = [*grid["recipe"], *plan, weights, *teacher, *options]
        seeds = entry.get("seeds", [0])
        for seed in seeds:
            cells.append(
                Cell(
                    f"{entry['name']}-{seed}",
                    entry["network"],
                    entry["method"],
                    tuple(options),
                    0 if entry.get("from_scratch", False) else int(entry.get("epochs", epochs)),
                    seed,
                    entry.get("goal"),
                    tuple(Published(**each) for each in entry.get("published", [])),
                )
            )
    names = [cell.name for cell in cells]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise SystemExit(f"{path}: there are two cells of the name {', '.join(sorted(twice))}")
    return cells


def _teachers(networks: Sequence[Mapping[str, Any]], checkpoints: Path) -> list[str]:
    if not networks:
        return []
    files = ",".join(str(checkpoints / each["checkpoint"]) for each in networks)
    options = [option for each in networks for option in each["options"]]
    names = ",".join(each.removeprefix("model=") for each in options if each.startswith("model="))
    return [f"finetune.teacher=[{files}]", f"finetune.teacher_model=[{names}]"]


def finished(folder: Path) -> bool:
    """Tell whether a run is complete: its numbers are written last."""
    return (folder / "metrics.json").exists()


def run_cells(cells: Sequence[Cell], folder: Path, *, jobs: int, seconds: float) -> list[str]:
    """Run what is not finished, in the order of the grid, and stop in time; list the names that failed."""
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + seconds
    waiting = [cell for cell in cells if not finished(folder / cell.name)]
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed: list[str] = []
    try:
        while (waiting or running) and time.monotonic() < deadline:
            while waiting and len(running) < jobs:
                cell = waiting.pop(0)
                with (folder / f"{cell.name}.log").open("ab") as log:
                    command = cell.command(folder / cell.name)
                    running[cell.name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
                say(f"{cell.name} begins")
            for name, process in list(running.items()):
                if process.poll() is not None:
                    del running[name]
                    # Everything was written, but a budget in time was missed by a little, or nothing is left.
                    if process.returncode not in (0, BUDGET_MISSED, COLLAPSED) or not finished(folder / name):
                        failed.append(name)
                    say(f"{name} ends with exit code {process.returncode}")
            time.sleep(0.2)
    finally:
        for process in running.values():
            process.send_signal(signal.SIGINT)
        for process in running.values():
            try:
                process.wait(_PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
    return failed


def epochs_of(metrics: Mapping[str, Any]) -> int:
    """Read how many epochs a finished run fine-tuned for: its own, a later call may ask for others."""
    return int(metrics.get("trainings", {}).get("finetune", {"epochs": 0})["epochs"])


def record_of(metrics: Mapping[str, Any]) -> dict[str, object]:
    """Read the numbers of a finished run, empty text where one does not apply."""
    record: dict[str, object] = dict.fromkeys(("epochs", *RECORDED), "")
    record |= {"dense": metrics["baseline"]["accuracy"], "hardware": hardware_line()}
    if "finetuned" not in metrics:  # trained from scratch
        return record
    ratios, onnx = metrics["ratios"], metrics["onnx"]
    return record | {
        "epochs": epochs_of(metrics),
        "before": metrics["compressed"]["accuracy"],
        "after": metrics["finetuned"]["accuracy"],
        "params": ratios["params"],
        "macs": ratios["macs"],
        "latency": 1 / ratios["latency"],
        "file": onnx["baseline_file_bytes"] / onnx["file_bytes"],
    }


def keep_finished(cells: Sequence[Cell], folder: Path, records: ResultRows) -> None:
    for cell in cells:
        if finished(folder / cell.name):
            metrics = json.loads((folder / cell.name / "metrics.json").read_text(encoding="utf-8"))
            record = record_of(metrics)
            key = {"cell": cell.name, "epochs": record["epochs"]}
            if records.find(key) is None:
                records.add(key, record)


def table(cells: Sequence[Cell], records: ResultRows) -> str:
    """Show the finished cells as a Markdown table, what they ran on, and the names of the others."""
    head = [
        *("network", "method", "epochs", "seed", "dense, %", "before, %", "after, %", "difference"),
        *("goal, %", "parameters", "MACs", "time", "file", "on", "published"),
    ]
    lines, missing = [], []
    machines: list[str] = []
    for cell in cells:
        rows = [row for row in records.rows if row["cell"] == cell.name]
        for row in sorted(rows, key=lambda row: int(row["epochs"] or 0)):
            if row["hardware"] not in machines:
                machines.append(row["hardware"])
            lines.append(_columns(cell, row, machines.index(row["hardware"]) + 1))
        if not rows:
            missing.append(cell.name)
    shown = [markdown(head, lines, left=(0, 1, len(head) - 1)), ""]
    shown += [f"{number}. {machine}" for number, machine in enumerate(machines, 1)]
    if missing:
        shown += ["", f"Not finished: {', '.join(missing)}."]
    return "\n".join(shown)


def _columns(cell: Cell, row: Mapping[str, str], machine: int) -> list[str]:
    def shown(column: str, form: str, factor: float = 1.0) -> str:
        return form.format(factor * float(row[column])) if row[column] else ""

    difference = f"{100 * (float(row['after']) - float(row['dense'])):+.2f}" if row["after"] else ""
    return [
        cell.network,
        cell.method,
        row["epochs"],
        str(cell.seed),
        shown("dense", "{:.2f}", 100),
        shown("before", "{:.2f}", 100),
        shown("after", "{:.2f}", 100),
        difference,
        "" if cell.goal is None else f"{cell.goal:g}",
        shown("params", "{:.2f}x fewer"),
        shown("macs", "{:.2f}x fewer"),
        shown("latency", "{:.2f}"),
        shown("file", "{:.2f}x smaller"),
        str(machine),
        "<br>".join(map(str, cell.published)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells that are asked for, print the table and perhaps save it; 1 if a cell failed."""
    parser = command_line(__doc__)
    parser.add_argument("--grid", type=Path, default=GRID, help="the cells (default scripts/results.yaml)")
    parser.add_argument(
        "--checkpoints", type=Path, required=True, help="folder of the dense networks' weights"
    )
    parser.add_argument("--folder", type=Path, default=Path("results"), help="of the runs (default results)")
    parser.add_argument(
        "--cells", nargs="+", metavar="TEXT", help="only cells whose names contain one of these"
    )
    parser.add_argument("--epochs", type=int, help=f"of fine-tuning ({CPU_EPOCHS}; on a GPU {GPU_EPOCHS})")
    parser.add_argument(
        "--hours", type=float, default=float("inf"), help="stop after so long; call again to go on"
    )
    parser.add_argument("--jobs", type=int, default=1, help="cells side by side, for a GPU")
    parser.add_argument(
        "--records", type=Path, help="CSV file of what finished cells came to (results.csv in --folder)"
    )
    parser.add_argument("--table-only", action="store_true", help="run nothing")
    options = parser.parse_args(arguments)
    epochs = options.epochs or (GPU_EPOCHS if torch.cuda.is_available() else CPU_EPOCHS)
    cells = read_grid(options.grid, options.checkpoints, epochs)
    asked = [cell for cell in cells if not options.cells or any(text in cell.name for text in options.cells)]
    failed = []
    if not options.table_only:
        failed = run_cells(asked, options.folder, jobs=options.jobs, seconds=3600 * options.hours)
    command = shown_command(
        ["scripts/results.py", *(sys.argv[1:] if arguments is None else arguments)],
        shortened={str(options.checkpoints): "CHECKPOINTS", str(options.folder): "results"},
        dropped=["--hours"],
    )
    records = ResultRows(options.records or options.folder / "results.csv", KEY, RECORDED)
    keep_finished(cells, options.folder, records)
    text = f"`{command}`\n\n{table(cells, records)}"
    print(text)
    if options.output is not None:
        write_section(options.output, "results", "Results", text)
    for name in failed:
        say(f"{name} failed; see {options.folder / name}.log")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
