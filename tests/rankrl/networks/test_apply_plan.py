"""Plans with kept channels: applied, saved, loaded, exported, and decomposed in the same plan."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from untrained import with_statistics

import rankrl
from decomposition import (
    CompressionPlan,
    Factorise,
    FitOptions,
    LayerPlan,
    PlanError,
    apply_plan,
    build_structure,
    count_macs,
    count_parameters,
    factorised_layers,
    inspect_layers,
    load_compressed,
    make_plan,
    save_compressed,
)
from pruning import channel_groups, get_pruner, keep_share, removable_groups, remove_channels
from rankrl.models import create_model
from rankrl.models.zoo import CifarResNet
from rankrl.onnx.export import verify_onnx
from rankrl.operations import KeepChannels, kept_channels
from rankrl.pruners.prune import removal_plan

SHAPE = (3, 8, 8)
QUICK = FitOptions(iterations=10)


def network(name: str = "resnet8") -> nn.Module:
    """An untrained network whose batch norms do something."""
    torch.manual_seed(0)
    if name == "resnet8":
        return with_statistics(CifarResNet(1, SHAPE[0], 10))
    return with_statistics(create_model(name, input_shape=SHAPE, num_classes=10))


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.randn(64, *SHAPE, generator=torch.Generator().manual_seed(0))


class Transposed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(1, 2)


def pruning_plan(model: nn.Module, images: torch.Tensor, share: float = 0.5) -> CompressionPlan:
    """Half of the channels of every group, by magnitude."""
    every = channel_groups(model, images[:2])
    groups = removable_groups(every)
    scores = get_pruner("magnitude").definition(model, groups, None, None)
    return removal_plan(model, SHAPE, keep_share(groups, scores, share), every, "magnitude")


def combined_plan(model: nn.Module, images: torch.Tensor, name: str) -> CompressionPlan:
    """Prune, then decompose what is left, in one plan."""
    chosen = pruning_plan(model, images).chosen(KeepChannels)
    pruned = remove_channels(model, {n: list(o.indices) for n, o in chosen.items()}, images[:2])
    return make_plan(pruned, SHAPE, name, 3).with_operations(model, chosen)


@pytest.mark.parametrize("name", ["resnet8", "conv4"])
def test_channels_are_removed_and_nothing_else_changes(name: str, images: torch.Tensor) -> None:
    model = network(name)
    plan = pruning_plan(model, images)
    pruned = rankrl.apply_plan(model, plan)
    expected = remove_channels(model, kept_channels(plan), images[:2])
    assert torch.equal(pruned(images), expected(images))
    assert count_parameters(pruned) < 0.3 * count_parameters(model)
    assert [spec.out_channels for spec in plan.specs(model)] == [
        spec.out_channels for spec in inspect_layers(pruned, SHAPE)
    ]


def test_networks_with_layer_norms_are_pruned_made_up_for_saved_and_loaded(
    images: torch.Tensor, tmp_path: Path
) -> None:
    def stream(norm: type[nn.Module]) -> nn.Module:
        mlp = nn.Sequential(norm(16), nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16), norm(16))
        return nn.Sequential(
            nn.Conv2d(3, 16, 2, 2), nn.Flatten(2), Transposed(), mlp, nn.Linear(16, 5)
        ).eval()

    for norm in (nn.LayerNorm, nn.RMSNorm):
        torch.manual_seed(0)
        model = stream(norm)
        plan = pruning_plan(model, images, 0.5)
        assert {name: len(kept) for name, kept in kept_channels(plan).items()} == {
            "0": 8,
            "3.1": 12,
            "3.3": 8,
        }
        with torch.no_grad():
            wanted, cut = model(images), rankrl.apply_plan(model, plan)(images)
            made_up = rankrl.apply_plan(model, plan, images)
            assert torch.equal(cut, remove_channels(model, kept_channels(plan), images[:2])(images))
            assert (made_up(images) - wanted).norm() < 0.9 * (cut - wanted).norm()
            # As it is fitted, so it is: the last layer has the mean output that it had in the dense network.
            torch.testing.assert_close(
                made_up(images).mean((0, 1)), wanted.mean((0, 1)), atol=1e-4, rtol=1e-4
            )
            save_compressed(made_up, plan, tmp_path / "small.safetensors", dense=model)
            loaded, _ = load_compressed(stream(norm), tmp_path / "small.safetensors")
            assert torch.equal(loaded(images), made_up(images))


@pytest.mark.parametrize("how", [{"batch_norm": "reestimate"}, {"sequential": False}])
def test_statistics_are_reestimated_on_calibration_inputs_if_wanted(
    how: dict[str, Any], images: torch.Tensor
) -> None:
    model = network()
    plan = pruning_plan(model, images)
    plain, corrected = rankrl.apply_plan(model, plan), rankrl.apply_plan(model, plan, images, **how)
    kept = rankrl.apply_plan(model, plan, images.split(32), batch_norm="keep", sequential=False)
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
            sequential: (
                rankrl.apply_plan(model, plan, images, sequential=sequential)(images) - wanted
            ).norm()
            for sequential in (True, False)
        }
    assert errors[True] < 0.7 * errors[False]


@pytest.mark.parametrize("name", ["tucker", pytest.param("tensor_ring", marks=pytest.mark.slow)])
def test_one_plan_prunes_and_decomposes_and_its_model_comes_back(
    name: str, images: torch.Tensor, tmp_path: Path
) -> None:
    model = network()
    plan = combined_plan(model, images, name)
    plan.save(tmp_path / "plan.json")
    assert CompressionPlan.load(tmp_path / "plan.json") == plan
    small = rankrl.apply_plan(model, plan, images, options=QUICK)
    assert factorised_layers(small)
    assert [s.name for s in plan.specs(model)] == [s.name for s in inspect_layers(model, SHAPE)]
    structure = build_structure(model, plan)
    assert count_parameters(structure) == count_parameters(small)
    assert count_macs(structure, SHAPE) == count_macs(small, SHAPE)
    save_compressed(small, plan, tmp_path / "small.safetensors")
    loaded, stored = rankrl.load_compressed(network(), tmp_path / "small.safetensors")
    assert stored == plan
    with torch.no_grad():
        assert torch.equal(small(images), loaded.eval()(images))
    rankrl.export_onnx(loaded, tmp_path / "small.onnx", SHAPE)
    assert verify_onnx(small, tmp_path / "small.onnx", images) <= 1e-4


def test_a_plan_without_kept_channels_is_applied_as_ever(images: torch.Tensor) -> None:
    model = network("conv4")
    plan = make_plan(model, SHAPE, "tucker", 4)
    small = rankrl.apply_plan(model, plan, options=QUICK)
    assert set(factorised_layers(small)) == set(plan.chosen(Factorise))


def test_plans_for_other_models_are_refused(images: torch.Tensor) -> None:
    plan = pruning_plan(network("conv4"), images)
    with pytest.raises(PlanError, match="made for another model"):
        rankrl.apply_plan(network("resnet8"), plan)


VERBS = (apply_plan, rankrl.apply_plan)


def test_one_verb_and_one_reader_do_everything(images: torch.Tensor) -> None:
    model = network()
    plan = pruning_plan(model, images)
    same = zip(*(apply(model, plan, options=QUICK).state_dict().values() for apply in VERBS), strict=True)
    assert all(torch.equal(one, other) for one, other in same)
    assert rankrl.load_compressed is load_compressed


def test_kept_channels_that_do_not_fit_are_refused_by_layer(images: torch.Tensor) -> None:
    model = network()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    plan = pruning_plan(model, images)
    kept = kept_channels(plan)["layer1.0.conv2"]
    others = tuple(channel for channel in range(16) if channel not in kept)
    for indices, message in (
        (others, r"kept channels do not fit the network: layer '.*coupled with"),
        ((0, 99), r"layer 'layer1\.0\.conv2' cannot keep channels \[0, 99\]; give some of 0 to 15"),
        ((-1, 0), r"cannot keep channels \[-1, 0\]; give some of 0 to 15"),
        ((3, 1), r"cannot keep channels \[3, 1\]; give some of 0 to 15, sorted"),
        ((), r"layer 'layer1\.0\.conv2' cannot keep channels \[\]"),
    ):
        forged = replace(
            plan,
            layers=tuple(
                replace(layer, operations=(KeepChannels(indices),))
                if layer.name == "layer1.0.conv2"
                else layer
                for layer in plan
            ),
        )
        for refused in (lambda: apply_plan(model, forged, images), lambda: build_structure(model, forged)):  # noqa: B023
            with pytest.raises(PlanError, match=message):
                refused()
    after = model.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_operations_in_an_impossible_order_are_refused(images: torch.Tensor) -> None:
    keep, factorise = KeepChannels((0, 1)), Factorise("tucker", (2, 2))
    assert LayerPlan("conv1", (keep, factorise)).operations == (keep, factorise)
    with pytest.raises(
        PlanError,
        match="layer 'conv1': operation 'keep_channels' stands after 'factorise'; "
        "a layer takes 'keep_channels' before 'factorise'",
    ):
        LayerPlan("conv1", (factorise, keep))
    with pytest.raises(PlanError, match=r"layer 'conv1': .*a layer takes one operation of a kind"):
        LayerPlan("conv1", (keep, KeepChannels((1,)), factorise))
    content = json.loads(combined_plan(network(), images, "tucker").to_json())
    entry = next(layer for layer in content["layers"] if len(layer["operations"]) == 2)
    entry["operations"].reverse()
    with pytest.raises(PlanError, match=rf"layer '{entry['name']}': operation 'keep_channels' stands after"):
        CompressionPlan.from_json(json.dumps(content))


WRITTEN = """{
  "version": 3,
  "fingerprint": "57e129f3aff39ca0",
  "input_shape": [3, 10, 10],
  "chosen_by": "magnitude, then greedy",
  "layers": [
    {
      "name": "0",
      "operations": [
        {
          "operation": "keep_channels",
          "indices": [0, 2, 3, 7]
        }
      ],
      "reason": "no rank was given"
    },
    {
      "name": "3",
      "operations": [
        {
          "operation": "keep_channels",
          "indices": [0, 1, 2, 4, 5, 6, 8, 9, 10, 11]
        },
        {
          "operation": "factorise",
          "format": "tucker",
          "ranks": [3, 2]
        }
      ]
    },
    {
      "name": "7",
      "operations": [],
      "reason": "no rank was given"
    }
  ]
}
"""


def plain_network() -> nn.Module:
    """The network that the plan was written for."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 10),
    ).eval()


def test_a_plan_that_prunes_and_decomposes_is_written_like_this() -> None:
    model, plan = plain_network(), CompressionPlan.from_json(WRITTEN)
    kept = {"0": [0, 2, 3, 7], "3": [0, 1, 2, 4, 5, 6, 8, 9, 10, 11]}
    assert kept_channels(plan) == kept
    assert plan["3"].operations == (KeepChannels(tuple(kept["3"])), Factorise("tucker", (3, 2)))
    assert plan["7"] == LayerPlan("7", reason="no rank was given")
    assert plan.to_json() == WRITTEN
    pruned = remove_channels(model, kept, torch.zeros(2, 3, 10, 10))
    left = make_plan(pruned, (3, 10, 10), "tucker", {"3": (3, 2)}, chosen_by=plan.chosen_by)
    expected = apply_plan(pruned, left, options=QUICK).state_dict()
    found = apply_plan(model, plan, options=QUICK).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([], "layer '0'.*must be a sorted list"),
        ([2, 1], "must be a sorted list"),
        ([1, 1], "must be a sorted list"),
        ([-1, 1], "must be a sorted list"),
        ([True], "must be a sorted list"),
        (3, "must be a sorted list.* got 3"),
    ],
)
def test_damaged_channels_of_a_plan_are_refused(indices: object, message: str) -> None:
    content = json.loads(WRITTEN)
    content["layers"][0]["operations"][0]["indices"] = indices
    with pytest.raises(PlanError, match=message):
        CompressionPlan.from_json(json.dumps(content))
