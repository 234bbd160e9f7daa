"""How fast the same cores are in onnxruntime: layers in stages or contracted, channels filled up or not.

    python scripts/bench_forms.py --checkpoints CHECKPOINTS --output scripts/results/bench_forms.csv

A task is NETWORK:SIZE:BATCH:FORMAT:FRACTION, the fraction of the parameters that greedy's plan keeps. Plans
are made from the weights alone: times depend on shapes. All files of a network are timed in turns, as
fractions of the dense one. The second table has one layer between neighbours, by rank.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from decomposition import (
    build_structure,
    contracted,
    factorised_layers,
    inspect_layers,
    make_plan,
    plan_by_heuristic,
)
from rankrl.device import channel_block
from rankrl.models import create_model, load_checkpoint
from rankrl.onnx.export import export_onnx, quantise_onnx
from rankrl.onnx.runtimes import DEFAULT_RUNTIME, open_session
from rankrl.report.markdown import shown_command, write_section
from rankrl.report.provenance import hardware_line
from rankrl.timing.form import faster_contracted
from rankrl.timing.latency import time_in_turns
from rankrl.timing.layer_timing import LayerTimer

SHAPES = ((16, 32), (32, 16), (64, 8))
"""Channels and size of the layers of the second table: those of a CIFAR ResNet."""


def network_row(task: str, runs: int, checkpoints: Path | None) -> str:
    """Time the files of one network and return its row."""
    name, size, batch, tensor_format, fraction = task.split(":")
    architecture, _, member = name.partition("/")
    shape = (3, int(size), int(size))
    model = create_model(
        architecture, input_shape=shape, num_classes=10, **({"name": member} if member else {})
    ).eval()
    checkpoint = None if checkpoints is None else checkpoints / f"cifar10-{name}.th"
    if checkpoint is not None and checkpoint.exists():
        load_checkpoint(model, checkpoint)
    plan = plan_by_heuristic(model, shape, [tensor_format], "greedy", float(fraction))
    small = build_structure(model, plan).eval()
    for layer in factorised_layers(small).values():
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.1)
    timing = {"batch": int(batch), "threads": 1, "runs": runs}
    block = channel_block()
    with tempfile.TemporaryDirectory() as folder:
        files = {
            each: Path(folder) / f"{each}.onnx" for each in ("dense", "int8", "contracted", "1", str(block))
        }
        export_onnx(model, files["dense"], shape, channel_block=block, progress=False)
        noise = np.random.default_rng(0).standard_normal((int(batch), *shape), dtype=np.float32)
        quantise_onnx(files["dense"], files["int8"], [noise])
        export_onnx(contracted(small), files["contracted"], shape, progress=False)
        for filled in (1, block):
            export_onnx(small, files[str(filled)], shape, channel_block=filled, progress=False)
            form = contracted(small, faster_contracted(small, shape, timing, filled))
            files[f"mixed {filled}"] = Path(folder) / f"mixed-{filled}.onnx"
            export_onnx(form, files[f"mixed {filled}"], shape, channel_block=filled, progress=False)
        turns = time_in_turns([(DEFAULT_RUNTIME, path) for path in files.values()], **timing)
        median = {each: timed.median_ms for each, timed in zip(files, turns.latencies, strict=True)}
        loads = [_seconds_to_open(files[each]) for each in ("1", str(block))]
        sizes = [files[each].stat().st_size for each in ("1", str(block))]
    columns = ("int8", "contracted", "1", "mixed 1", str(block), f"mixed {block}")
    ratios = [f"{median[each] / median['dense']:.3f}" for each in columns]
    costs = [f"{sizes[1] / sizes[0]:.3f}", f"{1e3 * loads[0]:.0f}", f"{1e3 * loads[1]:.0f}"]
    cells = [f"{name}, {size} x {size}", tensor_format, fraction, f"{median['dense']:.1f}", *ratios, *costs]
    return f"| {' | '.join(cells)} |"


def _seconds_to_open(path: Path) -> float:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        open_session(path)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def layer_rows(tensor_format: str, ranks: list[int], batch: int, runs: int) -> list[str]:
    """Time a layer of every shape at every rank and return the rows."""
    rows = []
    for channels, size in SHAPES:
        dense = nn.Conv2d(channels, channels, 3, padding=1)
        (spec,) = inspect_layers(dense, (channels, size, size))
        network, shape = nn.Sequential(dense), (channels, size, size)
        plans = [make_plan(network, shape, tensor_format, rank) for rank in ranks]
        layers = [build_structure(network, plan)[0] for plan in plans]  # type: ignore[index]
        cells = []
        for block in (1, channel_block()):
            timer = LayerTimer(batch=batch, threads=1, runs=runs, channel_block=block)
            cells.append(timer.forms(spec, [dense, *layers]))
        for index, rank in enumerate(ranks, 1):
            plain, filled = (times[index] / times[0] for times in cells)
            times = f"{cells[0][0]:.2f} | {plain:.2f} | {filled:.2f} | {filled / plain:.2f}"
            rows.append(f"| {channels}, {size} x {size} | {tensor_format} | {rank} | {times} |")
    return rows


def main() -> None:
    """Read the command line, run, print and perhaps save the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        default=["resnet20:32:64:cp:0.25", "resnet32:32:64:cp:0.0667", "resnet56:32:64:cp:0.25"],
        metavar="NETWORK:SIZE:BATCH:FORMAT:FRACTION",
    )
    parser.add_argument("--checkpoints", type=Path, help="folder of cifar10-NETWORK.th; random without")
    parser.add_argument("--formats", nargs="*", default=["cp"], help="of single layers")
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[6, 8, 10, 12, 14, 16, 18, 20, 22, 26, 30, 32]
    )
    parser.add_argument("--batch", type=int, default=64, help="of single layers")
    parser.add_argument("--runs", type=int, default=15, help="timed passes")
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced, or CSV file")
    options = parser.parse_args()
    torch.manual_seed(0)
    lines = [
        "| network | format | parameters kept | dense, ms | dense, int8 | contracted | in stages "
        "| each layer's faster form | in stages, filled up | each layer's faster form, filled up "
        "| file, filled up | opened in, ms | filled up |",
        f"|---|---|---:|{'---:|' * 10}",
    ]
    for task in options.tasks:
        print(task, file=sys.stderr, flush=True)
        lines.append(network_row(task, options.runs, options.checkpoints))
    if options.formats:
        lines += [
            "",
            "| layer | format | rank | dense, ms | in stages | filled up | ratio |",
            "|---|---|---:|---:|---:|---:|---:|",
        ]
        for tensor_format in options.formats:
            lines += layer_rows(tensor_format, options.ranks, options.batch, options.runs)
    table = "\n".join(lines)
    text = f"`{shown_command(sys.argv)}`\n\n{hardware_line('onnxruntime')}\n\n{table}"
    print(text)
    if options.output:
        write_section(options.output, "bench_forms", "Forms of the same cores", text)


if __name__ == "__main__":
    main()
