"""The integers that PyTorch simulates are compared with the file's before anything is searched."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rankrl
from decomposition import inspect_layers, integer_layers
from rankrl.networks import module
from rankrl.onnx.export import export_onnx
from rankrl.options.timing import LatencyOptions
from rankrl.verify import file_export
from rankrl.verify.file_export import FileInputs

SHAPE = (3, 8, 8)


@dataclass
class Inputs(FileInputs):
    x: torch.Tensor
    shape, options = SHAPE, LatencyOptions()

    def ranges(self) -> Iterator[torch.Tensor]:
        yield self.x

    def feeds(self) -> Iterator[np.ndarray[Any, Any]]:
        yield from (part.numpy() for part in self.x.split(3))  # in smaller batches than the network's

    def verified(self, *_: Any) -> Any:
        raise NotImplementedError

    score = worth = verified


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(n, 8, 3, padding=1) for n in (3, 8, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.a(x)
        y.mul_(2).relu_()
        z = self.b(y).add_(y)
        z[:, ::2] = 0
        return {"scores": self.head(self.c(z).sub_(0.1).mean((2, 3))), "map": z}


def unlike(folder: Path) -> list[str]:
    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(20, *SHAPE)
    baseline = export_onnx(net, folder / "dense.onnx", SHAPE, progress=False).path
    return file_export.unlike_file(net, inspect_layers(net, SHAPE), baseline, Inputs(x))


def test_what_is_simulated_right_may_be_integers(tmp_path: Path) -> None:
    assert unlike(tmp_path) == []


def test_layers_that_are_simulated_wrongly_are_found_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def calibrated(network: nn.Module, batches: Any) -> None:
        ranges_of(network, batches)
        if (layer := integer_layers(network).get("b")) is not None:
            layer.input_range.high /= 20  # type: ignore[union-attr, operator]

    ranges_of = file_export.calibrate_ranges
    monkeypatch.setattr(file_export, "calibrate_ranges", calibrated)
    with caplog.at_level(logging.WARNING):
        assert unlike(tmp_path) == ["b"]
    (message,) = [record.getMessage() for record in caplog.records if record.name == file_export.__name__]
    assert message.startswith("layer 'b' does not compute in integers")
    assert "where rounding moves the file by" in message


@pytest.mark.parametrize(
    ("simulated", "file", "allowed"), [(0.0, 0.0, 0.05), (0.2, 0.2, 0.62), (8.0, 0.1, 0.32), (0.1, 8.0, 0.32)]
)
def test_as_much_is_allowed_as_rounding_moves_both(simulated: float, file: float, allowed: float) -> None:
    assert file_export.allowed_error(simulated, file) == pytest.approx(allowed)


@pytest.mark.slow
def test_a_search_goes_on_without_integers_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "unlike_file", lambda *_: ["b"])
    torch.manual_seed(0)
    result = rankrl.compress(
        Net().eval(),
        torch.randn(96, *SHAPE),
        tmp_path / "run",
        bytes=0.35,
        decomposition=rankrl.DecompositionOptions(format="tucker", precisions=("int8",), candidates=3),
        timing=rankrl.LatencyOptions(batch=4, runs=3, int8=False),
        progress=False,
    )
    chosen = {layer.name: str(layer.operations[-1]) for layer in result.plan if layer.operations}
    assert chosen["c"].removesuffix(" weights") in ("int8", "int7")
    assert "weights" in chosen.get("b", "weights")
