"""Networks that change their inputs in place, and inputs of other classes than `torch.Tensor`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from centring import Centre
from torch import nn
from torchvision import tv_tensors

from decomposition import (
    DecompositionError,
    FitOptions,
    apply_plan,
    collect_moments,
    collect_sensitivities,
    count_macs,
    inspect_layers,
    make_plan,
    plan_by_heuristic,
    reestimate_batch_norm,
)
from decomposition.network.inputs import as_inputs, plain, run_model

QUICK = FitOptions(iterations=10)


def centred(*, in_place: bool) -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(inplace=True), nn.Conv2d(12, 12, 3)
    return nn.Sequential(Centre(in_place=in_place), *convolutions).eval()


@pytest.fixture
def images() -> torch.Tensor:
    return 2 * torch.rand(24, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_network_that_changes_its_inputs_is_treated_like_one_that_does_not(images: torch.Tensor) -> None:
    kept = images.clone()
    found: list[dict[str, Any]] = []
    for in_place in (False, True):
        model = centred(in_place=in_place)
        specs = inspect_layers(model, images)
        options: Any = {"calibration": images, "options": QUICK}
        plan = plan_by_heuristic(model, images, "tucker", "greedy", 0.6, candidates=4, **options)
        small = apply_plan(model, plan, images, options=QUICK, batch_norm="reestimate")
        reestimate_batch_norm(model, images.split(8))
        found.append(
            {
                "macs": count_macs(model, images),
                "plan": [layer.operations for layer in plan],
                "moments": collect_moments(model, specs, images)["1"].mean,
                "sensitivities": collect_sensitivities(model, specs, images)["1"],
                "output": run_model(small, images),
                "mean": model[2].running_mean,
            }
        )
        assert torch.equal(images, kept)
        assert images._version == 0
    before, after = found
    for name, value in before.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(after[name], value, msg=name)
        else:
            assert after[name] == value, name


@pytest.mark.parametrize("kind", [nn.Parameter, tv_tensors.Image], ids=["parameter", "image"])
def test_inputs_of_other_classes_are_plain_tensors_to_the_network(kind: Any, images: torch.Tensor) -> None:
    model, given = centred(in_place=True), kind(images.clone())
    specs = inspect_layers(model, given)
    seen = []
    model[1].register_forward_pre_hook(lambda _, inputs: seen.append(type(inputs[0])))
    found, expected = (collect_moments(model, specs, each)["1"] for each in ([given], [images]))
    assert type(found.mean) is torch.Tensor
    assert torch.equal(found.mean, expected.mean)
    small = apply_plan(model, make_plan(model, given, "tucker", 4), given, options=QUICK)
    assert {type(each) for each in small.state_dict().values()} == {torch.Tensor}
    assert set(seen) == {torch.Tensor}
    assert torch.equal(given, images)


def test_plain_tensors_share_the_memory_of_what_they_are_made_from(images: torch.Tensor) -> None:
    assert plain(images) is images
    for given in (nn.Parameter(images), tv_tensors.Image(images), images.clone().requires_grad_()):
        found = plain(given)
        assert type(found) is torch.Tensor
        assert not found.requires_grad
        assert found.data_ptr() == given.data_ptr()


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
def test_tensors_without_one_number_beside_the_other_are_refused(images: torch.Tensor) -> None:
    ragged = torch.nested.nested_tensor([images[0], images[1, :, :4]], layout=torch.jagged)
    quantised = torch.quantize_per_tensor(images, 0.1, 0, torch.quint8)
    for given, kind in ((images.to_sparse(), "sparse_coo"), (quantised, "quint8"), (ragged, "jagged")):
        with pytest.raises(DecompositionError, match=f"{kind}.*; give a dense tensor"):
            as_inputs(given)
