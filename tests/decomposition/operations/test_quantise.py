"""Quantised layers: what they cost, what becomes of them in a plan, on disk and in a refit."""

import copy
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from decomposition import (
    CompressionPlan,
    DecompositionError,
    Factorise,
    FitLibrary,
    LayerPlan,
    PlanError,
    Quantise,
    apply_plan,
    build_structure,
    compressible_layers,
    fingerprint,
    get_format,
    inspect_layers,
    integer_layers,
    list_formats,
    load_compressed,
    rounded_parameters,
    save_compressed,
    without_rounding,
)
from decomposition.fit.refit import RefitProblem
from decomposition.network.layers import weight_of
from decomposition.operations import PRECISIONS, dense_cost

SHAPE = (3, 10, 10)
WEIGHTS = Quantise(8, "float32")


def images(count: int = 64) -> torch.Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(1))


def plan_of(model: nn.Module, **operations: tuple[object, ...]) -> CompressionPlan:
    specs = inspect_layers(model, SHAPE)
    layers = tuple(LayerPlan(s.name, operations.get(f"layer{s.name}", ())) for s in specs)  # type: ignore[arg-type]
    return CompressionPlan(layers, fingerprint(specs), SHAPE)


@pytest.mark.parametrize("name", list_formats())
@pytest.mark.parametrize("kernel", [1, 3])
def test_rows_are_the_output_channels_of_all_weights(name: str, kernel: int) -> None:
    model = nn.Sequential(nn.Conv2d(12, 8, kernel, padding=kernel // 2))
    (spec,) = inspect_layers(model, (12, 6, 6))
    chosen = get_format(name)
    modes = chosen.modes(spec)
    for rank in (1, 2, chosen.max_rank(modes)):
        operation = Factorise(name, chosen.expand(modes, rank))
        layer = operation.structure(model[0], spec)
        weights = [each for each in layer.parameters() if each is not layer.bias]
        assert operation.cost(spec, dense_cost(spec)).rows == sum(len(each) for each in weights)


def test_integers_cost_a_byte_each_and_their_scales(small_net: nn.Module) -> None:
    spec = inspect_layers(small_net, SHAPE)[1]
    dense = dense_cost(spec)
    weights = spec.params - spec.out_channels
    cost = Quantise().cost(spec, dense)
    assert (cost.params, cost.macs) == (dense.params, dense.macs)
    assert cost.bytes == weights + 4 * spec.out_channels + 5 * spec.out_channels
    assert Quantise(4, "float32").cost(spec, dense).bytes == math.ceil(weights / 2) + 9 * spec.out_channels


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("first", [(), (Factorise("cp", (6,)),), (Factorise("tucker", (6, 4)),)])
def test_a_quantised_layer_comes_close_to_the_dense_one(
    small_net: nn.Module, first: tuple[Factorise, ...], sequential: bool
) -> None:
    small_net.eval()
    plan = plan_of(small_net, layer3=(*first, Quantise()))
    plain = apply_plan(small_net, plan_of(small_net, layer3=first), images(), sequential=sequential)
    network = apply_plan(small_net, plan, images(), sequential=sequential)
    x = images(16)
    with torch.no_grad():
        expected, found = plain(x), network(x) * 1
    assert torch.isfinite(found).all()
    assert (found - expected).norm() < 0.05 * expected.norm()
    assert (found - expected).norm() > 0
    assert len(integer_layers(network)) == (3 if first else 1)
    assert not integer_layers(small_net)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("first", [(), (Factorise("cp", (6,)),), (Factorise("tucker", (6, 4)),)])
def test_a_network_on_a_gpu_is_quantised_alike(small_net: nn.Module, first: tuple[Factorise, ...]) -> None:
    small_net.eval()
    plan = plan_of(small_net, layer3=(*first, Quantise()))
    networks = [apply_plan(copy.deepcopy(small_net).to(place), plan, images()) for place in ("cpu", "cuda")]
    with torch.no_grad():
        expected, outputs = (network.cpu()(images(16)) * 1 for network in networks)
    assert (outputs - expected).norm() < 0.02 * expected.norm()


def test_a_quantised_network_comes_back_from_its_file(small_net: nn.Module, tmp_path: Path) -> None:
    small_net.eval()
    plan = plan_of(
        small_net, layer0=(Quantise(),), layer3=(Factorise("cp", (5,)), Quantise()), layer7=(WEIGHTS,)
    )
    assert CompressionPlan.from_json(plan.to_json()) == plan
    network = apply_plan(small_net, plan, images())
    save_compressed(network, plan, tmp_path / "model.safetensors")
    loaded, _ = load_compressed(small_net, tmp_path / "model.safetensors")
    with torch.no_grad():
        torch.testing.assert_close(loaded(images(4)) * 1, network(images(4)) * 1)


def test_weights_alone_are_rounded_in_every_form_of_a_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 8, 3)).eval()
    (spec,) = inspect_layers(model, (8, 6, 6))
    ring = Factorise("tensor_ring", (4, 4, 4))  # contracted while it runs
    assert not ring.tensor_format.form(spec, ring.modes(spec), ring.ranks).in_integers
    for operations in ((WEIGHTS,), (ring, WEIGHTS), (Factorise("cp", (4,)), Quantise(4, "float32"))):
        plan = CompressionPlan((LayerPlan("0", operations),), fingerprint([spec]), (8, 6, 6))
        network = apply_plan(model, plan, torch.randn(64, 8, 6, 6))
        assert rounded_parameters(network)
        assert not integer_layers(network)
        x = torch.randn(2, 8, 6, 6)
        expected = network(x)
        torch.testing.assert_close(without_rounding(network)(x), expected)
    with pytest.raises(DecompositionError, match=r"layer '0': tensor_ring .* contracts its cores"):
        build_structure(
            model, CompressionPlan((LayerPlan("0", (ring, Quantise())),), fingerprint([spec]), (8, 6, 6))
        )


def test_the_last_stage_makes_up_for_the_rounding_of_the_others() -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(16, 16, 3, padding=1)
    model = nn.Sequential(layer).eval()
    (spec,) = inspect_layers(model, (16, 6, 6))
    root = torch.randn(144, 144, dtype=torch.float64)
    problem = RefitProblem(weight_of(layer), root @ root.T / 144)
    cp, coarse = Factorise("cp", (24,)), Quantise(4, "float32")
    options = replace(FitLibrary(model, [spec], "cp").options, stability=0.0)  # terms as loud as they come

    def error(weight: torch.Tensor) -> float:
        rest = (problem.target - weight).flatten(1)
        return float(((rest @ problem.metric) * rest).sum())  # type: ignore[operator]

    factorised = cp.fit(layer, spec, problem, sensitivity=None, options=options)
    alone = coarse.structure(cp.fit(layer, spec, problem, sensitivity=None, options=options).module, spec)
    after = coarse.fit(factorised.module, spec, problem, sensitivity=None, options=options)
    assert error(after.weight) < 0.9 * error(weight_of(alone.to_dense()))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (Quantise(3), r"layer '3': weights of 3 bits; choose from 8, 7, 4"),
        (Quantise(7, "float32"), r"layer '3': weights of 7 bits are for layers that compute in integers"),
        (Quantise(4), r"layer '3': with 4-bit weights nothing computes in integers"),
        (Quantise(8, "int7"), r"layer '3': activations='int7'; choose uint8 or float32"),
    ],
)
def test_what_no_runtime_computes_is_refused(small_net: nn.Module, operation: Quantise, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        apply_plan(small_net, plan_of(small_net, layer3=(operation,)), images())


def test_grouped_layers_and_wrong_orders_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2))
    specs = inspect_layers(model, (4, 6, 6))
    plan = CompressionPlan((LayerPlan("0", (Quantise(),)),), fingerprint(specs), (4, 6, 6))
    with pytest.raises(PlanError, match=r"layer '0' cannot be quantised: grouped convolution"):
        build_structure(model, plan)
    with pytest.raises(PlanError, match="'factorise' stands after 'quantise'"):
        LayerPlan("0", (Quantise(), Factorise("cp", (2,))))


def test_every_candidate_comes_in_every_precision(small_net: nn.Module) -> None:
    library = FitLibrary(
        small_net, compressible_layers(small_net, SHAPE), ["cp", "tensor_ring"], precisions=list(PRECISIONS)
    )
    site = library.candidates("3", limit=2)
    texts = [str(each) for each in site.candidates]
    assert {"int8", "int8 weights", "int4 weights", "dense"} <= set(texts)
    assert texts[-1] == "dense"
    cp = [text for text in texts if text.startswith("cp")]
    assert len(cp) == len(PRECISIONS) * sum(text.count(";") == 0 for text in cp)
    by_text = dict(zip(texts, site.candidates, strict=True))
    errors = [by_text[name].error for name in ("int8 weights", "int8", "int7", "int4 weights")]
    assert errors[0] > 0
    assert errors == sorted(errors)
    for text, candidate in by_text.items():
        assert candidate.integer == text.endswith(("int8", "int7"))
        if text.endswith(("int8 weights", "int4 weights")) and ";" in text:
            # The last stage is solved for anew, which may be worth more than what 8 bits lose.
            assert candidate.error > 0.99 * by_text[text.split(";")[0]].error
    with pytest.raises(DecompositionError, match="there is no precision 'int3'; choose from float32, int8"):
        FitLibrary(small_net, compressible_layers(small_net, SHAPE), "cp", precisions=["int3"])
    with pytest.raises(DecompositionError, match="no precision was given"):
        FitLibrary(small_net, compressible_layers(small_net, SHAPE), "cp", precisions=[])


def test_layers_can_be_kept_from_rounding(small_net: nn.Module) -> None:
    specs = compressible_layers(small_net, SHAPE)
    library = FitLibrary(small_net, specs, "cp", precisions=["int8_weights"], unrounded=["3"])
    for spec in specs:
        *changed, _ = library.unfitted(spec.name).candidates
        assert changed
        rounded = [any(isinstance(each, Quantise) for each in one.operations) for one in changed]
        assert all(rounded) if spec.name != "3" else not any(rounded)


def test_weights_are_stored_in_integers_where_nothing_computes_with_them(small_net: nn.Module) -> None:
    specs = compressible_layers(small_net, SHAPE)
    library = FitLibrary(small_net, specs, "tucker", precisions=["float32", "int8"], floating=["3"])
    for spec in specs:
        *changed, _ = library.unfitted(spec.name).candidates
        roundings = {each for one in changed for each in one.operations if isinstance(each, Quantise)}
        assert {each.integer for each in roundings} == {spec.name != "3"}
