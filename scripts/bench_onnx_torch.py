"""What an ONNX file keeps without labels, against the same network compressed in PyTorch.

    RANKRL_DATA=data python scripts/bench_onnx_torch.py --checkpoint cifar10-resnet20.th --rows rows.csv

ResNet-20 in Tucker at a share of its parameters, greedy's plan, refitted without any training. As a file it
is exported first, its batch norms folded, and all that is known of it is the file and unlabelled images; in
PyTorch no labels are used either, but outputs are differentiated, which a file cannot do. Each is measured
with all channels counting alike, too. Accuracies are those on the test images of CIFAR-10, for several draws
of the calibration images; finished rows are kept in `--rows`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

import numpy as np
import torch
from bench_decomposition import load_network
from result_rows import ResultRows
from torch import nn

from decomposition import apply_plan, count_parameters, plan_by_heuristic
from rankrl import DecompositionOptions, compress
from rankrl.data import load_dataset
from rankrl.data.calibration import calibration_images
from rankrl.onnx.export import export_network
from rankrl.onnx.graph import OnnxNetwork
from rankrl.onnx.graph.costs import network_costs
from rankrl.report.markdown import shown_command, write_section
from rankrl.report.provenance import hardware_line
from rankrl.training import report_accuracy

TORCH, FILE = "in PyTorch", "as an ONNX file"
HELDOUT = 0.2


class FileNetwork(nn.Module):
    """An ONNX file of a classifier, to be scored like a module."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        network = OnnxNetwork.load(path)
        self.session, self.input = network.session(), network.inputs[0].name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images (N, C, H, W) to class scores (N, classes)."""
        return torch.from_numpy(self.session.run({self.input: x.numpy()})[0])


def in_torch(model: nn.Module, images: torch.Tensor, kept: float, weighed: bool) -> tuple[nn.Module, int]:
    """Return the network compressed in PyTorch, and its parameters."""
    shape = tuple(images.shape[1:])
    plan = plan_by_heuristic(
        model, shape, ["tucker"], "greedy", kept, calibration=images, weigh_outputs=weighed
    )
    small = apply_plan(model, plan, images, weigh_outputs=weighed)
    return small, count_parameters(small)


def as_file(
    model: nn.Module, images: torch.Tensor, kept: float, weighed: bool, folder: Path
) -> tuple[nn.Module, int]:
    """Return the network compressed as a file, and its parameters.

    The budget is that of the network in PyTorch, whose batch norms count, too.
    """
    shape = tuple(images.shape[1:])
    dense, small = folder / "dense.onnx", folder / "small.onnx"
    export_network(model, dense, shape, [images[:64].numpy()])
    params = kept * count_parameters(model) / network_costs(OnnxNetwork.load(dense), [])["params"]
    layers = DecompositionOptions(format="tucker", weigh_outputs=weighed)
    result = compress(dense, images.numpy(), small, params=params, decomposition=layers, heldout=HELDOUT)
    return FileNetwork(small), result.after["params"]


def measure(options: argparse.Namespace, rows: ResultRows) -> None:
    """Measure what is missing in the rows."""
    model, data = load_network(options.checkpoint), load_dataset("cifar10")
    for weighed, seed, how in product((True, False), range(options.seeds), (TORCH, FILE)):
        key = {"network": how, "outputs weighed": weighed, "draw": seed}
        if rows.find(key) is not None:
            continue
        # What the file's result is compared on is drawn apart, so that both are fitted to as many images.
        count = options.calibration if how == TORCH else round(options.calibration / (1 - HELDOUT))
        images = calibration_images(data, count, seed=seed)
        begun = time.process_time()
        with tempfile.TemporaryDirectory() as folder:
            if how == TORCH:
                small, params = in_torch(model, images, options.kept, weighed)
            else:
                small, params = as_file(model, images, options.kept, weighed, Path(folder))
            seconds = time.process_time() - begun
            accuracy = 100 * report_accuracy(small, data.test, mean=data.mean, std=data.std)
        rows.add(key, {"parameters": params, "accuracy": f"{accuracy:.2f}", "seconds": f"{seconds:.0f}"})
        print(f"{key}: {accuracy:.2f} %, {params:,} parameters", file=sys.stderr, flush=True)


def table(rows: ResultRows) -> str:
    """Return the rows as a Markdown table: means over the draws, and the accuracy of each."""
    lines = ["| | channels weighed by the outputs | parameters | accuracy, % | each draw | seconds |"]
    lines.append("|---|---|---:|---:|---|---:|")
    for weighed, how in product((True, False), (TORCH, FILE)):
        matching = [r for r in rows.rows if (r["network"], r["outputs weighed"]) == (how, str(weighed))]
        if matching:
            params, accuracy, seconds = (
                np.mean([float(row[column]) for row in matching]) for column in rows.columns[-3:]
            )
            each = ", ".join(row["accuracy"] for row in matching)
            word = "yes" if weighed else "no"
            lines.append(f"| {how} | {word} | {params:,.0f} | {accuracy:.2f} | {each} | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line, measure what is missing, print and perhaps save the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="weights of a CIFAR-10 ResNet-20")
    parser.add_argument("--kept", type=float, default=0.25, help="share of the parameters (default 0.25)")
    parser.add_argument("--calibration", type=int, default=800, help="images to fit to (default 800)")
    parser.add_argument("--seeds", type=int, default=3, help="draws of the images (default 3)")
    parser.add_argument("--rows", type=Path, required=True, help="CSV file of finished rows")
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced, or CSV file")
    options = parser.parse_args()
    key, values = ["network", "outputs weighed", "draw"], ["parameters", "accuracy", "seconds"]
    rows = ResultRows(options.rows, key, values)
    measure(options, rows)
    command = shown_command(
        sys.argv, shortened={str(options.checkpoint): options.checkpoint.name}, dropped=["--rows"]
    )
    text = f"`{command}`\n\n{hardware_line()}\n\n{table(rows)}"
    print(text)
    if options.output:
        write_section(options.output, "bench_onnx_torch", "An ONNX file and PyTorch", text)


if __name__ == "__main__":
    main()
