"""Compress networks that others made, as the ONNX files that they are.

    python scripts/bench_onnx.py --folder FOLDER --networks pitch --budgets 0.7 0.5 --output FILE.md

The folder holds pitch.onnx, file-types.onnx, music.onnx and prepare_inputs.py, which makes inputs and scores
outputs. For each network the script makes a table: the original, its int8 version by onnxruntime's
quantiser, and compressed files at each budget, in float32 and with integers, by each selector. Times are
those of one thread, in processor time, taken in turns with the original; the score is that of inputs that
nothing was fitted to.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnxruntime

from rankrl import DecompositionOptions, SearchOptions, compress
from rankrl.errors import RankrlError
from rankrl.onnx.export.int8 import quantise_onnx
from rankrl.onnx.graph import OnnxNetwork, split_inputs
from rankrl.onnx.graph.rewrite import writable_formats
from rankrl.options.timing import LatencyOptions
from rankrl.report.markdown import shown_command, write_section
from rankrl.report.provenance import hardware_line
from rankrl.timing.latency import LatencyComparison, compare_latency
from rankrl.verify.agreement import agreement, agreement_score

Array = np.ndarray[Any, Any]
_RUN_AT_ONCE = 20


@dataclass(frozen=True)
class Case:
    """A network with inputs.

    Attributes:
        fitted: What layers are fitted to.
        tested: What scores are measured on.
        score: From the output on `tested` to a number; `None` where the score is the agreement.
        batch: Inputs of a timed pass.
    """

    fitted: Array
    tested: Array
    score: Callable[[Array], float] | None
    batch: int


def cases(prepare: ModuleType, names: list[str], count: int) -> dict[str, Case]:
    """Make the inputs of each network."""
    made = {}
    for name in names:
        generator = np.random.default_rng(0)
        if name == "pitch":
            frames, hz = prepare.pitch_frames(2 * count, generator)
            score = lambda output, hz=hz[count:]: prepare.pitch_score(output, hz)  # noqa: E731
            made[name] = Case(frames[:count], frames[count:], score, 16)
        elif name == "file-types":
            roots = dict.fromkeys(sysconfig.get_paths()[key] for key in ("stdlib", "purelib"))
            data, labels = prepare.file_bytes(2 * count, generator, roots)
            half = len(data) // 2
            score = lambda output, labels=labels[half:]: prepare.label_score(output, labels)  # noqa: E731
            made[name] = Case(data[:half], data[half:], score, 4)
        elif name == "music":
            audio = prepare.music(max(8, count // 20), generator)
            half = len(audio) // 2
            made[name] = Case(audio[:half], audio[half:], None, 1)
    return made


def scored(path: Path, original: Path, case: Case) -> float:
    """Return the score of a file."""
    if case.score is None:
        name = OnnxNetwork.load(original).inputs[0].name
        feeds = [{name: each[None]} for each in case.tested]
        networks = [OnnxNetwork.load(each).session() for each in (original, path)]
        return agreement_score(agreement(*networks, feeds))
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    parts = np.array_split(case.tested, max(1, len(case.tested) // _RUN_AT_ONCE))
    return case.score(np.concatenate([session.run(None, {name: part})[0] for part in parts]))


def row(label: str, path: Path, times: LatencyComparison | None, score: float) -> str:
    """Return a row of the table."""
    size = f"{path.stat().st_size / 1e6:.2f} MB"
    if times is None:
        return f"| {label} | {size} | – | 1 | {score:.4f} |"
    took = f"{times.compressed.median_ms:.2f} of {times.baseline.median_ms:.2f} ms"
    return f"| {label} | {size} | {took} | {times.ratio:.2f} | {score:.4f} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--networks", nargs="+", default=["pitch", "file-types", "music"])
    parser.add_argument("--measure", choices=("latency", "params", "macs", "bytes"), default="latency")
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.7, 0.5])
    parser.add_argument("--precisions", nargs="+", default=["float32", "int8"])
    parser.add_argument("--mixed-only", action="store_true", help="no further rows in float32 alone")
    parser.add_argument("--decomposition", nargs="+", default=None)
    parser.add_argument("--count", type=int, default=600, help="inputs to fit to, and as many to score on")
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--selectors", nargs="+", default=["greedy"])
    parser.add_argument("--episodes", type=int, default=50, help="plans that a search scores")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--cache", type=Path, default=None)
    parser.add_argument("--output", type=Path, help="Markdown file whose sections are replaced")
    options = parser.parse_args()
    spec = importlib.util.spec_from_file_location("prepare_inputs", options.folder / "prepare_inputs.py")
    if spec is None or spec.loader is None:
        sys.exit(f"{options.folder} has no prepare_inputs.py")
    prepare = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(prepare)
    with tempfile.TemporaryDirectory() as scratch:
        for name, case in cases(prepare, options.networks, options.count).items():
            text = "\n".join(table(name, case, options, Path(scratch)))
            if options.output:
                write_section(options.output, f"bench_onnx_{name}", f"The ONNX file {name}.onnx", text)


def table(name: str, case: Case, options: argparse.Namespace, scratch: Path) -> list[str]:
    """Print the table of one network row by row, and return it."""
    original, target = options.folder / f"{name}.onnx", scratch / "small.onnx"
    network = OnnxNetwork.load(original)
    feed = {network.inputs[0].name: case.tested[: case.batch]}
    timed = {"batch": case.batch, "threads": 1, "runs": options.runs}
    lines: list[str] = []

    def add(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    shortened = {str(options.folder): "FOLDER"}
    command = shown_command(sys.argv, shortened=shortened, dropped=("--cache", "--output"))
    add(f"`{command}`: {name}, batches of {case.batch}, {hardware_line()}, load average")
    add(f"{os.getloadavg()[0]:.1f}.\n")
    add("| | file | time | faster | score |\n|---|---:|---:|---:|---:|")
    add(row("original", original, None, scored(original, original, case)))
    integers = scratch / "int8.onnx"
    try:
        quantise_onnx(original, integers, split_inputs(case.fitted, network).calibration[:8])
        times = compare_latency(original, integers, **timed, inputs=feed)
        add(row("int8 by onnxruntime", integers, times, scored(integers, original, case)))
    except RankrlError as error:
        add(f"| int8 by onnxruntime | {_told(error)} | | | |")
    ways = [tuple(options.precisions)]
    if "float32" in options.precisions and len(options.precisions) > 1 and not options.mixed_only:
        ways.insert(0, ("float32",))
    for precisions, budget, selector in itertools.product(ways, options.budgets, options.selectors):
        label = f"{options.measure}={budget}, {' and '.join(precisions)}"
        if selector != "greedy":
            label += f", {selector}"
        try:
            result = compress(
                original,
                case.fitted,
                target,
                **{options.measure: budget},
                decomposition=layers_of(options, precisions),
                selector=selector,
                search=SearchOptions(episodes=options.episodes),
                timing=LatencyOptions(batch=case.batch, runs=options.runs),
                cache=options.cache,
            )
        except (RankrlError, ValueError) as error:
            add(f"| {label} | {_told(error)} | | | |")
            continue
        add(row(label, result.path, result.latency, scored(target, original, case)))
    return lines


def layers_of(options: Any, precisions: Sequence[str]) -> DecompositionOptions:
    """Return what may become of nodes: in the formats that were asked for, or all that nodes can compute."""
    formats = tuple(options.decomposition or writable_formats())
    return DecompositionOptions(
        format="auto", formats=formats, precisions=tuple(precisions), candidates=options.candidates
    )


def _told(error: Exception) -> str:
    """Return what a row says of a failure, without paths and what they lead to."""
    return " ".join(str(error).replace("|", "/").split())[:160]


if __name__ == "__main__":
    main()
