"""Means of the outputs of nodes in integers, and the biases that correct them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from rankrl.onnx.export import export_onnx, quantise_onnx
from rankrl.onnx.export.static_quantiser import Feed, correct_biases, mean_moves
from rankrl.onnx.protobuf import load_model, save_model

SHAPE = (3, 8, 8)


def cut(feed: Feed, size: int) -> Iterator[Feed]:
    for first in range(0, 64, size):
        yield {name: array[first : first + size] for name, array in feed.items()}


def means(path: Path, feed: Feed) -> np.ndarray:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    output: np.ndarray = session.run(None, feed)[0]
    return output.mean(tuple(axis for axis in range(output.ndim) if axis != 1))


@pytest.mark.parametrize("kind", ["convolution", "activated", "product"])
def test_the_mean_of_every_channel_is_that_in_floating_point(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    parts: list[nn.Module] = [nn.Conv2d(3, 16, 3), nn.ReLU()]
    if kind == "product":
        parts = [nn.Flatten(), nn.Linear(3 * 8 * 8, 16)]
    network = nn.Sequential(*parts[: 1 if kind == "convolution" else 2]).eval()
    plain, integers, corrected = (tmp_path / f"{name}.onnx" for name in ("plain", "integers", "corrected"))
    export_onnx(network, plain, SHAPE)
    images = np.random.default_rng(0).uniform(1, 2, (64, *SHAPE)).astype(np.float32)
    feed = {load_model(plain).graph.inputs[0].name or "": images}
    quantise_onnx(plain, integers, [feed], fitted=False, reduce_range=True)
    quantised = load_model(integers)
    network = load_model(plain)
    correct_biases(network, quantised, mean_moves(network, quantised, cut(feed, 1)))
    values = [value for node in quantised.graph for value in node.outputs]
    assert all(value.uses() or value in quantised.graph.outputs for value in values)
    save_model(quantised, corrected)
    exact = means(plain, feed)
    before, after = (np.abs(means(path, feed) - exact) for path in (integers, corrected))
    assert before.max() > 1e-3
    assert after.mean() < 0.4 * before.mean()
    assert after.max() < before.max()
