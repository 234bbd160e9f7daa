"""A tensor format in one file of a user's own: what it cannot do is left out by name, the rest works."""

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from two_matrices import TwoMatrices

import rankrl
from decomposition import DecompositionError, TensorFormat, inspect_layers, register_format
from decomposition.formats.layers import FactorisedLayer
from decomposition.formats.tensor_format import _FORMATS
from decomposition.operations import Quantise
from decomposition.testing import FormatContract
from rankrl.errors import ConfigError
from rankrl.onnx.export.onnx_file import export_network
from rankrl.onnx.graph.rewrite import writable_formats
from rankrl.options.decomposition import FILE_FORMATS


class _InBranches(FactorisedLayer):
    """The product once in each of two branches, which are added: plain layers, but not in a row."""

    def __init__(self, dense: Any, *rest: Any) -> None:
        super().__init__(dense, *rest)
        like = {"device": dense.weight.device, "dtype": dense.weight.dtype}
        g, rank = self.geometry, self.ranks[0]
        self.into = nn.ModuleList(g.layer(g.in_channels, rank, bias=False, **like) for _ in range(2))
        last = (g.pointwise(rank, g.out_channels, bias=g.bias and not j, **like) for j in range(2))
        self.out = nn.ModuleList(last)

    @property
    def bias(self) -> Any:
        return self.out[0].bias

    def forward(self, x: Any) -> Any:
        return self.out[0](self.into[0](x)) + self.out[1](self.into[1](x))

    def cores(self) -> Any:
        output, inner = ([each.weight.flatten(1) for each in part] for part in (self.out, self.into))
        return [torch.cat(output, 1), torch.cat(inner)]

    def set_cores(self, cores: Any) -> None:
        halves = (*cores[0].chunk(2, 1), *cores[1].chunk(2))
        for layer, core in zip((*self.out, *self.into), halves, strict=True):
            layer.weight.copy_(core.reshape(layer.weight.shape))


class Branches(TwoMatrices):
    """The same product of an even rank in two branches."""

    name = "branches"

    def max_ranks(self, modes: Any) -> Any:
        return (min(modes.out_channels, modes.columns) // 2,)

    def core_shapes(self, modes: Any, ranks: Any) -> Any:
        return super().core_shapes(modes, (2 * ranks[0],))

    def start(self, weight: Any, modes: Any, ranks: Any) -> Any:
        return super().start(weight, modes, (2 * ranks[0],))

    def stage_macs(self, spec: Any, modes: Any, ranks: Any) -> Any:
        return super().stage_macs(spec, modes, (2 * ranks[0],))

    def build(self, dense: Any, spec: Any, modes: Any, ranks: Any) -> Any:
        return _InBranches(dense, self, modes, ranks, "half")


class _RowsOfParameters(FactorisedLayer):
    """Cores as parameters of its own, contracted to the dense weight."""

    def __init__(self, dense: Any, *rest: Any) -> None:
        super().__init__(dense, *rest)
        shapes = self.tensor_format.core_shapes(self.modes, self.ranks)
        self.a, self.b = (nn.Parameter(dense.weight.new_zeros(shape)) for shape in shapes)
        out = self.modes.out_channels
        self.offset = nn.Parameter(dense.weight.new_zeros(out)) if self.geometry.bias else None

    @property
    def bias(self) -> Any:
        return self.offset

    def forward(self, x: Any) -> Any:
        return self.apply_dense(x)

    def cores(self) -> Any:
        return [self.a, self.b]

    def set_cores(self, cores: Any) -> None:
        self.a.copy_(cores[0])
        self.b.copy_(cores[1])


class SharedRows(TensorFormat):
    """W = sum over r of A_r kron b_r, of matrices (out, in / p) and rows (p * kernel)."""

    name = "shared_rows"
    description = "one matrix a row that all groups of inputs share"

    def max_ranks(self, modes: Any) -> Any:
        return (min(modes.out_channels * _blocks(modes), modes.columns // _blocks(modes)),)

    def core_shapes(self, modes: Any, ranks: Any) -> Any:
        return [(ranks[0], modes.out_channels, _blocks(modes)), (ranks[0], modes.columns // _blocks(modes))]

    def halves(self, cores: Any, modes: Any) -> Any:
        identity = torch.eye(_blocks(modes), dtype=cores[1].dtype, device=cores[1].device)
        features = torch.einsum("rb,ij->rijb", cores[1], identity)
        return cores[0].movedim(0, 1).flatten(1), features.reshape(-1, modes.columns)

    def set_output(self, cores: Any, modes: Any, output: Any) -> Any:
        return [output.unflatten(1, (-1, _blocks(modes))).movedim(1, 0).contiguous(), cores[1]]

    def start(self, weight: Any, modes: Any, ranks: Any) -> Any:
        matrix = weight.reshape(modes.out_channels * _blocks(modes), -1)
        u, s, v = torch.linalg.svd(matrix, full_matrices=False)
        first = (u[:, : ranks[0]] * s[: ranks[0]]).T
        return [first.reshape(ranks[0], modes.out_channels, -1), v[: ranks[0]]]

    def stage_macs(self, spec: Any, modes: Any, ranks: Any) -> Any:
        return {"dense": spec.output_positions * modes.elements}

    def build(self, dense: Any, spec: Any, modes: Any, ranks: Any) -> Any:
        return _RowsOfParameters(dense, self, modes, ranks, "dense")


def _blocks(modes: Any) -> int:
    return int(modes.in_channels // math.gcd(modes.in_channels, 4))


FORMATS = (TwoMatrices, Branches, SharedRows)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    with _FORMATS.restored():
        for each in FORMATS:
            register_format(each)
        yield


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten())
    return nn.Sequential(*layers, nn.Linear(16 * 16, 6)).eval()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(64, 4, 6, 6, generator=torch.Generator().manual_seed(1))


def options(name: str, *precisions: str) -> rankrl.DecompositionOptions:
    effort: dict[str, Any] = {"candidates": 3, "iterations": 2, "final_iterations": 2}
    return rankrl.DecompositionOptions(format=name, precisions=precisions or None, **effort)


class TestContract(FormatContract):
    names = ("two_matrices", "shared_rows")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        with _FORMATS.restored():
            for each in FORMATS:
                register_format(each)
            super().pytest_generate_tests(metafunc)

    def test_it_says_what_it_is(self, tensor_format: TensorFormat) -> None:
        assert tensor_format.description


def test_what_a_format_can_do_is_found_from_its_layers(model: nn.Module) -> None:
    (spec, *_) = inspect_layers(model, (4, 6, 6))

    def form(tensor_format: TensorFormat) -> tuple[bool, ...]:
        modes = tensor_format.modes(spec)
        return tuple(tensor_format.form(spec, modes, tensor_format.expand(modes, 2)))

    assert form(TwoMatrices()) == (False, True, True, True)
    assert form(SharedRows()) == (False, False, False, True)
    assert form(Branches())[:2] == (True, True)
    assert form(_FORMATS["cp"]) == form(_FORMATS["tucker"]) == form(_FORMATS["spatial_svd"]) == (True,) * 4
    assert form(_FORMATS["pifa"]) == (False, False, True, False)
    assert form(_FORMATS["kronecker"]) == (True, True, True, False)
    assert set(writable_formats()) == {*FILE_FORMATS, "kronecker", "two_matrices"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [each.name for each in FORMATS])
def test_a_budget_in_bytes_is_kept_by_a_module(
    name: str, model: nn.Module, images: torch.Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    result = rankrl.compress(model, images, tmp_path / "run", decomposition=options(name), bytes=0.5)
    session = onnxruntime.InferenceSession(tmp_path / "run" / "model.onnx")
    got = session.run(None, {session.get_inputs()[0].name: images[:8].numpy()})[0]
    with torch.no_grad():
        expected = result.model(images[:8]).numpy()
    assert np.abs(got - expected).max() < 0.1 * np.abs(expected).max()
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert any(f"layers in {name} cannot be int" in each for each in said) == (name != "branches")


@pytest.mark.parametrize("name", ["two_matrices", "branches"])
def test_weights_stored_in_integers_stay_so_in_the_file(
    name: str, model: nn.Module, images: torch.Tensor, tmp_path: Path
) -> None:
    tensor_format = _FORMATS[name]
    for layer, spec in zip((0, 2, 5), inspect_layers(model, (4, 6, 6)), strict=True):
        modes = tensor_format.modes(spec)
        made = tensor_format.build(model[layer], spec, modes, tensor_format.expand(modes, 3)).eval()  # type: ignore[index]
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.normal_()
        model[layer] = Quantise(8, "float32").structure(made, spec)  # type: ignore[index, operator]
    export_network(model, tmp_path / "net.onnx", (4, 6, 6), [])
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    got = session.run(None, {session.get_inputs()[0].name: images.numpy()})[0]
    with torch.no_grad():
        expected = model(images).numpy()
    np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    stored = sum(core.numel() for each in model if isinstance(each, FactorisedLayer) for core in each.cores())
    assert (tmp_path / "net.onnx").stat().st_size < 2 * stored + 8000


@pytest.mark.parametrize("precision", ["float32", "int8_weights"])
def test_a_product_of_two_matrices_becomes_nodes_of_a_file(
    precision: str, model: nn.Module, images: torch.Tensor, tmp_path: Path
) -> None:
    rankrl.export_onnx(model, tmp_path / "net.onnx", (4, 6, 6))
    chosen = options("two_matrices", "float32", precision)
    kept: dict[str, Any] = {"bytes": 0.5 if precision == "float32" else 0.15}
    result = rankrl.compress(
        tmp_path / "net.onnx", images.numpy(), tmp_path / "small.onnx", decomposition=chosen, **kept
    )
    assert any("two_matrices" in str(each) for layer in result.plan for each in layer.operations)
    assert (tmp_path / "small.onnx").stat().st_size < 0.8 * (tmp_path / "net.onnx").stat().st_size


@pytest.mark.parametrize("name", ["branches", "shared_rows"])
def test_a_format_that_is_no_row_of_layers_is_refused_by_a_file_at_once(
    name: str, model: nn.Module, images: torch.Tensor, tmp_path: Path
) -> None:
    rankrl.export_onnx(model, tmp_path / "net.onnx", (4, 6, 6))
    with pytest.raises(ConfigError, match=rf"{name} cannot be written .* Choose from cp, .*two_matrices"):
        rankrl.compress(
            tmp_path / "net.onnx", images.numpy(), tmp_path / "small.onnx", decomposition=name, bytes=0.5
        )


def test_integers_of_a_format_that_holds_none_are_refused_by_name(model: nn.Module) -> None:
    spec = inspect_layers(model, (4, 6, 6))[0]
    tensor_format = SharedRows()
    layer = tensor_format.build(model[0], spec, tensor_format.modes(spec), (2,))  # type: ignore[index]
    for rounding in (Quantise(), Quantise(8, "float32")):
        with pytest.raises(
            DecompositionError, match=r"'0': shared_rows of ranks \[2\] has no form in integers"
        ):
            rounding.structure(layer, spec)
