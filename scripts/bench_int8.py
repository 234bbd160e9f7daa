"""What 8-bit integers cost dense networks, with weights of all 8 bits and of 7.

    RANKRL_DATA=data python scripts/bench_int8.py --checkpoints CHECKPOINTS --networks resnet20 resnet56

Files are made by onnxruntime's quantiser, ranges from held-out images, and run on the test images.
*Overflow* says whether this processor cuts off sums of 8-bit products, as x86 processors without VNNI do.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from bench_decomposition import load_network

from rankrl import reuse_memory
from rankrl.data import load_dataset
from rankrl.onnx.export.ranges import sums_overflow
from rankrl.options.timing import ExportOptions
from rankrl.report.provenance import hardware_line, shown_command, write_section
from rankrl.verify.measure import export_dense, int8_numbers, test_accuracy

HEAD = [
    "| network | dense, % | 8 bits, % | time | 7 bits, % | time | of 8 bits |",
    "|---|---:|---:|---:|---:|---:|---:|",
]


def row(name: str, checkpoint: Path, options: ExportOptions, repeats: int) -> str:
    """Measure a network: accuracies, and times as parts of the float32 file's (the median of repeats)."""
    data = load_dataset("cifar10", seed=0)
    model = load_network(checkpoint, name)
    accuracies: dict[bool, float] = {}
    times: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        baseline = export_dense(model, data, Path(folder), options)
        for _ in range(repeats):
            for reduced, ratios in times.items():
                numbers = int8_numbers(baseline, data, replace(options, reduce_range=reduced), Path(folder))
                if numbers is None:
                    raise SystemExit(f"onnxruntime cannot quantise {name}; the log says why")
                accuracies[reduced] = numbers["accuracy"]
                ratios.append(1 / numbers["latency_ratio"])
    full, seven = (float(np.median(times[reduced])) for reduced in (False, True))
    return (
        f"| {name} | {test_accuracy(model, data):.2%} | {accuracies[False]:.2%} | {full:.2f} "
        f"| {accuracies[True]:.2%} | {seven:.2f} | {seven / full:.2f} |"
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of cifar10-NETWORK.th")
    parser.add_argument("--networks", nargs="+", default=["resnet20", "resnet32", "resnet56"])
    parser.add_argument("--repeats", type=int, default=3, help="files made and comparisons in turns of each")
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced, or CSV file")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure, print, and perhaps save the table."""
    options = parse()
    lines = list(HEAD)
    for name in options.networks:
        checkpoint = options.checkpoints / f"cifar10-{name}.th"
        lines.append(row(name, checkpoint, ExportOptions(), options.repeats))
        print(lines[-1], flush=True)
    overflow = f"Overflow: {'yes' if sums_overflow() else 'no'}."
    command = shown_command(sys.argv, shortened={str(options.checkpoints): "CHECKPOINTS"})
    text = "\n\n".join([f"`{command}`", hardware_line(), overflow, "\n".join(lines)])
    print(text)
    if options.output:
        write_section(options.output, "int8", "Integers without VNNI", text)


if __name__ == "__main__":
    reuse_memory()
    main()
