"""Test the contract of tensor formats, your own included; needs pytest.

`class TestMine(FormatContract): names = ("mine",)` in a test file is enough.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from decomposition.calibration.metric import floored
from decomposition.errors import DecompositionError
from decomposition.fit.fitting import fit_weight
from decomposition.formats import Cores, Ranks, TensorFormat, get_format
from decomposition.formats.layers import FactorisedLayer
from decomposition.formats.tensor_format import LayerForm
from decomposition.network.cost import count_macs, count_parameters
from decomposition.network.geometry import WeightModes, tensorised_modes
from decomposition.network.layers import LayerSpec, inspect_layers
from decomposition.operations import Factorise, Quantise
from decomposition.plan.apply import apply_plan
from decomposition.plan.plan import CompressionPlan, LayerPlan, make_plan
from decomposition.plan.save import load_compressed, save_compressed

MODES = (
    WeightModes((6,), (5,), 9),
    WeightModes((6,), (5,), 1),
    WeightModes((4,), (1,), 9),
    WeightModes((6,), (5,), 6, (2, 3)),
    WeightModes((3,), (4,), 3, (1, 3)),
    WeightModes((4, 3), (2, 2), 9),
    WeightModes((4, 3), (5,), 1),
    WeightModes((2,), (3, 2), 4),
)
"""Ways to read a weight: with a square, an oblong and no kernel, one channel, channels split into factors."""
LAYERS = (
    nn.Conv2d(8, 16, 3, 2, 1),
    nn.Conv2d(8, 16, 1, 2, bias=False),
    nn.Conv2d(6, 4, (3, 1), padding="same", dilation=2, padding_mode="reflect"),
    nn.Conv1d(5, 7, 3, padding=2),
    nn.Linear(8, 16),
)


class FormatContract:
    """Contract of a tensor format, as fitting, applying plans and the export rely on it.

    Attributes:
        names: Registered names of the formats that are tested.
    """

    names: Sequence[str]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run every test for every format, and for every way to read a weight that the format has."""
        formats = [get_format(name) for name in self.names]
        for argument in {"modes", "plain_modes"} & set(metafunc.fixturenames):
            cases = [
                pytest.param(entry, modes, id=f"{entry.name}-{modes_name(modes)}")
                for entry in formats
                for modes in MODES
                if modes.plain or (entry.tensorisable and argument == "modes")
            ]
            metafunc.parametrize(("tensor_format", argument), cases)
            return
        metafunc.parametrize("tensor_format", formats, ids=self.names)

    def test_it_says_what_it_is(self, tensor_format: TensorFormat) -> None:
        assert get_format(tensor_format.name) is tensor_format
        assert tensor_format.description

    def test_halves_multiply_to_the_weight(self, tensor_format: TensorFormat, modes: WeightModes) -> None:
        cores = random_cores(tensor_format, modes, unequal_ranks(tensor_format, modes))
        output, features = tensor_format.halves(cores, modes)
        assert output.shape == (modes.out_channels, features.shape[0])
        assert features.shape[1] == modes.columns
        weight = tensor_format.reconstruct(cores, modes)
        assert weight.shape == (modes.out_channels, modes.in_channels, modes.kernel)
        torch.testing.assert_close(output @ features, weight.flatten(1), rtol=1e-12, atol=1e-12)

    def test_the_output_half_can_be_set(self, tensor_format: TensorFormat, plain_modes: WeightModes) -> None:
        if not tensor_format.free_output(plain_modes):
            return
        cores = random_cores(tensor_format, plain_modes, unequal_ranks(tensor_format, plain_modes))
        output, features = tensor_format.halves(cores, plain_modes)
        replacement = normal(output.shape, seed=1)
        changed = tensor_format.set_output(cores, plain_modes, replacement)
        assert [core.shape for core in changed] == [core.shape for core in cores]
        new_output, new_features = tensor_format.halves(changed, plain_modes)
        torch.testing.assert_close(new_output, replacement)
        torch.testing.assert_close(new_features, features)

    def test_the_weight_is_linear_in_every_core(
        self, tensor_format: TensorFormat, modes: WeightModes
    ) -> None:
        cores = random_cores(tensor_format, modes, unequal_ranks(tensor_format, modes))
        doubled = 2 * tensor_format.reconstruct(cores, modes)
        for index, core in enumerate(cores):
            scaled = [*cores[:index], 2 * core, *cores[index + 1 :]]
            torch.testing.assert_close(tensor_format.reconstruct(scaled, modes), doubled)

    def test_the_start_approximates_and_larger_ranks_approximate_better(
        self, tensor_format: TensorFormat, modes: WeightModes
    ) -> None:
        weight = normal((modes.out_channels, modes.in_channels, modes.kernel))
        ranks = tensor_format.expand(modes, 1), tensor_format.max_ranks(modes)
        few, many = (
            relative_error(tensor_format, tensor_format.start(weight, modes, each), weight, modes)
            for each in ranks
        )
        assert few < 1
        assert many < few or ranks[0] == ranks[1]

    @pytest.mark.parametrize("weigh_outputs", [False, True])
    def test_a_fit_gains_on_the_start_and_reports_its_true_error(
        self, tensor_format: TensorFormat, modes: WeightModes, weigh_outputs: bool
    ) -> None:
        weight = normal((modes.out_channels, modes.in_channels, modes.kernel))
        patches = normal((3 * modes.columns, modes.columns), seed=3) * torch.linspace(0.3, 1, modes.columns)
        metric = patches.T @ patches / len(patches)
        factor = normal((modes.out_channels, 2 * modes.out_channels), seed=4)
        sensitivity = factor @ factor.T if weigh_outputs else None
        raised = None if sensitivity is None else floored(sensitivity)
        ranks = unequal_ranks(tensor_format, modes)
        fit = fit_weight(tensor_format, weight, modes, ranks, metric, sensitivity=sensitivity)
        start = tensor_format.start(weight, modes, ranks)
        errors = [
            relative_error(tensor_format, cores, weight, modes, metric, raised)
            for cores in (fit.cores, start)
        ]
        assert fit.error == pytest.approx(errors[0], rel=1e-4, abs=1e-5)
        assert fit.error <= errors[1] + 1e-6

    def test_a_compressed_network_survives_plan_file_and_rounding(
        self, tensor_format: TensorFormat, tmp_path: Path
    ) -> None:
        torch.manual_seed(0)
        modules = nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 25, 6)
        model, x = nn.Sequential(*modules).eval(), normal((64, 4, 5, 5), seed=5).float()
        plan = make_plan(model, (4, 5, 5), tensor_format.name, ranks=2)
        assert CompressionPlan.from_json(plan.to_json()) == plan
        small = apply_plan(model, plan, calibration=x)
        save_compressed(small, plan, tmp_path / "small.safetensors")
        loaded, _ = load_compressed(model, tmp_path / "small.safetensors")
        assert torch.equal(loaded(x), small(x))
        specs = inspect_layers(model, (4, 5, 5))
        for rounding, able in ((Quantise(), "in_integers"), (Quantise(8, "float32"), "stored")):
            layers = tuple(
                replace(layer, operations=(*layer.operations, rounding))
                if getattr(form_of(layer, spec), able)
                else layer
                for layer, spec in zip(plan, specs, strict=True)
            )
            rounded = apply_plan(model, replace(plan, layers=layers), calibration=x)
            with torch.no_grad():
                assert (rounded(x) - small(x)).norm() < 0.1 * small(x).norm()

    def test_the_start_has_the_shapes_and_is_finite(
        self, tensor_format: TensorFormat, modes: WeightModes
    ) -> None:
        weight = normal((modes.out_channels, modes.in_channels, modes.kernel))
        largest, smallest = tensor_format.max_ranks(modes), tensor_format.expand(modes, 1)
        for ranks in (unequal_ranks(tensor_format, modes), largest, smallest):
            cores = tensor_format.start(weight, modes, ranks)
            assert [tuple(core.shape) for core in cores] == tensor_format.core_shapes(modes, ranks)
            assert all(bool(torch.isfinite(core).all()) for core in cores)
            assert sum(core.numel() for core in cores) >= tensor_format.params(modes, ranks) > 0

    def test_one_rank_is_expanded_within_the_bounds(
        self, tensor_format: TensorFormat, modes: WeightModes
    ) -> None:
        largest, fewer = tensor_format.max_ranks(modes), 0
        for rank in range(1, tensor_format.max_rank(modes) + 1):
            ranks = tensor_format.check_ranks(modes, rank, "layer")
            assert ranks == tuple(min(rank, most) for most in largest)
            assert tensor_format.check_ranks(modes, ranks, "layer") == ranks
            assert tensor_format.check_ranks(modes, list(ranks), "layer") == ranks  # type: ignore[arg-type]
            assert fewer <= tensor_format.params(modes, ranks)
            fewer = tensor_format.params(modes, ranks)

    def test_bad_ranks_are_refused_naming_layer_and_limits(
        self, tensor_format: TensorFormat, modes: WeightModes
    ) -> None:
        largest = tensor_format.max_ranks(modes)
        bad: list[Any] = [0, -1, max(largest) + 1, 2.0, True, "3", None, (), (*largest, 1)]
        bad += [(other, *largest[1:]) for other in (0, largest[0] + 1, 1.0, True)]
        for ranks in bad:
            with pytest.raises(DecompositionError, match=r"'stage\.conv'.*\d"):
                tensor_format.check_ranks(modes, ranks, "stage.conv")

    def test_a_linear_layer_costs_two_matrix_products_at_most(self, tensor_format: TensorFormat) -> None:
        spec = spec_of(nn.Linear(12, 7))
        modes = tensor_format.modes(spec)
        ranks = tensor_format.expand(modes, 2)
        features = tensor_format.halves(random_cores(tensor_format, modes, ranks), modes)[0].shape[1]
        products = count_macs(nn.Sequential(nn.Linear(12, features), nn.Linear(features, 7)), (12,))
        assert tensor_format.macs(spec, modes, ranks) <= products

    def test_tensorised_modes_only_where_the_format_has_them(self, tensor_format: TensorFormat) -> None:
        spec = spec_of(nn.Conv2d(16, 64, 3))
        if tensor_format.tensorisable:
            assert tensor_format.modes(spec, tensorised=True) == tensorised_modes(spec)
        else:
            with pytest.raises(DecompositionError, match="no tensorised form"):
                tensor_format.modes(spec, tensorised=True)

    @pytest.mark.parametrize("dense", LAYERS, ids=repr)
    def test_a_layer_computes_what_the_dense_one_with_its_weight_does(
        self, tensor_format: TensorFormat, dense: nn.Module
    ) -> None:
        for layer, _, _ in layers_of(tensor_format, copy.deepcopy(dense).double()):
            inputs = normal((2, *input_shape(dense)), seed=2)
            for training in (False, True):
                layer.train(training)
                with torch.no_grad():
                    torch.testing.assert_close(layer(inputs), layer.to_dense()(inputs), rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("dense", LAYERS, ids=repr)
    def test_its_plain_layers_in_a_row_compute_the_same(
        self, tensor_format: TensorFormat, dense: nn.Module
    ) -> None:
        for layer, _, _ in layers_of(tensor_format, copy.deepcopy(dense).double()):
            stages = layer.plain_layers().values()
            if stages:
                x = normal((2, *input_shape(dense)), seed=2)
                with torch.no_grad():
                    torch.testing.assert_close(nn.Sequential(*stages)(x), layer(x), rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("dense", LAYERS, ids=repr)
    def test_parameters_and_macs_are_exactly_those_announced(
        self, tensor_format: TensorFormat, dense: nn.Module
    ) -> None:
        for layer, spec, ranks in layers_of(tensor_format, dense):
            bias = 0 if layer.bias is None else spec.out_channels
            held = [part.parameters(recurse=False) for part in layer.weight_holders()]
            weights = [weight for part in held for weight in part if weight is not layer.bias]
            assert not weights or sum(map(len, weights)) == tensor_format.rows(spec, layer.modes, ranks)
            assert count_parameters(layer) == tensor_format.params(layer.modes, ranks) + bias
            assert count_macs(layer, input_shape(dense)) == tensor_format.macs(spec, layer.modes, ranks)


def relative_error(
    tensor_format: TensorFormat,
    cores: Cores,
    weight: torch.Tensor,
    modes: WeightModes,
    metric: torch.Tensor | None = None,
    sensitivity: torch.Tensor | None = None,
) -> float:
    """Return the root of E|(W - V) x|^2 / E|W x|^2, |y|^2 = y' G y; by default that of the weights alone."""

    def energy(rows: torch.Tensor) -> torch.Tensor:
        weighed = rows if sensitivity is None else sensitivity @ rows
        return (weighed * (rows if metric is None else rows @ metric)).sum()

    rest = weight - tensor_format.reconstruct(cores, modes)
    return float(energy(rest.flatten(1)) / energy(weight.flatten(1))) ** 0.5


def form_of(layer: LayerPlan, spec: LayerSpec) -> LayerForm:
    operation = layer.operation(Factorise)
    assert operation is not None
    return operation.tensor_format.form(spec, operation.modes(spec), operation.ranks)


def modes_name(modes: WeightModes) -> str:
    """Return the sizes of all modes as one word, such as `6x5x3`."""
    return "x".join(map(str, (*modes.out, *modes.inp, *modes.kernel_size)))


def normal(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return standard normal numbers, float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_cores(tensor_format: TensorFormat, modes: WeightModes, ranks: Ranks) -> Cores:
    return [normal(shape, seed) for seed, shape in enumerate(tensor_format.core_shapes(modes, ranks))]


def unequal_ranks(tensor_format: TensorFormat, modes: WeightModes) -> Ranks:
    """Return feasible ranks that differ from bond to bond, so that mixed-up bonds are noticed."""
    return tuple(min(2 + j, largest) for j, largest in enumerate(tensor_format.max_ranks(modes)))


def input_shape(dense: nn.Module) -> tuple[int, ...]:
    """Return the shape of an input that a layer accepts, without the batch axis."""
    if isinstance(dense, nn.Linear):
        return (dense.in_features,)
    assert isinstance(dense, nn.Conv1d | nn.Conv2d)
    return (dense.in_channels, *(12, 11)[: len(dense.kernel_size)])


def spec_of(dense: nn.Module) -> LayerSpec:
    return inspect_layers(nn.Sequential(dense), input_shape(dense))[0]


def layers_of(
    tensor_format: TensorFormat, dense: nn.Module
) -> Iterator[tuple[FactorisedLayer, LayerSpec, Ranks]]:
    """Yield layers of a format that replace a dense one, at several ranks, with random cores."""
    spec = spec_of(dense)
    for tensorised in (False, True) if tensor_format.tensorisable else (False,):
        modes = tensor_format.modes(spec, tensorised=tensorised)
        for rank in (1, 2, 5, 12):
            ranks = tensor_format.expand(modes, min(rank, tensor_format.max_rank(modes)))
            layer = tensor_format.build(copy.deepcopy(dense), spec, modes, ranks)  # type: ignore[arg-type]
            layer.load(random_cores(tensor_format, modes, ranks), copy.deepcopy(layer.bias))
            yield layer, spec, ranks
