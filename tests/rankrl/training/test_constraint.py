"""Training towards a plan: the penalty is the formula's, weights come nearer, and a killed run goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from decomposition import CompressionPlan, apply_plan, list_formats, make_plan
from decomposition.calibration.metric import whole
from decomposition.calibration.moments import collect_moments
from decomposition.calibration.sensitivity import collect_sensitivities
from decomposition.calibration.sensitivity_root import floored
from rankrl.data import ImageData
from rankrl.data.calibration import calibration_images
from rankrl.device import Precision
from rankrl.errors import ConfigError
from rankrl.training import RankConstraint, TrainingProgress, TrainingRecipe, train

MakeNetwork = Callable[[int], nn.Module]
FLOAT32 = Precision(torch.device("cpu"), torch.float32)
RECIPE = TrainingRecipe(epochs=2, lr=5e-3, batch_size=64, restore_best=False)


@pytest.fixture
def images(digits: ImageData) -> torch.Tensor:
    return calibration_images(digits, 128, seed=0)


def constrained(
    model: nn.Module,
    images: torch.Tensor,
    tensor_format: str = "tucker",
    rank: int = 2,
    strength: float = 1.0,
) -> RankConstraint:
    plan = make_plan(model, tuple(images.shape[1:]), tensor_format, rank)
    return RankConstraint(model, plan, images, strength=strength, growth=1.5)


@pytest.mark.parametrize("tensor_format", list_formats())
def test_the_penalty_is_the_loss_of_the_networks_output(
    make_network: MakeNetwork, images: torch.Tensor, tensor_format: str
) -> None:
    model = make_network(0)
    plan = make_plan(model, tuple(images.shape[1:]), tensor_format, 2)
    constraint = constrained(model, images, tensor_format, strength=3.0)
    specs = [spec for spec in plan.specs(model) if plan[spec.name].operations]
    moments = collect_moments(model, specs, images, seed=0)
    sensitivities = collect_sensitivities(model, specs, images, seed=0)
    expected, state = 0.0, constraint.state()
    for spec in specs:
        weight = model.get_submodule(spec.name).weight.detach().double().flatten(1)
        change = weight - state[f"target.{spec.name}"].flatten(1)
        metric = whole(moments[spec.name].metric(centred=False)).double()
        expected += 1.5 * float(torch.trace(floored(sensitivities[spec.name]) @ change @ metric @ change.T))
    penalty = constraint.penalty()
    assert float(penalty.detach()) == pytest.approx(expected, rel=1e-4)
    penalty.backward()
    assert all(bool(model.get_submodule(spec.name).weight.grad.abs().sum() > 0) for spec in specs)


def test_what_a_plan_can_represent_already_is_not_pulled(
    make_network: MakeNetwork, images: torch.Tensor
) -> None:
    model = make_network(0)
    plan = make_plan(model, tuple(images.shape[1:]), "tucker", 2)
    inside = copy.deepcopy(model)
    for name, layer in apply_plan(model, plan).named_modules():
        if hasattr(layer, "to_dense"):
            inside.get_submodule(name).weight.data.copy_(layer.to_dense().weight)
    constraint = RankConstraint(inside, plan, images, strength=1.0, growth=1.0)
    assert constraint.distance() < 1e-3
    free = constrained(model, images)
    assert float(constraint.penalty().detach()) < 1e-4 * float(free.penalty().detach())


def test_weights_come_nearer_to_the_plan_than_without(
    digits: ImageData, trained: nn.Module, images: torch.Tensor
) -> None:
    distances = {}
    for pulled in (False, True):
        model = copy.deepcopy(trained)
        constraint = constrained(model, images, strength=0.1)
        result = train(model, digits, RECIPE, precision=FLOAT32, constraint=constraint if pulled else None)
        distances[pulled] = constraint.distance()
        assert result.accuracy > 0.8
    assert distances[True] < 0.8 * distances[False]


def test_multipliers_follow_the_method(make_network: MakeNetwork, images: torch.Tensor) -> None:
    model = make_network(0)
    constraint = constrained(model, images)
    before = constraint.state()
    constraint.end_epoch()
    after = constraint.state()
    assert float(after["strength"]) == pytest.approx(1.5 * float(before["strength"]))
    for key, dual in after.items():
        if key.startswith("dual."):
            name = key.removeprefix("dual.")
            layer = model.get_submodule(name)
            weight = layer.weight.detach().double().reshape(dual.shape)
            # The first projection was that of W alone, and so is the second: U was 0.
            assert torch.allclose(dual, (weight - before[f"target.{name}"]) / 1.5, atol=1e-6)
            assert not bool(before[key].any())


class KilledError(Exception):
    """Stands for a killed process."""


@pytest.mark.parametrize("halvings", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_killed_training_goes_on_to_the_bit(
    digits: ImageData, make_network: MakeNetwork, images: torch.Tensor, tmp_path: Path, halvings: int
) -> None:
    recipe = TrainingRecipe(epochs=3, lr=3e-3, batch_size=64, restore_best=False, halvings=halvings)
    path = tmp_path / "state.safetensors"
    undisturbed = make_network(0)
    train(undisturbed, digits, recipe, precision=FLOAT32, constraint=constrained(undisturbed, images))

    def kill(progress: TrainingProgress) -> None:
        if progress.epoch == 3:
            raise KilledError

    for stop in (kill, None):
        model = make_network(0)
        constraint = constrained(model, images)
        try:
            train(
                model,
                digits,
                recipe,
                precision=FLOAT32,
                constraint=constraint,
                state_file=path,
                resume=path.exists(),
                on_step=stop,
            )
        except KilledError:
            continue
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), undisturbed.parameters(), strict=True))


@pytest.mark.parametrize(("strength", "growth"), [(0.0, 1.0), (1.0, 0.5), (float("inf"), 1.0)])
def test_senseless_numbers_are_refused(
    make_network: MakeNetwork, images: torch.Tensor, strength: float, growth: float
) -> None:
    model = make_network(0)
    plan = make_plan(model, tuple(images.shape[1:]), "tucker", 2)
    with pytest.raises(ConfigError, match=r"constrain\.strength must be positive"):
        RankConstraint(model, plan, images, strength=strength, growth=growth)


def test_a_plan_that_factorises_nothing_is_refused(make_network: MakeNetwork, images: torch.Tensor) -> None:
    model = make_network(0)
    full = make_plan(model, tuple(images.shape[1:]), "tucker", 2)
    layers = tuple(type(layer)(layer.name) for layer in full.layers)
    nothing = CompressionPlan(layers, full.fingerprint, full.input_shape)
    with pytest.raises(ConfigError, match="factorises no layer"):
        RankConstraint(model, nothing, images, strength=1.0, growth=1.0)
