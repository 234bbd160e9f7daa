"""Transformers are compressed like other networks, with torch's fast path for their layers on and off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from decomposition import (
    DecompositionError,
    apply_plan,
    count_macs,
    count_parameters,
    factorised_layers,
    inspect_layers,
    load_compressed,
    make_plan,
    plan_by_heuristic,
    save_compressed,
)
from decomposition.fit.fit_options import FitOptions

SHAPE = (9, 12)
QUICK = FitOptions(iterations=20)


class Classifier(nn.Module):
    """An `nn.TransformerEncoder` between an embedding and a head, for inputs of shape (9, 12)."""

    def __init__(self, *, batch_first: bool = True, norm_first: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 4, 48, batch_first=batch_first, norm_first=norm_first)
        self.batch_first = batch_first
        self.embed = nn.Linear(12, 24)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first and not norm_first)
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(x)
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=padding)
        logits: torch.Tensor = self.head(x[:, 0] if self.batch_first else x[0])
        return logits


class Whole(nn.Module):
    """An `nn.Transformer`, whose decoder attends to what its encoder makes of the same input."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Linear(12, 24)
        self.transformer = nn.Transformer(24, 4, 1, 1, 48, batch_first=batch_first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        x = x if self.batch_first else x.transpose(0, 1)
        x = self.transformer(x, x)
        return x.mean(1 if self.batch_first else 0)


@contextmanager
def fast_path(enabled: bool) -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@pytest.fixture
def inputs() -> torch.Tensor:
    return torch.randn(40, *SHAPE, generator=torch.Generator().manual_seed(1))


def built(kind: type[nn.Module], **options: bool) -> nn.Module:
    torch.manual_seed(0)
    return kind(**options).eval()


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_every_layer_of_an_encoder_is_compressed(
    inputs: torch.Tensor, norm_first: bool, sequential: bool
) -> None:
    model = built(Classifier, norm_first=norm_first)
    with fast_path(True):
        plan = make_plan(model, SHAPE, "tucker", 4)
        small = apply_plan(model, plan, inputs, sequential=sequential, options=QUICK)
        assert torch.backends.mha.get_fastpath_enabled()
        macs = count_macs(small, SHAPE)
    names = {"embed", "head", *(f"encoder.layers.{n}.linear{m}" for n in (0, 1) for m in (1, 2))}
    assert set(factorised_layers(small)) == names - {layer.name for layer in plan if not layer.operations}
    specs = {spec.name: spec for spec in inspect_layers(model, SHAPE)}
    saved = sum(specs[layer.name].params - layer.cost(specs[layer.name]).params for layer in plan)
    assert count_parameters(small) == count_parameters(model) - saved
    spared = sum(specs[layer.name].macs - layer.cost(specs[layer.name]).macs for layer in plan)
    assert macs == count_macs(model, SHAPE) - spared


@pytest.mark.parametrize("name", ["cp", "tensor_ring"])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_users_call_computes_the_same_with_the_fast_path_on_and_off(
    inputs: torch.Tensor, norm_first: bool, name: str
) -> None:
    model = built(Classifier, norm_first=norm_first)
    small = apply_plan(model, make_plan(model, SHAPE, name, 3), inputs, options=QUICK)
    called: list[nn.Module] = []
    for layer in factorised_layers(small).values():
        layer._modules.get("expand", nn.Identity()).register_forward_hook(
            lambda module, _, __: called.append(module)
        )
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            with fast_path(True):
                fast = small(inputs)
            calls = len(called)
            with fast_path(False):
                slow = small(inputs)
        torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-6)
        assert 2 * calls == len(called)  # the stages ran in both, not the contracted weight
        called.clear()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_padded_sequences_keep_their_outputs_with_the_fast_path_on_and_off(inputs: torch.Tensor) -> None:
    model = built(Classifier)
    small = apply_plan(model, make_plan(model, SHAPE, "tucker", 3), inputs, options=QUICK)
    lengths = torch.randint(2, 10, (len(inputs), 1), generator=torch.Generator().manual_seed(0))
    padding = torch.arange(9) >= lengths
    outputs = []
    for enabled in (True, False):  # torch makes nested tensors of padded sequences when it is on
        with torch.no_grad(), fast_path(enabled):
            outputs.append(small(inputs, padding))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning")
@pytest.mark.parametrize("kind", [Classifier, Whole])
def test_a_sequence_first_network_is_compressed_or_refused_by_layer(
    inputs: torch.Tensor, kind: type[nn.Module]
) -> None:
    model = built(kind, batch_first=False)
    plan = make_plan(model, SHAPE, "tucker", 4)
    with pytest.raises(DecompositionError, match=r"layers\.0\.linear1'.*sequential=False"):
        apply_plan(model, plan, inputs, options=QUICK)
    small = apply_plan(model, plan, inputs, sequential=False, options=QUICK)
    assert set(factorised_layers(small)) == {layer.name for layer in plan if layer.operations}
    assert small(inputs).shape == model(inputs).shape


def test_a_whole_transformer_is_compressed(inputs: torch.Tensor) -> None:
    model = built(Whole, batch_first=True)
    plan = make_plan(model, SHAPE, "tucker", 4)
    small = apply_plan(model, plan, inputs, options=QUICK)
    assert {"transformer.encoder.layers.0.linear2", "transformer.decoder.layers.0.linear1"} <= set(
        factorised_layers(small)
    )


def test_an_encoder_comes_back_from_its_file(inputs: torch.Tensor, tmp_path: Path) -> None:
    model = built(Classifier)
    plan = plan_by_heuristic(model, SHAPE, "tucker", "greedy", 0.6, calibration=inputs, options=QUICK)
    small = apply_plan(model, plan, inputs, options=QUICK)
    assert count_parameters(small) <= 0.6 * count_parameters(model)
    save_compressed(small, plan, tmp_path / "small.safetensors")
    loaded, stored = load_compressed(model, tmp_path / "small.safetensors")
    assert stored == plan
    with torch.no_grad():
        assert torch.equal(loaded(inputs), small(inputs))
