"""Quick refits become what applying the plan becomes, and depend on nothing but the plan."""

import copy
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

from decomposition import Quantise, apply_plan, list_formats, make_plan
from decomposition.choose.library import FitLibrary
from decomposition.choose.quick_refit import QuickRefit
from decomposition.errors import DecompositionError
from decomposition.fit.fit_options import FitOptions
from decomposition.fit.fitting import Fitter
from decomposition.operations import Factorise, LayerOperation

SHAPE = (3, 10, 10)
OPTIONS = FitOptions(iterations=40)
Library = Callable[[str], FitLibrary]


class Block(nn.Module):
    """Convolutions with and without batch norm and bias, one of them called twice, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.twice = nn.Conv2d(8, 8, 3, padding=1)
        self.last = nn.Conv2d(8, 12, 3, stride=2)
        self.head = nn.Linear(12 * 16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(x)))
        x = torch.relu(self.twice(torch.relu(self.twice(x))))
        return self.head(torch.relu(self.last(x)).flatten(1))


def new_block() -> nn.Module:
    torch.manual_seed(0)
    model = Block()
    model.norm.running_mean.normal_(0, 0.1)
    model.norm.running_var.uniform_(0.5, 2)
    return model.eval()


@pytest.fixture
def block() -> nn.Module:
    return new_block()


@pytest.fixture(scope="module")
def inputs() -> torch.Tensor:
    # Smooth, so that few directions hold most of the energy, as in images.
    noise = torch.randn(64, 3, 14, 14, generator=torch.Generator().manual_seed(1))
    return nn.functional.avg_pool2d(noise, 5, stride=1)


@pytest.fixture(scope="module")
def library(inputs: torch.Tensor) -> Library:
    """The fits of the block's layers in a format, calibrated once for all tests."""

    @cache
    def calibrated(tensor_format: str) -> FitLibrary:
        return FitLibrary.calibrated(new_block(), SHAPE, tensor_format, inputs, options=OPTIONS)

    return calibrated


def operations(
    fits: FitLibrary, rank: int = 4, layers: tuple[str, ...] = ("twice", "last")
) -> dict[str, tuple[LayerOperation, ...]]:
    found: dict[str, tuple[LayerOperation, ...]] = {}
    for name in layers:
        (each,) = fits.formats
        ranks = each.expand(fits.modes(name, each), rank)
        found[name] = (Factorise(each.name, ranks),)
    return found


def outputs(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(inputs)


def lost(model: nn.Module, dense: nn.Module, inputs: torch.Tensor) -> float:
    """Return the squared change of the outputs over their variance."""
    wanted = outputs(dense, inputs)
    return float((outputs(model, inputs) - wanted).square().mean() / wanted.var(0).mean())


def applied(model: nn.Module, chosen: dict[str, tuple[LayerOperation, ...]], x: torch.Tensor) -> nn.Module:
    ranks = {name: each.ranks for name, (each,) in chosen.items() if isinstance(each, Factorise)}
    plan = make_plan(model, SHAPE, next(iter(chosen.values()))[0].format, ranks)
    return apply_plan(model, plan, x, options=OPTIONS, progress=False)


@pytest.mark.parametrize("name", list_formats())
def test_network_becomes_what_applying_the_plan_makes_of_it(
    block: nn.Module, inputs: torch.Tensor, library: Library, name: str
) -> None:
    fits = library(name)
    chosen = operations(fits)
    network = copy.deepcopy(block)
    QuickRefit(network, fits, inputs, options=OPTIONS).take(chosen)
    quick, whole = (lost(each, block, inputs) for each in (network, applied(block, chosen, inputs)))
    assert 0 < whole < 1  # something is lost, and something is left
    assert quick < 1.2 * whole


def test_a_layer_with_more_inputs_than_patches_is_fitted_like_the_others(
    block: nn.Module, inputs: torch.Tensor, library: Library
) -> None:
    fits = library("tucker")
    chosen = operations(fits, layers=("last", "head"))
    network = copy.deepcopy(block)
    QuickRefit(network, fits, inputs, options=OPTIONS).take(chosen)
    assert torch.linalg.matrix_rank(network.head.weight) == 4
    quick, whole = (lost(each, block, inputs) for each in (network, applied(block, chosen, inputs)))
    assert 0 < whole < 1
    assert quick < 1.2 * whole


def test_a_few_iterations_are_nearly_as_good_as_many(
    block: nn.Module, inputs: torch.Tensor, library: Library
) -> None:
    fits = library("cp")
    errors = []
    for options in (FitOptions(iterations=10), FitOptions(iterations=200)):
        network = copy.deepcopy(block)
        QuickRefit(network, fits, inputs, options=options).take(operations(fits))
        errors.append(lost(network, block, inputs))
    assert errors[0] < 1.1 * errors[1]


def test_refit_makes_up_for_what_apart_fits_lose(
    block: nn.Module, inputs: torch.Tensor, library: Library
) -> None:
    fits = library("cp")
    chosen = operations(fits, 3)
    apart, refitted = copy.deepcopy(block), copy.deepcopy(block)
    with torch.no_grad():
        for name, each in chosen.items():
            layer = dict(apart.named_modules())[name]
            layer.weight.copy_(fits.weight(name, each).reshape(layer.weight.shape))
    QuickRefit(refitted, fits, inputs).take(chosen)
    assert lost(refitted, block, inputs) < 0.5 * lost(apart, block, inputs)


def test_a_batch_norm_follows_the_mean_that_arrives(
    block: nn.Module, inputs: torch.Tensor, library: Library
) -> None:
    network = copy.deepcopy(block)
    QuickRefit(network, library("cp"), inputs).take(operations(library("cp"), 2, ("first",)))
    before, after = (outputs(nn.Sequential(each.first, each.norm), inputs) for each in (block, network))
    assert not torch.allclose(after, before, rtol=0, atol=0.1)
    torch.testing.assert_close(after.mean((0, 2, 3)), before.mean((0, 2, 3)), rtol=0, atol=1e-4)


def test_what_a_plan_becomes_does_not_depend_on_the_ones_before(
    block: nn.Module, inputs: torch.Tensor, library: Library
) -> None:
    fits = library("tucker")
    refit = QuickRefit(block, fits, inputs)
    plans = [operations(fits, 2), {}, {"first": (Quantise(),)}, operations(fits, 6)]
    found = []
    for each in [*plans, *reversed(plans)]:
        refit.take(each)
        found.append(outputs(block, inputs))
    for early, late in zip(found[:4], reversed(found[4:]), strict=True):
        assert torch.equal(early, late)
    assert not torch.equal(found[0], found[3])


@pytest.fixture
def taken_before(block: nn.Module, inputs: torch.Tensor, library: Library) -> tuple[nn.Module, QuickRefit]:
    """A copy of the block that has taken on a plan of its first layer, and what lets it take on others."""
    network = copy.deepcopy(block)
    refit = QuickRefit(network, library("cp"), inputs)
    refit.take(operations(library("cp"), 2, ("first",)))
    return network, refit


def test_a_plan_without_operations_leaves_what_the_network_computes(
    block: nn.Module, inputs: torch.Tensor, taken_before: tuple[nn.Module, QuickRefit]
) -> None:
    network, refit = taken_before
    refit.take({})
    torch.testing.assert_close(outputs(network, inputs), outputs(block, inputs), rtol=0, atol=1e-5)


def test_layers_in_front_of_the_first_operation_keep_their_weights(
    block: nn.Module, library: Library, taken_before: tuple[nn.Module, QuickRefit]
) -> None:
    network, refit = taken_before
    refit.take(operations(library("cp"), 2, ("last",)))
    for name, kept in (("first", True), ("twice", True), ("last", False)):
        one, other = (each.get_submodule(name) for each in (network, block))
        assert torch.equal(one.weight, other.weight) == kept
        assert one.bias is None or not kept or torch.equal(one.bias, other.bias)


def test_second_moments_are_exact_where_layers_compute_in_half_precision(
    block: nn.Module, inputs: torch.Tensor, library: Library
) -> None:
    fits = library("tucker")
    exact, half = copy.deepcopy(block), copy.deepcopy(block)
    QuickRefit(exact, fits, inputs).take(operations(fits))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        QuickRefit(half, fits, inputs).take(operations(fits))
    for name in ("first", "twice", "last", "head"):
        one, other = (dict(each.named_modules())[name].weight for each in (exact, half))
        assert other.norm() < 2 * one.norm()  # where they are not, a solved layer grows tenfold


def test_rounded_weights_are_integers_times_a_scale(
    block: nn.Module, inputs: torch.Tensor, library: Library
) -> None:
    QuickRefit(block, library("cp"), inputs).take({"last": (Quantise(),)})
    rows = block.last.weight.detach().flatten(1)
    levels = rows / (rows.abs().amax(1, keepdim=True) / 127)
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-3)


def test_operations_that_take_layers_away_are_refused(
    block: nn.Module, inputs: torch.Tensor, library: Library
) -> None:
    class Leaving(Quantise):
        kind = "leaving"
        removes = True

    refit = QuickRefit(block, library("cp"), inputs)
    with pytest.raises(DecompositionError, match=r"layer 'last': 'leaving' cannot be refitted .* apply"):
        refit.take({"last": (Leaving(),)})


def test_refit_without_inputs_is_refused(block: nn.Module, inputs: torch.Tensor, library: Library) -> None:
    with pytest.raises(DecompositionError, match="no inputs"):
        QuickRefit(block, library("cp"), inputs[:0])


@pytest.mark.parametrize("name", list_formats())
def test_a_fit_is_no_worse_than_where_it_starts(
    block: nn.Module, inputs: torch.Tensor, library: Library, name: str
) -> None:
    fits = library(name)
    ((operation,), _) = operations(fits).values()
    assert isinstance(operation, Factorise)
    weight, modes = fits.weights["twice"], operation.modes(fits.specs["twice"])
    metric = fits.moments["twice"].metric(centred=True)
    start = fits.fit("twice", operation).cores
    fitter = Fitter(operation.tensor_format, weight, modes, metric)
    before, after = (fitter.fit(operation.ranks, FitOptions(iterations=n), start) for n in (0, 20))
    difference = (weight - operation.tensor_format.reconstruct(start, modes)).flatten(1)
    given = float(((difference @ metric) * difference).sum())
    whole = float(((weight.flatten(1) @ metric) * weight.flatten(1)).sum())
    assert after.error <= before.error + 1e-6
    assert before.error <= (given / whole) ** 0.5 + 1e-6
