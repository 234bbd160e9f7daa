r"""What is fastest where: kinds of layers, formats and precisions in several runtimes and on devices.

    python scripts/bench_runtimes.py --kit runs/layers
    cd runs/layers && python measure.py --out x86.json && node measure.mjs --out web.json
    python scripts/bench_runtimes.py --tables runs/layers/x86.json runs/layers/web.json \
        --runtimes openvino --output bench_runtimes.csv

The first command writes a timing kit of single layers, which is measured wherever something is to be known of
(docs/devices.md); the last one compares its tables, and times the same layers here in other runtimes. Every
layer stands between neighbours of its own precision. Formats keep half of its multiply-accumulates.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from decomposition import Quantise, inspect_layers
from decomposition.candidates.listing import CandidateLister
from decomposition.network.kinds import is_decomposable_module
from decomposition.operations import Operation
from rankrl.kits.file_group import Stopwatch
from rankrl.kits.kit_writer import KitWriter
from rankrl.kits.times_file import TimesFile
from rankrl.plan_search.standard_plans import uniform_plans
from rankrl.report.markdown import shown_command, write_section
from rankrl.timing.layer_timing import LayerTimer
from rankrl.timing.local_stopwatch import LocalStopwatch
from rankrl.timing.passes import measuring_conditions

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "pointwise, 64 channels, 28x28": (nn.Conv2d(64, 64, 1), (64, 28, 28)),
    "pointwise, 256 channels, 14x14": (nn.Conv2d(256, 256, 1), (256, 14, 14)),
    "3x3, 16 channels, 32x32": (nn.Conv2d(16, 16, 3, padding=1), (16, 32, 32)),
    "3x3, 64 channels, 28x28": (nn.Conv2d(64, 64, 3, padding=1), (64, 28, 28)),
    "3x3, 256 channels, 14x14": (nn.Conv2d(256, 256, 3, padding=1), (256, 14, 14)),
    "depthwise 3x3, 64 channels, 28x28": (nn.Conv2d(64, 64, 3, padding=1, groups=64), (64, 28, 28)),
    "linear, 1024 to 1024": (nn.Linear(1024, 1024), (1024,)),
}
FORMATS = ("cp", "tucker", "spatial_svd")
DENSE, INTEGERS = "dense", "dense int8"
COLUMNS = (DENSE, INTEGERS, *(f"{name}{end}" for name in FORMATS for end in ("", " int8")))
SHARE = 0.5
"""Of its multiply-accumulates that a format keeps."""
BATCH = 1


def operations(layer: nn.Module, shape: tuple[int, ...]) -> dict[str, Sequence[Operation]]:
    """Return what is timed of a layer, by column; only dense weights of one that cannot be decomposed."""
    network = nn.Sequential(layer)
    ways: dict[str, Sequence[Operation]] = {DENSE: (), INTEGERS: (Quantise(),)}
    if inspect_layers(network, shape)[0].refusal is not None:
        return ways
    lister = CandidateLister.of_network(network, shape, FORMATS, precisions=("float32", "int8"), multiple=8)
    site = lister.candidates("0", limit=64)
    plans = {
        title.removeprefix("uniform "): site.candidates[plan[0]].operations
        for title, plan in uniform_plans([site], "macs", SHARE).items()
    }
    return ways | {title: plan for title, plan in plans.items() if len(plan) > title.endswith("int8")}


def layer_times(stopwatch: Stopwatch, runs: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of every layer by column."""
    timer = LayerTimer(batch=BATCH, threads=1, runs=runs, stopwatch=stopwatch)
    times = {}
    for name, (layer, shape) in LAYERS.items():
        assert is_decomposable_module(layer)
        ways, spec = operations(layer, shape), inspect_layers(nn.Sequential(layer), shape)[0]
        times[name] = dict(
            zip(ways, timer.candidates(layer, spec, list(ways.values())).tolist(), strict=True)
        )
    return times


def table(machines: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """Return a Markdown table: a row for each layer and machine, and what is fastest."""
    lines = [
        f"| layer | where | dense, ms | {' | '.join(COLUMNS[1:])} | fastest |",
        f"|---|---|{'---:|' * len(COLUMNS)}---|",
    ]
    for layer in LAYERS:
        for number, times in enumerate(machines.values(), 1):
            row = times[layer]
            shares = [f"{row[each] / row[DENSE]:.2f}" if each in row else "" for each in COLUMNS[1:]]
            cells = [layer, str(number), f"{row[DENSE]:.3f}", *shares, min(row, key=lambda name: row[name])]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Write a kit, or compare its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--kit", type=Path, help="folder to write the kit to")
    parser.add_argument("--tables", type=Path, nargs="*", default=[], help="what it measured")
    parser.add_argument("--runtimes", nargs="*", default=[], help="runtimes to time the layers in here")
    parser.add_argument("--runs", type=int, default=30, help="timed passes of each file")
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced, or CSV file")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.kit is not None:
        kit = KitWriter(options.kit, {"batch": str(BATCH)}, threads=1)
        layer_times(kit, options.runs)
        print(kit.finish([]))
        return
    machines = {}
    for path in options.tables:
        times = TimesFile.load(path)
        machines[times.conditions] = layer_times(times, options.runs)
    for runtime in options.runtimes:
        stopwatch = LocalStopwatch(1, runtime)
        machines[measuring_conditions(BATCH, 1, runtime)] = layer_times(stopwatch, options.runs)
    where = "\n".join(f"{number}. {conditions}" for number, conditions in enumerate(machines, 1))
    note = "Times of layers as shares of the dense one's in float32; what is not there cannot be had."
    text = f"`{shown_command(sys.argv)}`\n\n{where}\n\n{note}\n\n{table(machines)}"
    print(text)
    if options.output is not None:
        write_section(options.output, "bench_runtimes", "What is fastest where", text)


if __name__ == "__main__":
    main()
