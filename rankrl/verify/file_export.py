"""Export networks to files that are verified, timed and scored, in several runtimes next to the original.

The integers of a file are compared with those that PyTorch simulates.
"""

from __future__ import annotations

import logging
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from torch import nn

from decomposition import (
    CompressionPlan,
    DecompositionError,
    Inputs,
    LayerPlan,
    LayerSpec,
    Quantise,
    build_structure,
    calibrate_ranges,
    fingerprint,
)
from decomposition.cache import Cache, digest
from decomposition.network.inputs import InputShape, random_batch, rows
from decomposition.network.layers import OPAQUE_KINDS
from decomposition.network.rounding import REDUCED_BITS
from decomposition.progress import logged_seconds
from rankrl.data import Preprocessing
from rankrl.device import processor_name
from rankrl.errors import DefectError, ExportError, NonFiniteError
from rankrl.files import write_atomically
from rankrl.models.classifiers import behaviour_digest
from rankrl.onnx.export import export_network, export_onnx, quantise_onnx
from rankrl.onnx.export.int8 import nncf_obstacle, quantise_with_nncf
from rankrl.onnx.export.static_quantiser import as_in_file, reduces
from rankrl.onnx.graph.prepared_file import failing_names
from rankrl.onnx.graph_edits import Array, opset_of
from rankrl.onnx.protobuf import load_model, save_model
from rankrl.onnx.runtimes import Batch, Session, get_runtime, open_session
from rankrl.options.timing import DEFAULT_RUNTIME, LatencyOptions
from rankrl.timing import TimedTurns, compare_latency, time_in_turns
from rankrl.timing.form import fastest_form
from rankrl.timing.latency import LatencyComparison
from rankrl.verify.agreement import OutputAgreement
from rankrl.verify.fidelity import network_outputs

_INPUTS = 8
NO_CACHE = Cache(None)
_METHOD = 2
"""Version of the way the dense network is exported; files of another version are not taken up."""
_LARGEST_ERROR, _SLACK, _TIMES = 0.05, 0.02, 3  # relative errors, and their ratio in `allowed_error`

log = logging.getLogger(__name__)


def allowed_error(simulated: float, file: float) -> float:
    """Return the largest error allowed between an integer file and its simulation.

    Two roundings drift apart by about as much as rounding changes the outputs; several times as much is a
    fault.
    """
    return max(_LARGEST_ERROR, _TIMES * min(simulated, file) + _SLACK)


def unlike_file(model: nn.Module, specs: Sequence[LayerSpec], baseline: Path, files: FileInputs) -> list[str]:
    """Return the layers whose integers PyTorch does not simulate as the file has them."""
    usable = [spec.name for spec in specs if spec.refusal is None and spec.kind not in OPAQUE_KINDS]
    bits = REDUCED_BITS if reduces(files.options.reduce_range) else 8
    batch, feed = _first(next(iter(files.ranges()))), _first_arrays(files.feeds())
    exact = list(network_outputs(model, batch).values())
    reason = ""

    def in_integers(names: Sequence[str]) -> CompressionPlan:
        layers = [LayerPlan(spec.name, (Quantise(bits),) if spec.name in names else ()) for spec in specs]
        return CompressionPlan(tuple(layers), fingerprint(specs), files.shape)

    def fails(names: Sequence[str]) -> bool:
        nonlocal reason
        weights = {f"{name}.weight" for name in names}
        try:
            simulated = build_structure(model, in_integers(names))
            calibrate_ranges(simulated, [batch])
            path = Path(folder) / "integers.onnx"
            reduced = bits == REDUCED_BITS
            quantise_onnx(baseline, path, [feed], weights=weights, reduce_range=reduced, fitted=False)
            found = open_session(path).run(feed)
        except (DecompositionError, DefectError, ExportError) as error:
            reason = str(error)
            return True
        reason = _difference(exact, list(network_outputs(simulated, batch).values()), found)
        return bool(reason)

    with tempfile.TemporaryDirectory() as folder, logged_seconds(log, "integers in PyTorch and in the file"):
        return failing_names(
            usable,
            fails,
            lambda name: log.warning(
                "layer %r does not compute in integers, for PyTorch does not simulate them: %s", name, reason
            ),
        )


def _difference(exact: Sequence[Array], simulated: Sequence[Array], found: Sequence[Array]) -> str:
    """Return a message if a file differs from its simulation by more than rounding explains."""
    for right, own, other in zip(exact, simulated, found, strict=True):
        if right.dtype.kind != "f" or not right.size:
            continue
        apart, moved, file = (_error(a, b, right) for a, b in ((own, other), (own, right), (other, right)))
        if not apart <= allowed_error(moved, file):  # also true of NaN
            return (
                f"the file is off by {apart:.3f} of the outputs' spread, where rounding moves the file by "
                f"{file:.3f} and the simulation by {moved:.3f}"
            )
    return ""


def _error(first: Array, second: Array, exact: Array) -> float:
    """Return |first - second| / |exact - its mean|."""
    known = exact.astype(np.float64)
    spread = np.linalg.norm(known - known.mean(axis=0, keepdims=known.ndim > 0))
    return float(np.linalg.norm(first.astype(np.float64) - second) / max(spread, np.finfo(np.float32).tiny))


def _first(batch: Inputs) -> Inputs:
    return rows(batch, slice(_INPUTS))


def _first_arrays(feeds: Iterable[Batch]) -> Batch:
    """Return the first inputs of a file, whose batches may be smaller than the network's."""
    taken: list[Mapping[str, Array]] = []
    for feed in feeds:
        taken.append(feed if isinstance(feed, Mapping) else {"": feed})
        if sum(len(next(iter(each.values()))) for each in taken) >= _INPUTS:
            break
    joined = {name: np.concatenate([each[name] for each in taken])[:_INPUTS] for name in taken[0]}
    return joined.get("", joined)


class FileInputs(ABC):
    """Inputs of a network's file: they calibrate, verify, time and score it. Also how it is exported."""

    shape: InputShape
    options: LatencyOptions
    preprocessing: Preprocessing | None = None

    @abstractmethod
    def ranges(self) -> Iterator[Inputs]:
        """Yield the inputs that set ranges of activations, as the network takes them."""

    @abstractmethod
    def feeds(self) -> Iterator[Batch]:
        """Yield the same inputs as the file takes them."""

    @abstractmethod
    def verified(
        self, network: nn.Module, path: Path, scratch: Path, runtime: str = DEFAULT_RUNTIME
    ) -> tuple[float, float | None]:
        """Compare a file with its network; return the largest difference, and the agreement of integers."""

    @abstractmethod
    def score(self, baseline: Path) -> Callable[[Session], float]:
        """Return the score of an open file in any runtime, on held-out inputs."""

    @abstractmethod
    def worth(self, baseline: Path, path: Path) -> dict[str, float]:
        """Return the scores of the dense network in integers, by their names in metrics.json."""

    def agreement(self, baseline: Path, path: Path) -> list[OutputAgreement]:
        """Return the agreement of each output with the original's; empty where labels score a network."""
        return []

    def scores(self, path: Path) -> dict[str, float]:
        """Return further measurements of a finished file, by their names in metrics.json."""
        return {}

    @property
    def identity(self) -> object:
        """Everything about the inputs on which scores depend, for keys of a cache."""
        return None

    @property
    def timed(self) -> Batch | None:
        """The batch that files are timed on; `None` for random numbers."""
        return None

    @property
    def form(self) -> dict[str, Any]:
        """How files are exported, as arguments of `export_onnx`."""
        options = self.options
        return {
            "opset": options.opset,
            "channel_block": options.channel_block,
            "preprocessing": self.preprocessing,
            "dynamic_axes": options.dynamic_axes,
        }


def export_dense(dense: nn.Module, files: FileInputs, folder: Path, cache: Cache = NO_CACHE) -> Path:
    path, key = folder / "dense.onnx", ""
    if cache.folder is not None:
        key = digest(behaviour_digest(dense, random_batch(dense, files.shape, 2)), files.form, _METHOD)

    def write(path: Path) -> None:
        export_onnx(dense, path, files.shape, progress=False, **files.form)
        files.verified(dense, path, folder)

    with logged_seconds(log, "export of the dense network"):
        cache.file("dense", key, path, write)
    return path


def int8_numbers(
    baseline: Path, files: FileInputs, scratch: Path, cache: Cache = NO_CACHE
) -> dict[str, Any] | None:
    """Quantise the dense network to 8-bit integers and measure it against the float32 file."""
    options, key = files.options, ""
    if cache.folder is not None:
        here = [processor_name(), onnxruntime.__version__]
        key = digest(baseline.read_bytes(), files.identity, options.reduce_range, options.batch, here)

    def measured(path: Path) -> tuple[dict[str, Any], LatencyComparison]:
        def write(path: Path) -> None:
            quantise_onnx(baseline, path, files.feeds(), reduce_range=options.reduce_range)

        cache.file("dense-int8", key, path, write)
        worth = cache.value("dense-int8", key, lambda: files.worth(baseline, path))
        return worth, compare_latency(baseline, path, inputs=files.timed, **options.timing)

    return rival_numbers(scratch / "dense-int8.onnx", measured)


def export_file(
    network: nn.Module,
    baseline: Path,
    files: FileInputs,
    path: Path,
    metadata: Mapping[str, str],
    scratch: Path,
) -> tuple[dict[str, Any], LatencyComparison]:
    """Export a network, verify the file on real inputs before it gets its name, and time it."""
    options, timing, form = files.options, files.options.timing, files.form
    calibrate_ranges(network, files.ranges())
    in_file = as_in_file(network, options.reduce_range, files.ranges())
    fastest, execution, timed = fastest_form(
        in_file, files.shape, scratch, timing=timing, timed=files.timed, **form
    )
    unverified = scratch / "unverified.onnx"
    if timed is None:
        form |= {"metadata": metadata, "reduce_range": options.reduce_range}
        version = export_network(fastest, unverified, files.shape, files.feeds(), **form).opset
    else:
        model = load_model(timed)
        model.metadata_props.update({**metadata, **model.metadata_props})
        save_model(model, unverified)
        version = opset_of(model)
    difference, agreement = files.verified(in_file, unverified, scratch)
    write_atomically(path, unverified.read_bytes())
    unverified.unlink()
    scores = files.scores(path)
    latency = compare_latency(baseline, path, inputs=files.timed, **timing)
    warn_if_busy(latency.busy)
    section = {
        "max_abs_difference": difference,
        "agreement": agreement,
        "execution": execution,
        **scores,
        "latency_ms": latency.compressed.ms,
        "latency_median_ms": latency.compressed.median_ms,
        "latency_high_ms": latency.compressed.high_ms,
        "baseline_latency_ms": latency.baseline.ms,
        "baseline_latency_median_ms": latency.baseline.median_ms,
        "baseline_latency_high_ms": latency.baseline.high_ms,
        "latency_ratio_low": latency.ratio_low,
        "latency_ratio_high": latency.ratio_high,
        "clock": latency.compressed.clock,
        "busy": latency.busy,
        "runtime": timing["runtime"],
        "batch": timing["batch"],
        "threads": timing["threads"],
        "file_bytes": path.stat().st_size,
        "baseline_file_bytes": baseline.stat().st_size,
        "opset": version,
        "preprocess": files.preprocessing is not None,
    }
    return section, latency


def rival_numbers(
    path: Path, measured: Callable[[Path], tuple[dict[str, Any], LatencyComparison]]
) -> dict[str, Any] | None:
    """Measure the dense network in 8-bit integers: the section `dense_int8` of metrics.json."""
    try:
        with logged_seconds(log, "the dense network in 8-bit integers"):
            worth, times = measured(path)
    except (ExportError, NonFiniteError) as error:
        log.warning("the dense network in 8-bit integers is not measured: %s", error)
        return None
    size = path.stat().st_size
    path.unlink()
    return {
        **worth,
        "latency_ratio": times.ratio,
        "latency_ratio_low": times.ratio_low,
        "latency_ratio_high": times.ratio_high,
        "file_bytes": size,
    }


def warn_if_busy(busy: str | None) -> None:
    """Log a warning where times were taken on a busy machine; `busy` is the evidence."""
    if busy is not None:
        log.warning(
            "the machine was busy while latency was measured: %s. Measure again when it is quiet: "
            "with task=export, or overwrite=True in Python",
            busy,
        )


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
    return f"{file}_" if file else ""
