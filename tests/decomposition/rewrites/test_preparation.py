"""What is rewritten in a network before its plan is in the plan, and is repeated where the plan is used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from decomposition import (
    CompressionPlan,
    PlanError,
    Rewrite,
    apply_plan,
    build_structure,
    inspect_layers,
    load_compressed,
    make_plan,
    plain_attention,
    plain_layers,
    plain_transposed,
    plain_weights,
    plan_by_heuristic,
    save_compressed,
)


class OwnConv(nn.Conv2d):
    """A subclass that computes what it extends."""


class Everything(nn.Module):
    """A convolution of one's own, one with weight norm, a transposed one, and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first = OwnConv(3, 16, 3, padding=1)
        self.norm = parametrizations.weight_norm(nn.Conv2d(16, 16, 3, padding=1))
        self.up = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.norm(self.first(x).relu()).relu()).relu()
        x = x.flatten(2).transpose(1, 2)
        return self.last(self.attention(x, x, x)[0].mean(1))


X = torch.randn(40, 3, 4, 4)


def rewritten(model: nn.Module) -> nn.Module:
    return plain_layers(plain_transposed(plain_attention(plain_weights(model))), ["first"], X)


REWRITES = (
    Rewrite("plain_weights", ("norm",)),
    Rewrite("plain_attention", ("attention",)),
    Rewrite("plain_transposed", ("up",)),
    Rewrite("plain_layers", ("first",)),
)


def test_a_plan_for_a_rewritten_network_is_carried_out_on_the_users_class(tmp_path: Path) -> None:
    model = Everything().eval()
    plain = rewritten(model)
    torch.testing.assert_close(plain(X), model(X))
    plan = make_plan(plain, X, "tucker", 4)
    assert plan.preparation == REWRITES
    assert {"first", "norm", "up.product", "attention.q_proj"} <= {e.name for e in plan if e.operations}
    plan.save(tmp_path / "plan.json")
    read = CompressionPlan.load(tmp_path / "plan.json")
    assert read == plan
    small, again = apply_plan(plain, plan, X), apply_plan(model, read, X)
    torch.testing.assert_close(again(X), small(X), rtol=0, atol=0)
    for dense in (None, plain, model):
        save_compressed(small, plan, tmp_path / "small.safetensors", dense=dense)
    for architecture in (Everything(), plain, nn.DataParallel(Everything())):
        loaded, stored = load_compressed(architecture, tmp_path / "small.safetensors")
        assert stored == plan
        torch.testing.assert_close(loaded.eval()(X), small(X), rtol=0, atol=0)
    assert type(model.up) is nn.ConvTranspose2d


def test_layers_of_the_users_own_class_that_were_not_rewritten_stay() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = plain_transposed(nn.ConvTranspose2d(8, 8, 2))
            self.other = nn.ConvTranspose2d(8, 8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(self.plain(x))

    plan = make_plan(Own(), (8, 4, 4), "tucker", 2)
    assert plan.preparation == (Rewrite("plain_transposed", ("plain",)),)
    assert type(build_structure(Own(), plan).other) is nn.ConvTranspose2d


def test_a_plan_without_rewriting_says_nothing_of_it(small_net: nn.Module) -> None:
    plan = plan_by_heuristic(plain_weights(small_net), (3, 8, 8), "tucker", "uniform", 0.6, candidates=3)
    assert plan.preparation == ()
    content = json.loads(plan.to_json())
    assert "preparation" not in content


@pytest.mark.parametrize(
    "entries",
    [{}, [1], [{"rewrite": "plain_attention"}], [{"rewrite": "anything", "layers": ["a"]}],
     [{"rewrite": "plain_attention", "layers": []}], [{"rewrite": "plain_attention", "layers": [1]}]],
)  # fmt: skip
def test_a_damaged_preparation_is_refused(entries: object) -> None:
    content = json.loads(make_plan(rewritten(Everything().eval()), X, "tucker", 4).to_json())
    content["preparation"] = entries
    with pytest.raises(PlanError, match="preparation"):
        CompressionPlan.from_json(json.dumps(content))


def _old(function: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    def made(layer: nn.Module) -> nn.Module:
        with pytest.warns(FutureWarning):
            return function(layer)

    return made


COMPUTED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old weight norm": _old(nn.utils.weight_norm),
    "old spectral norm": nn.utils.spectral_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    "pruned twice": lambda layer: prune.random_structured(
        prune.l1_unstructured(layer, "weight", 0.3), "weight", 1, dim=0
    ),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("compute", COMPUTED.values(), ids=COMPUTED.keys())
def test_weights_that_are_computed_at_every_call_become_parameters(
    compute: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    def network() -> nn.Sequential:
        return nn.Sequential(compute(nn.Linear(16, 16)), nn.ReLU(), compute(nn.Linear(16, 4)))

    model, x = network(), torch.randn(30, 16)
    for layer in (model[0], model[2]):
        for parameter in layer.parameters():
            parameter.data.add_(0.01)
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    refused = [spec.refusal or "" for spec in inspect_layers(model, x)]
    assert all("decomposition.plain_weights(model)" in each for each in refused)
    model.eval()
    before, keys = model(x), [*model.state_dict()]
    plain = plain_weights(model.train())
    torch.testing.assert_close(plain(x), before)
    assert [*model.state_dict()] == keys
    assert type(plain[0]) is nn.Linear
    assert {name: p.requires_grad for name, p in plain.named_parameters()} == {
        "0.weight": True, "0.bias": True, "2.weight": False, "2.bias": False
    }  # fmt: skip
    plan = make_plan(plain, x, "tucker", {"0": 4})
    small = apply_plan(model, plan, x).eval()
    save_compressed(small, plan, tmp_path / "small.safetensors", dense=model)
    loaded, _ = load_compressed(network(), tmp_path / "small.safetensors")
    torch.testing.assert_close(loaded.eval()(x), small(x), rtol=0, atol=0)


def test_recurrent_weights_become_parameters_that_the_layer_uses() -> None:
    layer = parametrizations.weight_norm(nn.LSTM(4, 6, batch_first=True), "weight_hh_l0").eval()
    x = torch.randn(2, 5, 4)
    plain = plain_weights(layer)
    torch.testing.assert_close(plain(x)[0], layer(x)[0])
    with torch.no_grad():
        plain.weight_hh_l0.zero_()
    assert not torch.equal(plain(x)[0], layer(x)[0])
