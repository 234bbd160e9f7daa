"""Residual blocks removed by a plan: chosen to a target, made up for, saved, decomposed in the same plan."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from untrained import with_statistics

from decomposition import (
    CompressionPlan,
    Factorise,
    FitOptions,
    LayerPlan,
    PlanError,
    apply_plan,
    build_structure,
    compensate,
    count_macs,
    load_compressed,
    make_plan,
    save_compressed,
)
from pruning import PruningError, remove_blocks
from rankrl.data import ImageData, load_dataset
from rankrl.data.sample import calibration_images
from rankrl.models.zoo import CifarResNet
from rankrl.operations import RemoveBlock, removed_blocks
from rankrl.pruners.options import PruningOptions, pruning_options
from rankrl.pruners.prune import PrunedNetwork, check_target, prune_network
from rankrl.verify.measure import layer_rows


def options(**given: object) -> PruningOptions:
    return pruning_options("blocks", given, params=None, macs=0.8)


@pytest.fixture(scope="module")
def data() -> ImageData:
    return load_dataset("digits", seed=0, train_images=512)


@pytest.fixture(scope="module")
def images(data: ImageData) -> torch.Tensor:
    return calibration_images(data, 256, seed=0)


@pytest.fixture(scope="module")
def model(data: ImageData) -> nn.Module:
    """An untrained ResNet-14 whose batch norms do something."""
    torch.manual_seed(0)
    return with_statistics(CifarResNet(2, data.input_shape[0], data.classes))


@pytest.fixture(scope="module")
def pruned(model: nn.Module, data: ImageData, images: torch.Tensor) -> PrunedNetwork:
    return prune_network(model, data, options(), images)


def test_the_target_is_met_and_the_plan_names_every_layer(
    pruned: PrunedNetwork, model: nn.Module, data: ImageData
) -> None:
    assert count_macs(pruned.network, data.input_shape) <= 0.8 * count_macs(model, data.input_shape)
    blocks = removed_blocks(pruned.plan.chosen(RemoveBlock))
    assert blocks
    assert all(isinstance(pruned.network.get_submodule(name), nn.Identity) for name in blocks)
    for layer in pruned.plan:
        block = next((name for name in blocks if layer.name.startswith(f"{name}.")), None)
        assert layer.operations == (() if block is None else (RemoveBlock(block),))
    reasons = {layer.name: layer.reason for layer in pruned.plan}
    assert reasons["conv1"] == "it is in no block that may be removed"
    assert "its block stays" in reasons.values()
    rows = {row.name: row for row in layer_rows(pruned.plan, model, pruned.network)}
    assert sum(row.macs_after for row in rows.values()) == count_macs(pruned.network, data.input_shape)
    assert rows[f"{blocks[0]}.conv1"].channels[0] == 0  # type: ignore[index]


def test_the_plan_gives_the_same_network_again(
    pruned: PrunedNetwork, model: nn.Module, data: ImageData, images: torch.Tensor, tmp_path: Path
) -> None:
    plan = CompressionPlan.from_json(pruned.plan.to_json())
    assert plan == pruned.plan
    again = prune_network(model, data, options(), images, state_file=tmp_path / "state.safetensors")
    restored = prune_network(model, data, options(), images, state_file=tmp_path / "state.safetensors")
    save_compressed(pruned.network, plan, tmp_path / "model.safetensors", dense=model)
    loaded = load_compressed(model, tmp_path / "model.safetensors")[0]
    expected = pruned.network.state_dict()
    for network in (again.network, restored.network, loaded):
        assert {*network.state_dict()} == {*expected} == {*build_structure(model, plan).state_dict()}
        assert all(torch.equal(value, expected[key]) for key, value in network.state_dict().items())


def test_what_stays_makes_up_for_a_block(model: nn.Module, images: torch.Tensor) -> None:
    blocks = ["layer1.1", "layer2.1"]
    with torch.no_grad():
        expected = model(images)
        lost = (remove_blocks(model, blocks)(images) - expected).square().mean()
        made_up = (compensate(model, {}, images, removed=blocks)(images) - expected).square().mean()
    assert made_up < 0.3 * lost


def test_a_block_that_adds_nothing_is_removed_without_a_trace(model: nn.Module, images: torch.Tensor) -> None:
    network = build_structure(model, CompressionPlan.from_json(_plan(model, {}).to_json()))
    network.load_state_dict(model.state_dict())
    norm = network.get_submodule("layer1.1").bn2
    nn.init.zeros_(norm.weight)
    nn.init.zeros_(norm.bias)
    with torch.no_grad():
        without = compensate(network, {}, images, removed=["layer1.1"])(images)
        torch.testing.assert_close(without, network(images), rtol=1e-3, atol=1e-3)


def test_blocks_and_ranks_make_one_plan(
    pruned: PrunedNetwork, model: nn.Module, data: ImageData, images: torch.Tensor
) -> None:
    chosen = make_plan(pruned.network, data.input_shape, "tucker", 3)
    plan = chosen.with_operations(model, pruned.plan.chosen(RemoveBlock))
    assert [layer.name for layer in plan] == [layer.name for layer in pruned.plan]
    options = FitOptions(iterations=30)
    both = apply_plan(model, CompressionPlan.from_json(plan.to_json()), images, options=options)
    apart = apply_plan(pruned.network, chosen, images, options=options)
    with torch.no_grad():
        torch.testing.assert_close(both(images[:4]), apart(images[:4]), rtol=1e-2, atol=1e-2)


def _plan(model: nn.Module, operations: dict[str, RemoveBlock]) -> CompressionPlan:
    plan = make_plan(model, (1, 8, 8), "tucker", {})
    layers = tuple(
        LayerPlan(each.name, (operations[each.name],)) if each.name in operations else each for each in plan
    )
    return replace(plan, layers=layers)


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        ({"layer1.1.conv1": "layer1.1"}, r"layer 'layer1\.1\.conv2' is in a block that is removed"),
        ({"layer1.1.conv1": "layer1.0"}, r"cannot be removed with block 'layer1\.0': it is not in it"),
        (
            {"layer2.0.conv1": "layer2.0", "layer2.0.conv2": "layer2.0"},
            r"'layer2\.0' is no residual block that can be removed from the network; choose from layer1\.0",
        ),
    ],
)
def test_plans_that_do_not_fit_are_refused(
    operations: dict[str, str], message: str, model: nn.Module, images: torch.Tensor
) -> None:
    plan = _plan(model, {name: RemoveBlock(block) for name, block in operations.items()})
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(PlanError, match=message):
        apply_plan(model, plan, images)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_layer_that_leaves_takes_no_other_operation() -> None:
    with pytest.raises(PlanError, match="removes the layer; it takes no other one"):
        LayerPlan("layer1.1.conv1", (RemoveBlock("layer1.1"), Factorise("cp", (3,))))


def test_targets_and_names_out_of_reach_are_refused_at_once(model: nn.Module, data: ImageData) -> None:
    with pytest.raises(PruningError, match="removable blocks the network still has"):
        check_target(model, data.input_shape, replace(options(), kept=0.1))
    with pytest.raises(PruningError, match=r"layer 'conv1' is in no block that can be removed"):
        check_target(model, data.input_shape, options(layers=["conv1"]))


def test_named_layers_say_which_blocks_may_go(
    model: nn.Module, data: ImageData, images: torch.Tensor
) -> None:
    chosen = replace(options(layers=["layer3.1.conv1"]), kept=0.9)
    plan = prune_network(model, data, chosen, images).plan
    assert removed_blocks(plan.chosen(RemoveBlock)) == ["layer3.1"]
