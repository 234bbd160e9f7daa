"""A file in any runtime answers as an `onnxruntime.InferenceSession` does."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from rankrl.networks.graph import FileSession
from rankrl.onnx.export import export_onnx
from rankrl.onnx.runtimes import open_session


class Two(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"twice": 2 * x, "half": x / 2}


@pytest.mark.parametrize("names", [None, ["half"], ["half", "twice"]])
def test_outputs_are_those_that_are_named(tmp_path: Path, names: list[str] | None) -> None:
    path = export_onnx(Two(), tmp_path / "two.onnx", (3,), progress=False).path
    original, x = onnxruntime.InferenceSession(path), np.ones((2, 3), np.float32)
    (entry,) = original.get_inputs()
    found = FileSession(open_session(path), original).run(names, {entry.name: x})
    expected = original.run(names, {entry.name: x})
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(own, other)
