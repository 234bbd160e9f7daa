"""Test the contract of tensor formats in the files that rankrl writes and compresses."""

from __future__ import annotations

from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import nn

import rankrl
from decomposition import TensorFormat, apply_plan, factorised_layers, make_plan
from decomposition.testing import FormatContract as OfLayers
from decomposition.testing import normal
from rankrl.errors import ConfigError
from rankrl.onnx.graph.rewrite import writable_formats

_SHAPE = (4, 5, 5)


class FormatContract(OfLayers):
    """Contract of a tensor format, ONNX files included.

    Attributes:
        names: Registered names of the formats that are tested.
    """

    def test_an_exported_network_computes_the_same(self, tensor_format: TensorFormat, tmp_path: Path) -> None:
        model, x = network()
        small = apply_plan(model, make_plan(model, _SHAPE, tensor_format.name, ranks=2), calibration=x)
        assert factorised_layers(small)
        rankrl.export_onnx(small, tmp_path / "small.onnx", _SHAPE)
        with torch.no_grad():
            torch.testing.assert_close(outputs(tmp_path / "small.onnx", x), small(x), rtol=1e-3, atol=1e-4)

    def test_a_file_is_compressed_or_the_format_is_refused_by_name(
        self, tensor_format: TensorFormat, tmp_path: Path
    ) -> None:
        model, x = network()
        rankrl.export_onnx(model, tmp_path / "given.onnx", _SHAPE)

        def compress() -> None:
            options = rankrl.DecompositionOptions(
                format=tensor_format.name, candidates=3, iterations=3, final_iterations=3
            )
            target = tmp_path / "small.onnx"
            rankrl.compress(tmp_path / "given.onnx", x.numpy(), target, params=0.7, decomposition=options)

        if tensor_format.name not in writable_formats():
            with pytest.raises(ConfigError, match=f"decomposition={tensor_format.name} cannot be written"):
                compress()
            return
        compress()
        assert outputs(tmp_path / "small.onnx", x).isfinite().all()
        assert (tmp_path / "small.onnx").stat().st_size < (tmp_path / "given.onnx").stat().st_size


def network() -> tuple[nn.Module, torch.Tensor]:
    """Return a small network and some inputs."""
    torch.manual_seed(0)
    layers = nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(144, 6)
    return nn.Sequential(*layers).eval(), normal((64, *_SHAPE), seed=5).float()


def outputs(path: Path, x: torch.Tensor) -> torch.Tensor:
    """Run a file in onnxruntime, and return its output."""
    session = onnxruntime.InferenceSession(path)
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
