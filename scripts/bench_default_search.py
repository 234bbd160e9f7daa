"""The default search against greedy's plan and other searches, judged after the whole refit.

    RANKRL_DATA=DIR python scripts/bench_default_search.py --cell cifar100 --checkpoint FILE [--seeds 0 1 ...]

A cell is ResNet-20 in Tucker at 0.25 of its parameters: on CIFAR-10 or CIFAR-100, or as an ONNX file with
CIFAR-100's images as inputs (`file`). Every search is one run of `rankrl` without fine-tuning, whose network
is judged by the test images, which choose nothing. Rows go to a CSV file at once, and the same command goes
on where it was stopped; greedy's plan for a dataset, which needs no random draw, is made once. With --quick a
cell is a small network, trained on digits for an epoch and searched with six plans.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from result_rows import ResultRows

from rankrl import export_onnx
from rankrl.data import ImageData, batches, load_dataset
from rankrl.models import create_model, load_checkpoint
from rankrl.report.comparison import Spread
from rankrl.report.markdown import shown_command
from rankrl.report.provenance import hardware_line

CELLS = {"cifar10": "cifar10", "cifar100": "cifar100", "file": "cifar100"}
SEARCHES = {
    "greedy": ("selector=greedy",),
    "default": ("selector=bayes",),
    "without the policy": ("selector=bayes", "selector.policy=null"),
    "scored before the refit": (
        *("selector=bayes", "selector.policy=null", "search.episodes=100"),
        *("search.statistics=corrected", "search.term=accuracy", "search.finalists=1"),
    ),
    "ddpg": ("selector=ddpg",),
}
IN_FILES = ("greedy", "default", "without the policy", "ddpg")
QUICK = ("decomposition.candidates=4", "decomposition.iterations=5", "export.runs=3")
INPUTS = 1_200
KEY, VALUES = ("cell", "search", "seed"), ("plans", "seconds", "accuracy")


def network_options(options: argparse.Namespace, data: ImageData, folder: Path) -> list[str]:
    """Return what a run is told of the network; write the file and its inputs where it is one."""
    if options.quick:
        own = ["model=conv4", f"dataset={data.name}", "train.epochs=1", "finetune.epochs=0"]
    else:
        own = ["model=resnet20", f"dataset={data.name}", "finetune.epochs=0"]
        own.append(f"model.checkpoint={options.checkpoint}")
    if options.cell != "file":
        return own
    model = create_model("resnet20", input_shape=data.input_shape, num_classes=data.classes)
    load_checkpoint(model, options.checkpoint)
    export_onnx(model.eval(), folder / "dense.onnx", data.input_shape)
    inputs = next(batches(data.train, INPUTS, mean=data.mean, std=data.std))[0]
    np.savez(folder / "inputs.npz", input=inputs.numpy())
    return [
        *("model=onnx", f"model.path={folder / 'dense.onnx'}"),
        *("dataset=inputs", f"dataset.path={folder / 'inputs.npz'}", "decomposition.formats=[tucker]"),
    ]


def file_accuracy(path: Path, data: ImageData) -> float:
    """Return the accuracy of an ONNX file on the test images."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    right = 0
    for x, y in batches(data.test, 100, mean=data.mean, std=data.std):
        right += int((session.run(None, {name: x.numpy()})[0].argmax(1) == y.numpy()).sum())
    return right / len(data.test)


def run(network: Sequence[str], search: str, seed: int, options: argparse.Namespace, folder: Path) -> Path:
    """Search and apply the plan; return the run's folder."""
    where = folder / f"{search.replace(' ', '-')}-{seed}"
    words = [*network, *SEARCHES[search], "budget.params=0.25", f"seed={seed}", f"hydra.run.dir={where}"]
    if options.cell != "file":
        words.append("decomposition=tucker")
    if options.quick:
        words += [*QUICK, "search.episodes=6"]
    subprocess.run([sys.executable, "-m", "rankrl", *words], check=True)
    return where


def measured(options: argparse.Namespace, rows: ResultRows, folder: Path) -> None:
    """Run all searches that have no row yet."""
    data = load_dataset("digits" if options.quick else CELLS[options.cell], seed=0)
    network = network_options(options, data, folder)
    for seed in options.seeds:
        for search in IN_FILES if options.cell == "file" else SEARCHES:
            once = search == "greedy" and options.cell != "file"  # a file's held-out inputs are drawn
            key = {"cell": options.cell, "search": search, "seed": seed}
            if rows.find(key) is not None or (seed != options.seeds[0] and once):
                continue
            where = run(network, search, seed, options, folder)
            metrics = json.loads((where / "metrics.json").read_text())
            searched = metrics.get("search", {"episodes": 1, "seconds": 0.0})
            accuracy = (
                file_accuracy(where / "model.onnx", data)
                if options.cell == "file"
                else metrics["compressed"]["accuracy"]
            )
            values = (searched["episodes"], round(searched["seconds"], 1), accuracy)
            rows.add(key, dict(zip(VALUES, values, strict=True)))


def report(rows: ResultRows) -> str:
    """Return the table: means over the seeds, of the accuracy with a 95 % interval."""
    lines = ["| cell | search | seeds | plans | seconds | accuracy, % |", "|---|---|---:|---:|---:|---:|"]
    groups: dict[tuple[str, str], list[dict[str, str]]] = {}
    for row in rows.rows:
        groups.setdefault((row["cell"], row["search"]), []).append(row)
    for (cell, search), group in groups.items():
        plans, seconds, accuracies = ([float(row[name]) for row in group] for name in VALUES)
        means = f"{np.mean(plans):.0f} | {np.mean(seconds):.0f}"
        accuracy = Spread.of(accuracies).text(factor=100, digits=2)
        lines.append(f"| {cell} | {search} | {len(group)} | {means} | {accuracy} |")
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cell", choices=CELLS, required=True)
    parser.add_argument("--checkpoint", type=Path, help="weights of ResNet-20 on the cell's dataset")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--output", type=Path, default=Path("scripts/results/bench_default_search.csv"))
    parser.add_argument("--quick", action="store_true", help="a small network on digits instead")
    options = parser.parse_args(arguments)
    if options.quick and options.cell == "file":
        parser.error("--quick is for the cells of a dataset")
    if not options.quick and options.checkpoint is None:
        parser.error("give --checkpoint FILE, or --quick")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing and print the table of all rows."""
    options = parse(arguments)
    rows = ResultRows(options.output, KEY, VALUES)
    with tempfile.TemporaryDirectory() as folder:
        measured(options, rows, Path(folder))
    print("\n\n".join([f"`{shown_command(sys.argv)}`", hardware_line(), report(rows)]))


if __name__ == "__main__":
    main()
