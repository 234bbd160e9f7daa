"""Plans with kept channels: carried out, saved, loaded, exported, and decomposed in the same plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rankrl.workflow.apply import specs_after_removal
from torch import nn

import rankrl
from decomposition import (
    CompressionPlan,
    FitOptions,
    PlanError,
    count_parameters,
    factorised_layers,
    inspect_layers,
    make_plan,
    save_compressed,
)
from pruning import channel_groups, get_pruner, keep_share, removable_groups, remove_channels
from rankrl.export import verify_onnx
from rankrl.models import create_model
from rankrl.models.resnet import CifarResNet
from rankrl.workflow.prune import removal_plan

SHAPE = (3, 8, 8)
QUICK = FitOptions(iterations=10)


def network(name: str = "resnet8") -> nn.Module:
    """An untrained network whose batch norms do something."""
    torch.manual_seed(0)
    if name == "resnet8":
        model: nn.Module = CifarResNet(1, SHAPE[0], 10).eval()
    else:
        model = create_model(name, input_shape=SHAPE, num_classes=10).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    return model


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(64, *SHAPE, generator=torch.Generator().manual_seed(0))


def pruning_plan(model: nn.Module, images: torch.Tensor, share: float = 0.5) -> CompressionPlan:
    """Half of the channels of every group, by magnitude."""
    every = channel_groups(model, images[:2])
    groups = removable_groups(every)
    scores = get_pruner("magnitude").definition(model, groups, None, None)
    return removal_plan(model, SHAPE, keep_share(groups, scores, share), every, "magnitude")


def combined_plan(model: nn.Module, images: torch.Tensor, name: str) -> CompressionPlan:
    """Prune, then decompose what is left, in one plan."""
    kept = pruning_plan(model, images).kept_channels
    pruned = remove_channels(model, kept, images[:2])
    return make_plan(pruned, SHAPE, name, 3).with_removal(model, kept)


@pytest.mark.parametrize("name", ["resnet8", "conv4"])
def test_channels_are_removed_and_nothing_else_changes(name: str, images: torch.Tensor) -> None:
    model = network(name)
    plan = pruning_plan(model, images)
    pruned = rankrl.carry_out(model, plan)
    expected = remove_channels(model, plan.kept_channels, images[:2])
    assert torch.equal(pruned(images), expected(images))
    assert count_parameters(pruned) < 0.3 * count_parameters(model)
    assert [spec.out_channels for spec in specs_after_removal(model, plan)] == [
        spec.out_channels for spec in inspect_layers(pruned, SHAPE)
    ]


@pytest.mark.parametrize("how", [{"batch_norm": "reestimate"}, {"sequential": False}])
def test_statistics_are_reestimated_on_calibration_inputs_if_wanted(
    how: dict[str, Any], images: torch.Tensor
) -> None:
    model = network()
    plan = pruning_plan(model, images)
    plain, corrected = rankrl.carry_out(model, plan), rankrl.carry_out(model, plan, images, **how)
    kept = rankrl.carry_out(model, plan, images.split(32), batch_norm="keep", sequential=False)
    assert torch.equal(plain.bn1.running_mean, kept.bn1.running_mean)
    with torch.no_grad():
        inputs = corrected.conv1(images)
    torch.testing.assert_close(corrected.bn1.running_mean, inputs.mean((0, 2, 3)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["resnet8", "conv4"])
def test_what_stays_makes_up_for_what_goes(name: str, images: torch.Tensor) -> None:
    model = network(name)
    plan = pruning_plan(model, images, 0.7)
    with torch.no_grad():
        wanted = model(images)
        errors = {
            sequential: (rankrl.carry_out(model, plan, images, sequential=sequential)(images) - wanted).norm()
            for sequential in (True, False)
        }
    assert errors[True] < 0.7 * errors[False]


@pytest.mark.parametrize("name", ["tucker", "tensor_ring"])
def test_one_plan_prunes_and_decomposes_and_its_model_comes_back(
    name: str, images: torch.Tensor, tmp_path: Path
) -> None:
    model = network()
    plan = combined_plan(model, images, name)
    plan.save(tmp_path / "plan.json")
    assert CompressionPlan.load(tmp_path / "plan.json") == plan
    small = rankrl.carry_out(model, plan, images, options=QUICK)
    assert factorised_layers(small)
    assert {s.name for s in specs_after_removal(model, plan)} == {
        s.name for s in inspect_layers(model, SHAPE)
    }
    save_compressed(small, plan, tmp_path / "small.safetensors")
    loaded, stored = rankrl.load_compressed(network(), tmp_path / "small.safetensors")
    assert stored == plan
    with torch.no_grad():
        assert torch.equal(small(images), loaded.eval()(images))
    rankrl.export_onnx(loaded, tmp_path / "small.onnx", SHAPE)
    assert verify_onnx(small, tmp_path / "small.onnx", images) <= 1e-4


def test_a_plan_without_kept_channels_is_carried_out_as_ever(images: torch.Tensor) -> None:
    model = network("conv4")
    plan = make_plan(model, SHAPE, "tucker", 4)
    small = rankrl.carry_out(model, plan, options=QUICK)
    assert set(factorised_layers(small)) == {layer.name for layer in plan if layer.format is not None}


def test_plans_for_other_models_are_refused(images: torch.Tensor) -> None:
    plan = pruning_plan(network("conv4"), images)
    with pytest.raises(PlanError, match="made for another model"):
        rankrl.carry_out(network("resnet8"), plan)


def test_kept_channels_that_do_not_fit_are_refused_by_layer(images: torch.Tensor, tmp_path: Path) -> None:
    model = network()
    content = json.loads(pruning_plan(model, images).to_json())
    stream = next(layer for layer in content["layers"] if layer["name"] == "layer1.0.conv2")
    stream["kept"] = [channel for channel in range(16) if channel not in stream["kept"]]
    with pytest.raises(PlanError, match=r"kept channels do not fit the network: layer '.*coupled with"):
        rankrl.carry_out(model, CompressionPlan.from_json(json.dumps(content)))
    stream["kept"] = [0, 99]
    with pytest.raises(PlanError, match=r"layer1\.0\.conv2.*from 0 to 15"):
        rankrl.carry_out(model, CompressionPlan.from_json(json.dumps(content)))
