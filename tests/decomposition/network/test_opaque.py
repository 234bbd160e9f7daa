"""Recurrent layers and attention: listed, counted, refused with the reason, or made of linear layers."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from decomposition import (
    DecompositionError,
    FitOptions,
    PlainAttention,
    apply_plan,
    build_structure,
    contracted,
    count_macs,
    count_parameters,
    factorised_layers,
    fingerprint,
    inspect_layers,
    list_formats,
    load_compressed,
    make_plan,
    plain_attention,
    plain_layers,
    plain_transposed,
    plan_by_heuristic,
    save_compressed,
)
from decomposition.network.layers import OPAQUE_KINDS
from rankrl.onnx.export import export_onnx, verify_onnx

QUICK = FitOptions(iterations=10)
TOKENS = torch.randint(20, (24, 7), generator=torch.Generator().manual_seed(0))
WORDS = torch.randn(24, 7, 12, generator=torch.Generator().manual_seed(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embedding, self.first = nn.Embedding(20, 12), nn.Linear(12, 24)
        self.recurrent = kind(24, 16, batch_first=True, **options)
        self.last = nn.Linear(16 * (2 if self.recurrent.bidirectional else 1), 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(torch.relu(self.first(self.embedding(tokens))))
        logits: torch.Tensor = self.last(states.mean(1))
        return logits


class Cells(nn.Module):
    def __init__(self, kind: type[nn.LSTMCell | nn.GRUCell | nn.RNNCell]) -> None:
        super().__init__()
        self.cell, self.last = kind(12, 16), nn.Linear(16, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        state = None
        for step in words.unbind(1):
            state = self.cell(step, state)
        logits: torch.Tensor = self.last(state[0] if isinstance(state, tuple) else state)
        return logits


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_listed_counted_and_refused(kind: type[nn.RNNBase], options: Any) -> None:
    torch.manual_seed(0)
    model = Recurrent(kind, **options).eval()
    specs = {spec.name: spec for spec in inspect_layers(model, TOKENS)}
    found = specs["recurrent"]
    assert found.kind == kind.__name__.lower()
    assert found.weight_shape == tuple(model.recurrent.weight_ih_l0.shape)
    assert found.params == sum(p.numel() for p in model.recurrent.parameters())
    assert found.refusal is not None
    assert kind.__name__ in found.refusal
    assert sum(spec.macs for spec in specs.values()) == count_macs(model, TOKENS)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells_are_counted_at_every_call(kind: type[nn.LSTMCell]) -> None:
    specs = inspect_layers(Cells(kind), WORDS)
    assert [spec.kind for spec in specs] == [kind.__name__.lower()[:-4], "linear"]
    assert len(specs[0].input_sizes) == 7
    assert sum(spec.macs for spec in specs) == count_macs(Cells(kind), WORDS)


@pytest.mark.parametrize("sequential", [True, False])
def test_what_surrounds_a_recurrent_layer_is_compressed(sequential: bool) -> None:
    torch.manual_seed(0)
    model = Recurrent(nn.LSTM).eval()
    plan = plan_by_heuristic(model, TOKENS, "tucker", "greedy", 0.97, calibration=TOKENS, options=QUICK)
    assert "at every step of a sequence" in (plan["recurrent"].reason or "")
    small = apply_plan(model, plan, TOKENS, sequential=sequential, options=QUICK)
    assert set(factorised_layers(small)) <= {"first", "last"}
    assert count_parameters(small) < count_parameters(model)
    assert isinstance(small.recurrent, nn.LSTM)


@pytest.mark.slow
def test_recurrent_network_is_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Recurrent(nn.GRU).eval()
    export_onnx(model, tmp_path / "model.onnx", TOKENS)
    assert verify_onnx(model, tmp_path / "model.onnx", TOKENS) < 1e-5


def test_plans_made_before_these_layers_were_listed_still_fit() -> None:
    model = Recurrent(nn.LSTM)
    plan = make_plan(model, TOKENS, "tucker", 3)
    specs = [spec for spec in inspect_layers(model, TOKENS) if spec.kind not in OPAQUE_KINDS]
    older = replace(
        plan,
        fingerprint=fingerprint(specs),
        layers=tuple(layer for layer in plan if layer.name != "recurrent"),
    )
    assert older.fingerprint != plan.fingerprint
    assert set(factorised_layers(apply_plan(model, older))) == set(factorised_layers(apply_plan(model, plan)))


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(12, 3, **options).eval()
    for parameter in module.parameters():  # biases begin at zero
        nn.init.normal_(parameter, std=0.3)
    return module


@pytest.mark.parametrize("masked", [None, "bool", "float", "per head", "padding", "both"])
@given(
    options=st.fixed_dictionaries(
        {
            "bias": st.booleans(),
            "batch_first": st.booleans(),
            "kdim": st.sampled_from([None, 12, 5]),
            "vdim": st.sampled_from([None, 12, 7]),
        }
    ),
    batched=st.booleans(),
    weights=st.booleans(),
    averaged=st.booleans(),
)
def test_plain_attention_computes_what_torchs_does(
    options: dict[str, Any], masked: str | None, batched: bool, weights: bool, averaged: bool
) -> None:
    module = attention(**options)
    plain = PlainAttention(module)
    generator = torch.Generator().manual_seed(2)
    batch, length, keys = 2, 4, 6
    sizes = ((length, 12), (keys, module.kdim), (keys, module.vdim))
    given_ = [torch.randn(batch, *size, generator=generator) for size in sizes]
    given_ = [x if module.batch_first else x.transpose(0, 1) for x in given_]
    if not batched:
        given_ = [x[0] if module.batch_first else x[:, 0] for x in given_]
    mask = torch.rand(length, keys, generator=generator) > 0.6
    mask[:, 0] = False  # something is left to attend to
    masks: dict[str, Any] = {"need_weights": weights, "average_attn_weights": averaged}
    if masked in ("bool", "both"):
        masks["attn_mask"] = mask
    elif masked == "float":
        masks["attn_mask"] = torch.randn(length, keys, generator=generator)
    elif masked == "per head":
        count = (batch if batched else 1) * module.num_heads
        masks["attn_mask"] = torch.randn(count, length, keys, generator=generator)
    if masked in ("padding", "both"):
        padding = torch.tensor([[False] * keys, [False] * (keys - 2) + [True] * 2])
        masks["key_padding_mask"] = padding if batched else padding[1]
    with torch.no_grad():
        expected, found = module(*given_, **masks), plain(*given_, **masks)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_attention_drops_out_in_training_alone() -> None:
    plain = PlainAttention(attention(dropout=0.5))
    assert not torch.equal(plain.train()(WORDS, WORDS, WORDS)[0], plain(WORDS, WORDS, WORDS)[0])
    assert torch.equal(plain.eval()(WORDS, WORDS, WORDS)[0], plain(WORDS, WORDS, WORDS)[0])


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_attention_that_appends_keys_is_refused_by_name(option: str) -> None:
    model = nn.ModuleDict({"inner": attention(**{option: True})})
    with pytest.raises(DecompositionError, match=r"'inner' cannot be made of linear layers.*add_"):
        plain_attention(model)


def encoder(layers: int = 2) -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 3, 24, batch_first=True)
    return nn.TransformerEncoder(layer, layers)


def decoder() -> nn.Module:
    return nn.Transformer(12, 3, 1, 1, 24, batch_first=True)


@pytest.mark.parametrize(("make", "inputs"), [(encoder, (WORDS,)), (decoder, (WORDS, WORDS[:, :5]))])
def test_attention_is_listed_with_what_makes_linear_layers_of_it(
    make: Callable[[], nn.Module], inputs: tuple[torch.Tensor, ...]
) -> None:
    torch.manual_seed(0)
    model = make().eval()
    specs = inspect_layers(model, inputs)
    found = [spec for spec in specs if spec.kind == "attention"]
    assert found
    assert all("plain_attention(model)" in (spec.refusal or "") for spec in found)
    assert sum(spec.macs for spec in specs) == count_macs(model, inputs)
    assert sum(spec.params for spec in specs) < count_parameters(model)  # norms
    plain = plain_attention(model)
    behind = inspect_layers(plain, inputs)
    assert sum(spec.macs for spec in behind) == sum(spec.macs for spec in specs)
    assert sum(spec.refusal is None for spec in behind) == 4 * len(found) + sum(
        spec.refusal is None for spec in specs
    )
    assert sum(p.numel() for p in plain.parameters()) == count_parameters(model)
    for mode in (torch.no_grad, torch.inference_mode):  # torch's fast path is on here
        with mode():
            torch.testing.assert_close(plain(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)


def test_encoder_is_compressed_attention_and_all(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = plain_attention(encoder(1).eval())
    plan = plan_by_heuristic(model, WORDS, "tucker", "greedy", 0.6, calibration=WORDS, options=QUICK)
    small = apply_plan(model, plan, WORDS, options=QUICK)
    names = {name.rsplit(".", 1)[-1] for name in factorised_layers(small)}
    assert names & {"q_proj", "k_proj", "v_proj", "out_proj"}
    assert count_parameters(small) <= 0.6 * count_parameters(model)
    called: list[str] = []
    for name, layer in factorised_layers(small).items():
        layer.register_forward_hook(lambda *_, name=name: called.append(name))
    with torch.inference_mode():
        small(WORDS)
    assert set(called) == set(factorised_layers(small))  # nothing is passed by
    export_onnx(small, tmp_path / "small.onnx", WORDS)
    assert verify_onnx(small, tmp_path / "small.onnx", WORDS) < 1e-4


class FusedAttention(nn.Module):
    """Queries, keys and values from one linear layer, as timm's and GPT's have them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(12, 36), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        heads = nn.functional.scaled_dot_product_attention(q, k, v)
        y: torch.Tensor = self.proj(heads.transpose(1, 2).flatten(-2))
        return y


def test_fused_projection_that_is_a_layer_is_decomposed() -> None:
    torch.manual_seed(0)
    model = FusedAttention().eval()
    assert [spec.refusal for spec in inspect_layers(model, WORDS)] == [None, None]
    plan = make_plan(model, WORDS, "tucker", {"qkv": 6})
    small = apply_plan(model, plan, WORDS, options=QUICK)
    assert set(factorised_layers(small)) == {"qkv"}
    whole = apply_plan(model, make_plan(model, WORDS, "cp", {"qkv": 12}), WORDS, options=QUICK)
    torch.testing.assert_close(whole(WORDS), model(WORDS), rtol=1e-3, atol=1e-3)


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
    mark: Callable[[nn.Sequential], nn.Module], named: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
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
