"""Comparing ONNX files with their PyTorch models."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from decomposition.network.inputs import (
    ExampleInputs,
    as_inputs,
    count_inputs,
    mapped,
    rows,
    run_model,
    tensors_in,
)
from rankrl.data import Preprocessing
from rankrl.device import in_layout
from rankrl.onnx.errors import ExportError
from rankrl.onnx.export.feeds import feed_of
from rankrl.onnx.export.tracing import inference_copy
from rankrl.onnx.runtimes import DEFAULT_RUNTIME, open_session

BATCH_SIZES = (1, 7)
"""Two sizes, because a batch size that tracing froze shows only at another one."""


def verify_onnx(
    model: nn.Module,
    path: str | Path,
    inputs: ExampleInputs,
    *,
    tolerance: float = 1e-4,
    preprocessing: Preprocessing | None = None,
    runtime: str = DEFAULT_RUNTIME,
) -> float:
    """Compare an ONNX file in a runtime with its model in PyTorch (float32, evaluation mode, CPU).

    Compared at the batch sizes 1 and 7, or at the file's own where it was exported with a fixed one.

    Args:
        model: The model that was exported; it is not changed.
        path: The ONNX file.
        inputs: Real inputs, N >= 1 of them (a tensor, a tuple or a dict of tensors); repeated where a batch
            needs more than N.
        tolerance: The largest absolute difference of any output element that is accepted. Where outputs
            exceed 1 it is multiplied by their largest magnitude, as rounding errors are.
        preprocessing: What a file that was exported with it does itself. The inputs are then the uint8 images
            (N, height, width, channels) that the file takes; the model gets them normalised by PyTorch.
        runtime: What runs the file.

    Returns:
        The largest absolute difference over both batch sizes and all outputs.

    Raises:
        ConfigError: The runtime is unknown, or cannot be used here.
        ExportError: The difference is above the tolerance or not finite, or the outputs' shapes differ.
    """
    real = as_inputs(inputs)
    if count_inputs(real) == 0:
        raise ExportError("inputs holds no image; give at least one to compare the ONNX file with the model.")
    session = open_session(path, runtime=runtime)
    fixed = session.fixed_batch
    duplicate = inference_copy(model)
    largest = 0.0
    for size in (fixed,) if fixed is not None else BATCH_SIZES:
        batch = mapped(_plain, rows(real, torch.arange(size) % count_inputs(real)))
        images = batch
        if preprocessing is not None and isinstance(batch, Tensor):
            images = preprocessing.normalised(batch)
        with torch.no_grad():
            expected = [output.numpy() for output in tensors_in(run_model(duplicate, images))]
        got = session.run(feed_of(duplicate, batch))
        shapes = [output.shape for output in expected], [output.shape for output in got]
        if shapes[0] != shapes[1]:
            raise ExportError(
                f"{path} returns {shapes[1]} for a batch of {size}, the PyTorch model {shapes[0]}. "
                "A layer may have fixed the batch size while it was traced; export with dynamic_batch=False."
            )
        for reference, output in zip(expected, got, strict=True):
            difference = float(np.abs(output.astype(np.float64) - reference).max(initial=0.0))
            allowed = tolerance * max(1.0, float(np.abs(reference).max(initial=0.0)))
            if not difference <= allowed:  # also true of NaN
                raise ExportError(
                    f"{path} differs from the PyTorch model by {difference:.2e} for a batch of {size} in "
                    f"{runtime}; at most {allowed:.2e} is accepted. Do not use this file there; try another "
                    "opset, or fold_batchnorm=False."
                )
            largest = max(largest, difference)
    return largest


def onnx_accuracy(
    path: str | Path, batches: Iterable[tuple[Tensor | np.ndarray[Any, Any], Tensor | np.ndarray[Any, Any]]]
) -> float:
    """Measure a classifier's accuracy from its ONNX file alone.

    Shapes: path (N, classes), batches (N,) and (N, C, H, W) and (N, H, W, C).
    """
    session = open_session(path)
    correct = total = 0
    for images, labels in batches:
        batch = _array(images)
        if session.input_dtype == np.float32 and np.issubdtype(batch.dtype, np.floating):
            batch = batch.astype(np.float32)
        logits = session.run(batch)[0]
        correct += int((logits.argmax(axis=1) == _array(labels)).sum())
        total += len(logits)
    if total == 0:
        raise ExportError("there are no images to measure the accuracy of the ONNX file on.")
    return correct / total


def _plain(x: Tensor) -> Tensor:
    """Return an input on the CPU, contiguous, in float32 where it is no integer."""
    x = x.detach().cpu()
    return in_layout(x.float() if x.is_floating_point() else x, torch.contiguous_format)


def _array(values: Tensor | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values
