"""Weight decay in groups acts on what a layer's cores contract to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from decomposition import apply_plan, decay_groups, factorised_layers, list_formats, make_plan


@pytest.mark.parametrize("name", list_formats())
def test_a_factorised_layer_decays_as_a_dense_one(name: str) -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3)).eval()
    dense[3].bias.requires_grad_(False)
    model = apply_plan(dense, make_plan(dense, (8, 8, 8), name, ranks=4)).train()
    groups = decay_groups(model, 0.1)
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert {id(parameter) for group in groups for parameter in group["params"]} == trained
    assert sum(len(group["params"]) for group in groups) == len(trained)
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    before = {key: layer.weight.detach() for key, layer in factorised_layers(model).items()}
    scale = model[1].weight.detach().clone()
    for _ in range(10):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert before
    for key, layer in factorised_layers(model).items():
        torch.testing.assert_close(layer.weight, (1 - 0.05 * 0.1) ** 10 * before[key], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(model[1].weight, scale)


def test_a_dense_network_decays_but_for_its_vectors() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    decays = {
        id(parameter): group["weight_decay"]
        for group in decay_groups(model, 0.2)
        for parameter in group["params"]
    }
    assert [decays[id(parameter)] for parameter in model.parameters()] == [0.2, 0.0, 0.0, 0.0]
