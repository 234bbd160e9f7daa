"""What replaced layers carry: frozen stays frozen, what cannot be kept is named once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from decomposition import (
    FitOptions,
    apply_plan,
    build_structure,
    contracted,
    list_formats,
    load_compressed,
    make_plan,
    plain_attention,
    plain_layers,
    plain_transposed,
    save_compressed,
)

X = torch.randn(8, 3, 8, 8)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(256, 4)
    ).eval()


def frozen(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}


@pytest.mark.parametrize("tensor_format", list_formats())
@pytest.mark.parametrize("tensorised", [False, True])
def test_factors_of_a_frozen_layer_are_frozen(tensor_format: str, tensorised: bool) -> None:
    model = network()
    model[2].weight.requires_grad_(False)
    model[4].requires_grad_(False)
    try:
        plan = make_plan(model, X, tensor_format, 4, tensorised=tensorised)
    except ValueError:
        pytest.skip(f"{tensor_format} is not tensorised")
    small = apply_plan(model, plan, X, options=FitOptions(iterations=2))
    for made in (small, build_structure(model, plan), contracted(small)):
        cores = {name for name, _ in made.named_parameters() if name.startswith(("2.", "4."))}
        bias = {name for name, parameter in made.named_parameters() if parameter is made[2].bias}  # type: ignore[index]
        assert len(bias) == 1
        assert frozen(made) == cores - bias
    dense = small[2].to_dense()  # type: ignore[index, operator]
    assert frozen(dense) == {"weight"}


def test_projections_of_frozen_attention_and_transposed_layers_are_frozen() -> None:
    attention, transposed = nn.MultiheadAttention(8, 2), nn.ConvTranspose2d(3, 4, 2)
    for layer in (attention, transposed):
        layer.requires_grad_(False)
    assert not any(p.requires_grad for p in plain_attention(attention).parameters())
    assert not any(p.requires_grad for p in plain_transposed(transposed).parameters())


class Tagged(nn.Conv2d):
    """A subclass with an attribute of its own."""

    def __init__(self) -> None:
        super().__init__(16, 16, 3)
        self.purpose = "mixing"


def _hook(model: nn.Sequential) -> nn.Module:
    model[2].register_forward_hook(lambda module, inputs, output: None)
    model[2].register_forward_pre_hook(lambda module, inputs: None)
    return model


def _attribute(model: nn.Sequential) -> nn.Module:
    model[2].teacher_index = 3
    model[2].register_buffer("seen", torch.zeros(1))
    return model


@pytest.mark.parametrize(
    ("mark", "named"),
    [
        (_hook, "'2': forward hooks, forward pre-hooks"),
        (_attribute, "'2': the attribute teacher_index, the attribute seen"),
    ],
)
def test_hooks_and_attributes_are_named_once(
    mark: Callable[[nn.Sequential], nn.Module],
    named: str,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    model = mark(network())
    plan = make_plan(model, X, "tucker", {"0": 2})
    with caplog.at_level(logging.WARNING):
        apply_plan(model, plan)
        assert not caplog.messages  # the layer keeps what it carries
        plan = make_plan(model, X, "tucker", {"2": 4})
        small = apply_plan(model, plan)
        apply_plan(model, plan)
        save_compressed(small, plan, tmp_path / "small.safetensors", dense=model)
    assert len(caplog.messages) == 1
    assert named in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        load_compressed(mark(network()), tmp_path / "small.safetensors")
    assert named in caplog.text


def test_what_rewriting_leaves_behind_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    model[2] = Tagged()
    with caplog.at_level(logging.WARNING):
        plain = plain_layers(model, ["2"], X)
    assert "'2': the attribute purpose" in caplog.text
    assert type(plain[2]) is nn.Conv2d
