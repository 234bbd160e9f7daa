"""Score and time finished files in several runtimes, next to quantised versions of the original."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from rankrl.errors import ExportError
from rankrl.onnx.export import quantise_onnx
from rankrl.onnx.export.int8 import nncf_obstacle, quantise_with_nncf
from rankrl.onnx.export.static_quantiser import as_in_file
from rankrl.onnx.runtimes import DEFAULT_RUNTIME, Batch, Session, get_runtime, open_session
from rankrl.options.timing import LatencyOptions
from rankrl.timing import TimedTurns, time_in_turns
from rankrl.verify.file_export import FileInputs, warn_if_busy

log = logging.getLogger(__name__)

ORIGINAL, FINISHED, DENSE_INT8, NNCF_INT8 = "baseline", "", "dense_int8", "nncf_int8"
"""Names of the files in metrics.json; those of the finished one have no prefix."""
_Key = tuple[str, str]
"""A runtime and a file."""


@dataclass(frozen=True)
class ComparedFiles:
    """A finished file, its original, and the score and inputs of both in any runtime."""

    baseline: Path
    path: Path
    options: LatencyOptions
    calibration: Callable[[], Iterable[Batch]]
    score: Callable[[Session], float]
    inputs: Batch | None = None
    cut: Any = None


def runtime_numbers(
    files: ComparedFiles,
    scratch: Path,
    verify: Callable[[str], Mapping[str, Any]] = lambda _: {},
    *,
    integers: bool = True,
) -> dict[str, dict[str, Any]] | None:
    """Score and time the finished file and the original in every runtime, the latter in integers, too."""
    options = files.options
    if len(options.compared_runtimes) == 1:
        return None
    section: dict[str, dict[str, Any]] = {}
    with _rivals(files, scratch, integers=integers) as rivals:
        paths: dict[_Key, Path] = {}
        for name in options.compared_runtimes:
            section[name] = {"version": get_runtime(name).version}
            try:
                section[name] |= verify(name)
                runs = _scored(files, rivals, name, section[name])
            except ExportError as error:
                if name in (DEFAULT_RUNTIME, options.runtime):
                    raise
                log.warning("the files are not timed in %s: %s", name, error)
                section[name]["failed"] = str(error)
                continue
            paths |= {(name, file): path for file, path in runs.items()}
        keys = list(paths)
        turns = [(name, paths[name, file]) for name, file in keys]
        timed = time_in_turns(turns, inputs=files.inputs, **options.turns)
    for name, file in keys:
        section[name] |= _times(timed, keys, (name, file))
    for file in dict.fromkeys(file for _, file in keys):
        times = {name: section[name][f"{_before(file)}latency_ms"] for name, each in keys if each == file}
        section[min(times, key=lambda name: times[name])].setdefault("fastest", []).append(file or "exported")
    warn_if_busy(timed.busy)
    return section


def module_runtimes(
    network: nn.Module,
    baseline: Path,
    path: Path,
    inputs: FileInputs,
    *,
    known: Mapping[str, Any],
    scratch: Path,
) -> dict[str, dict[str, Any]] | None:
    """Return `runtime_numbers` of a module's file, which is verified in every runtime."""
    options = inputs.options
    if len(options.compared_runtimes) == 1:
        return None
    in_file = as_in_file(network, options.reduce_range, inputs.ranges())

    def verify(runtime: str) -> dict[str, Any]:
        if runtime == DEFAULT_RUNTIME:
            return {name: known[name] for name in ("max_abs_difference", "agreement")}
        difference, agreement = inputs.verified(in_file, path, scratch, runtime)
        return {"max_abs_difference": difference, "agreement": agreement}

    files = ComparedFiles(baseline, path, options, inputs.feeds, inputs.score(baseline), inputs.timed)
    return runtime_numbers(files, scratch, verify, integers=options.int8)


@contextmanager
def _rivals(files: ComparedFiles, scratch: Path, *, integers: bool) -> Iterator[dict[str, Path]]:
    """Yield the quantised versions of the original, by name; warn of those that cannot be made."""
    made: dict[str, Path] = {}
    nncf = integers and any(get_runtime(name).runs_nncf for name in files.options.compared_runtimes)
    if nncf and nncf_obstacle() is not None:
        log.info("%s; its row is left out", nncf_obstacle())
        nncf = False
    try:
        if integers:
            with _left_out("onnxruntime"):
                made[DENSE_INT8] = quantise_onnx(
                    files.baseline,
                    scratch / "dense-int8.onnx",
                    files.calibration(),
                    reduce_range=files.options.reduce_range,
                    cut=files.cut,
                )
        if nncf:
            with _left_out("NNCF"):
                target = scratch / "nncf-int8.xml"
                made[NNCF_INT8] = quantise_with_nncf(files.baseline, target, files.calibration())
        yield made
    finally:
        for name in ("dense-int8.onnx", "nncf-int8.xml", "nncf-int8.bin"):
            (scratch / name).unlink(missing_ok=True)


@contextmanager
def _left_out(quantiser: str) -> Iterator[None]:
    """Log the error of a quantiser that fails, and go on."""
    try:
        yield
    except ExportError as error:
        log.warning("the original in 8-bit integers by %s is not compared: %s", quantiser, error)


def _scored(
    files: ComparedFiles, rivals: Mapping[str, Path], runtime: str, entry: dict[str, Any]
) -> dict[str, Path]:
    """Score the files in a runtime; return those that run there. Rivals that do not are left out."""
    paths = {ORIGINAL: files.baseline, FINISHED: files.path}
    nncf = get_runtime(runtime).runs_nncf
    paths |= {name: path for name, path in rivals.items() if name != NNCF_INT8 or nncf}
    for name, path in list(paths.items()):
        try:
            session = open_session(path, threads=files.options.threads, runtime=runtime)
            entry[f"{_before(name)}score"] = files.score(session)
        except ExportError as error:
            if name in (ORIGINAL, FINISHED):
                raise
            log.warning("%s in 8-bit integers is not compared in %s: %s", name, runtime, error)
            del paths[name]
    return paths


def _times(timed: TimedTurns, keys: list[_Key], key: _Key) -> dict[str, Any]:
    """Return the entries of metrics.json for a file's time in a runtime."""
    (runtime, file), position = key, keys.index(key)
    latency, before = timed.latencies[position], _before(file)
    others = {
        "ratio": (runtime, ORIGINAL),  # of the original's time to this one
        "runtime_ratio": (DEFAULT_RUNTIME, file),  # of the file's time in onnxruntime to this one
    }
    entry = {"clock": latency.clock, "busy": timed.busy, f"{before}latency_ms": latency.ms}
    for name, other in others.items():
        if other != key and other in keys:
            comparison = timed.compare(keys.index(other), position)
            entry[f"{before}latency_{name}"] = comparison.ratio
            entry[f"{before}latency_{name}_low"] = comparison.ratio_low
            entry[f"{before}latency_{name}_high"] = comparison.ratio_high
    return entry


def _before(file: str) -> str:
    """Return the prefix of a file's entries in metrics.json."""
    return f"{file}_" if file else ""
