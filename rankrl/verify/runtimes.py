"""The finished files in several runtimes: does each compute the same, and what is faster where."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from rankrl.data import ImageData
from rankrl.onnx.errors import ExportError
from rankrl.onnx.export import quantise_onnx
from rankrl.onnx.export.weight_range import as_in_file
from rankrl.onnx.runtimes import DEFAULT_RUNTIME, get_runtime, open_session
from rankrl.timing import TimedTurns, time_in_turns
from rankrl.training.networks import range_images
from rankrl.verify.file_export import warn_if_busy
from rankrl.verify.measure import (
    COMPARED_BATCH,
    ExportOptions,
    compared_images,
    file_batches,
    range_batches,
    verified,
)

log = logging.getLogger(__name__)


def runtime_numbers(
    network: nn.Module,
    baseline: Path,
    path: Path,
    data: ImageData,
    options: ExportOptions,
    *,
    known: Mapping[str, Any],
    scratch: Path,
) -> dict[str, dict[str, Any]] | None:
    """Verify and time the exported file, the dense one and the dense one in integers in every runtime.

    All are timed in the same turns. A runtime that cannot run a file, or computes something else, is warned
    of and not timed; `path` itself stays as it is, verified in onnxruntime.

    Args:
        network: The exported network in PyTorch, its ranges set.
        baseline: ONNX file of the dense network.
        path: ONNX file of the exported network.
        data: The dataset.
        options: The runtimes, preprocessing and timing.
        known: The section `onnx` of metrics.json: how far `path` was verified in onnxruntime.
        scratch: Folder for files that are of no use later.

    Returns:
        The section `runtimes` of metrics.json, by runtime; None where there is only one, whose numbers `onnx`
        holds already.
    """
    if len(options.runtimes) == 1:
        return None
    files = {"baseline_latency": baseline, "latency": path}
    integers = _dense_integers(baseline, data, options, scratch)
    if integers is not None:
        files["dense_int8_latency"] = integers
    expected = None if integers is None else _classes(integers, DEFAULT_RUNTIME, data, options)
    in_file = as_in_file(network, options.reduce_range, range_images(data))
    section: dict[str, dict[str, Any]] = {}
    for name in options.runtimes:
        section[name] = {"version": get_runtime(name).version}
        try:
            if name == DEFAULT_RUNTIME:
                difference, agreement = known["max_abs_difference"], known["agreement"]
            else:
                difference, agreement = verified(in_file, path, data, scratch, options, runtime=name)
            section[name] |= {"max_abs_difference": difference, "agreement": agreement}
            open_session(baseline, runtime=name)
            if integers is not None and expected is not None:
                found = expected if name == DEFAULT_RUNTIME else _classes(integers, name, data, options)
                section[name]["dense_int8_agreement"] = float((found == expected).mean())
        except ExportError as error:
            if name == DEFAULT_RUNTIME:  # it ran them a moment ago
                raise
            log.warning("the files are not timed in %s: %s", name, error)
            section[name]["failed"] = str(error)
    keys = [(name, key) for name in section if "failed" not in section[name] for key in files]
    timed = time_in_turns([(name, files[key]) for name, key in keys], **options.timing)
    for name, key in keys:
        section[name] |= _times(timed, keys, name, key)
    warn_if_busy(timed.busy)
    if integers is not None:
        integers.unlink()
    return section


def _times(timed: TimedTurns, keys: Sequence[tuple[str, str]], runtime: str, key: str) -> dict[str, Any]:
    """Return what metrics.json says of a file's time in a runtime.

    Args:
        timed: The times of all files.
        keys: Runtime and file at each position.
        runtime: The runtime.
        key: The file.
    """
    position = keys.index((runtime, key))
    latency = timed.latencies[position]
    others = {
        "ratio": (runtime, "baseline_latency"),  # of the dense network's time to this one
        "runtime_ratio": (DEFAULT_RUNTIME, key),  # of the file's time in onnxruntime to this one
    }
    found = {"clock": latency.clock, "busy": timed.busy, f"{key}_ms": latency.median_ms}
    for name, other in others.items():
        if other != (runtime, key):
            comparison = timed.compare(keys.index(other), position)
            found[f"{key}_{name}"] = comparison.ratio
            found[f"{key}_{name}_low"] = comparison.ratio_low
            found[f"{key}_{name}_high"] = comparison.ratio_high
    return found


def _dense_integers(baseline: Path, data: ImageData, options: ExportOptions, scratch: Path) -> Path | None:
    """Return the dense network's file in 8-bit integers, if it is asked for and can be made."""
    if not options.int8:
        return None
    try:
        path, batches = scratch / "dense-int8.onnx", range_batches(data, options)
        return quantise_onnx(baseline, path, batches, reduce_range=options.reduce_range)
    except ExportError:  # `int8_numbers` has said so
        return None


def _classes(path: Path, runtime: str, data: ImageData, options: ExportOptions) -> np.ndarray:
    """Return the class that a file in a runtime gives each of the compared images, shape (images,)."""
    session = open_session(path, runtime=runtime)
    walk = file_batches(compared_images(data), COMPARED_BATCH, data, options)
    return np.concatenate([session.run(batch.numpy())[0].argmax(1) for batch, _ in walk])
