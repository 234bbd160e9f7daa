"""Ranges of tensors on calibration inputs, of which few are run at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime

from rankrl.onnx.runtimes.onnxruntime_cpu import session_options

Array = np.ndarray[Any, Any]
Feed = Mapping[str, Array]
Cut = Callable[[Feed, int], Iterable[Feed]]
"""Cuts a batch into smaller ones of so many inputs."""
Range = tuple[np.float32, np.float32]

_BYTES = 2**27
"""Of tensors that are held at a time, where one input does not need more."""


def collect_ranges(
    model: onnx.ModelProto, names: Sequence[str], batches: Sequence[Feed], cut: Cut
) -> dict[str, Range]:
    """Return the smallest and the largest number of tensors on calibration inputs.

    Args:
        model: The network.
        names: Names of float tensors.
        batches: Calibration inputs.
        cut: Cuts batches into smaller ones.
    """
    ranges = dict.fromkeys(names, (np.float32(np.inf), np.float32(-np.inf)))
    for name, values in _tensors(model, names, batches, cut):
        if values.size:
            low, high = ranges[name]
            ranges[name] = min(low, np.nanmin(values)), max(high, np.nanmax(values))
    return {name: ends if ends[0] <= ends[1] else _NOTHING for name, ends in ranges.items()}


_NOTHING: Range = (np.float32(0), np.float32(0))
"""The range of a tensor that always was empty."""


def _tensors(
    model: onnx.ModelProto, names: Sequence[str], batches: Sequence[Feed], cut: Cut
) -> Iterator[tuple[str, Array]]:
    """Yield tensors by name; only those of a few inputs are held at a time."""
    entries = {entry.name for entry in model.graph.input}
    computed = [name for name in names if name not in entries]
    session = _session(model, computed)
    size, held = 1, 0
    for batch in batches:
        for part in cut(batch, size):
            values = {name: np.asarray(array, order="C") for name, array in part.items()}
            yield from ((name, values[name]) for name in names if name in entries)
            if computed:
                outputs = session.run(computed, values)
                held = max(held, sum(array.nbytes for array in outputs) // size)
                yield from zip(computed, outputs, strict=True)
        size = max(1, _BYTES // max(1, held))


def _session(model: onnx.ModelProto, outputs: Sequence[str]) -> onnxruntime.InferenceSession:
    """Open a network in onnxruntime that returns other tensors, computed as they are written."""
    options = session_options(None)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    own = list(model.graph.output)
    try:
        del model.graph.output[:]
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs or [own[0].name])
        content = model.SerializeToString()
    finally:
        del model.graph.output[:]
        model.graph.output.extend(own)
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
