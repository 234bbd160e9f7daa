"""Attention, own layers, transposed convolutions and Transformers in layers that compress."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from call_options import layer_options
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations, prune

import rankrl
from decomposition import (
    CompressionPlan,
    DecompositionError,
    PlainTransposed,
    PlanError,
    Rewrite,
    apply_plan,
    build_structure,
    compressible_layers,
    count_macs,
    count_parameters,
    factorised_layers,
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
from decomposition.fit.fit_options import FitOptions
from decomposition.network.layers import skipping
from decomposition.network.rounding import is_rounded
from rankrl.onnx.export import export_onnx


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


IMAGES = torch.randn(16, 3, 10, 10, generator=torch.Generator().manual_seed(1))


class Named(nn.Conv2d):
    purpose = "seeing"


class Commented(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.contiguous())


class Standardised(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return self._conv_forward(x, weight, self.bias)


class Noisy(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y + torch.randn_like(y) if self.training else y


class Adapted(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.adapter = nn.Parameter(torch.zeros(outputs, inputs))


class Shorter(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[..., :1]


def network(conv: nn.Module, linear: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), linear).eval()


@pytest.mark.parametrize("layers", [["0", "4"], ["?"], ["Named", "Commented"], ["Named", "4"]])
@pytest.mark.parametrize(
    "options", [{}, {"stride": 2, "padding": 1, "bias": False}, {"padding_mode": "reflect"}]
)
def test_layers_that_compute_the_same_are_let_in(layers: list[str], options: dict[str, Any]) -> None:
    model = network(Named(3, 8, 3, **options), Commented(8, 10))
    assert all(spec.refusal is not None for spec in inspect_layers(model, IMAGES))
    plain = plain_layers(model, layers, IMAGES)
    assert [type(plain[j]) for j in (0, 4)] == [nn.Conv2d, nn.Linear]  # type: ignore[index]
    assert type(model[0]) is Named  # type: ignore[index]
    assert all(spec.refusal is None for spec in inspect_layers(plain, IMAGES))
    assert torch.equal(plain(IMAGES), model(IMAGES))
    assert plain.state_dict().keys() == model.state_dict().keys()
    small = apply_plan(plain, make_plan(plain, (3, 10, 10), "tucker", 2), IMAGES)
    assert count_parameters(small) < count_parameters(model)


def test_grouped_convolution_stays_grouped() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Named(4, 8, 3, groups=2), nn.Conv2d(8, 2, 1)).eval()
    plain = plain_layers(model, ["Named"], (4, 6, 6))
    assert type(plain[0]) is nn.Conv2d
    assert plain[0].groups == 2


@pytest.mark.parametrize(
    ("conv", "linear", "entry", "message"),
    [
        (
            Standardised(3, 8, 3),
            nn.Linear(8, 10),
            "Standardised",
            "'0', a Standardised, computes something else",
        ),
        (nn.Conv2d(3, 8, 3), Noisy(8, 10), "4", "outputs differ by up to .* in training mode"),
        (nn.Conv2d(3, 8, 3), Adapted(8, 10), "4", "has adapter besides weight and bias"),
        (nn.Conv2d(3, 8, 3), Shorter(8, 10), "4", r"shape \(16, 1\) instead of \(16, 10\)"),
        (Named(3, 8, 3), nn.Linear(8, 10), "4", "no layer of a subclass matches '4'; there are 0, Named"),
        (Named(3, 8, 3), nn.Linear(8, 10), "Namd", "Did you mean 'Named'?"),
        (nn.Conv2d(3, 8, 3), nn.Linear(8, 10), "4", "the model has none"),
    ],
)
def test_layers_that_are_no_such_ones_are_refused(
    conv: nn.Module, linear: nn.Module, entry: str, message: str
) -> None:
    with pytest.raises(DecompositionError, match=message):
        plain_layers(network(conv, linear), [entry], IMAGES)


def test_layer_that_is_never_called_is_refused() -> None:
    model = network(Named(3, 8, 3), nn.Linear(8, 10))
    model.add_module("spare", nn.ModuleList([Commented(3, 3)]))
    model.forward = lambda x: model[4](model[3](model[2](model[0](x))))  # type: ignore[index, method-assign, assignment]
    with pytest.raises(DecompositionError, match=r"'spare.0', a Commented, is not called"):
        plain_layers(model, ["spare.*"], IMAGES)


def test_only_some_layers_change(small_net: nn.Module) -> None:
    specs = inspect_layers(small_net, IMAGES)
    names = [spec.name for spec in specs]
    refused = {spec.name: spec.refusal for spec in skipping(specs, [names[0]], names[:2])}
    assert "as asked (skip)" in (refused[names[0]] or "")
    assert refused[names[1]] is None
    assert "others alone may change (only)" in (refused[names[2]] or "")
    assert skipping(specs, []) == list(specs)
    plan = plan_by_heuristic(small_net, IMAGES, "tucker", "uniform", 0.9, only=[names[1]])
    assert [layer.name for layer in plan if layer.operations] == [names[1]]
    with pytest.raises(DecompositionError, match="only: no layer matches 'head'"):
        skipping(specs, [], ["head"])


@st.composite
def transposed(draw: st.DrawFn) -> tuple[nn.ConvTranspose1d | nn.ConvTranspose2d, torch.Tensor]:
    spatial = draw(st.integers(1, 2))

    def axis(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(spatial))

    kernel, stride, dilation, padding = axis(1, 4), axis(1, 3), axis(1, 2), axis(0, 1)
    more = tuple(draw(st.integers(0, step - 1)) for step in stride)
    kind: Any = nn.ConvTranspose1d if spatial == 1 else nn.ConvTranspose2d
    torch.manual_seed(0)
    layer = kind(
        draw(st.integers(1, 4)),
        draw(st.integers(1, 3)),
        kernel,
        stride,
        padding,
        more,
        bias=draw(st.booleans()),
        dilation=dilation,
    )
    return layer, torch.randn(draw(st.integers(1, 2)), layer.in_channels, *axis(3, 5))


@given(case=transposed())
def test_computes_what_torch_does(case: tuple[nn.ConvTranspose1d | nn.ConvTranspose2d, torch.Tensor]) -> None:
    layer, x = case
    plain = PlainTransposed(layer)
    torch.testing.assert_close(plain(x), layer(x), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(plain(x[0]), layer(x[0]), atol=1e-5, rtol=1e-4)


@given(case=transposed(), data=st.data())
def test_takes_an_output_size_as_torch_does(
    case: tuple[nn.ConvTranspose1d | nn.ConvTranspose2d, torch.Tensor], data: st.DataObject
) -> None:
    layer, x = case
    layer.output_padding = (0,) * len(layer.stride)
    least = layer(x).shape[2:]
    more = tuple(data.draw(st.integers(0, step)) for step in layer.stride)
    size = [low + each for low, each in zip(least, more, strict=True)]
    plain = PlainTransposed(layer)
    if all(each < step for each, step in zip(more, layer.stride, strict=True)):
        torch.testing.assert_close(plain(x, size), layer(x, size), atol=1e-5, rtol=1e-4)
    else:
        with pytest.raises(ValueError, match="output_size"):
            plain(x, size)
        with pytest.raises(ValueError, match="output"):
            layer(x, size)


def test_gradients_are_those_of_torch() -> None:
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(3, 4, 3, 2, 1)
    plain = PlainTransposed(layer)
    x = torch.randn(2, 3, 5, 5)
    layer(x).square().sum().backward()
    plain(x).square().sum().backward()
    mine, theirs = (dict(each.named_parameters()) for each in (plain, layer))
    rows, columns = mine["product.weight"].grad, theirs["weight"].grad
    assert rows is not None
    assert columns is not None
    torch.testing.assert_close(rows.flatten(1), columns.flatten(1).T, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(mine["bias"].grad, theirs["bias"].grad)


class Decoder(nn.Module):
    """From few positions to many, as behind an encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(3, 12, 3, 2, 1)
        self.up = nn.ConvTranspose2d(12, 16, 4, 2, 1)
        self.grouped = nn.ConvTranspose2d(16, 8, 3, 1, 1, groups=2)
        self.last = nn.ConvTranspose2d(8, 3, 3, 2, 1, output_padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (N, 3, H, W) to (N, 3, 2 H, 2 W)."""
        return self.last(torch.relu(self.grouped(torch.relu(self.up(torch.relu(self.narrow(x)))))))


@pytest.fixture
def decoder() -> nn.Module:
    torch.manual_seed(0)
    return Decoder().eval()


def images(count: int = 16) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_only_what_can_be_is_made_plain(decoder: nn.Module) -> None:
    plain = plain_transposed(decoder)
    kinds = {name: type(module) for name, module in plain.named_children()}
    assert kinds["up"] is kinds["last"] is PlainTransposed
    assert kinds["grouped"] is nn.ConvTranspose2d
    assert type(decoder.up) is nn.ConvTranspose2d
    torch.testing.assert_close(plain(images()), decoder(images()))
    before, after = (inspect_layers(each, (3, 8, 8)) for each in (decoder, plain))
    assert "plain_transposed" in (before[1].refusal or "")
    assert [spec.macs for spec in after] == [spec.macs for spec in before]
    assert [spec.name for spec in after if spec.refusal is None] == ["narrow", "up.product", "last.product"]
    alone: nn.Module = nn.ConvTranspose1d(3, 4, 3)
    assert isinstance(plain_transposed(alone), PlainTransposed)
    wide: nn.Module = nn.ConvTranspose2d(3, 4, 3, stride=1, dilation=2, output_padding=1)
    assert isinstance(plain_transposed(wide), nn.ConvTranspose2d)


@pytest.mark.parametrize(
    ("name", "rank"), [("tucker", 4), ("cp", 4), ("tensor_train", 4), ("spatial_svd", 4), ("tensor_ring", 2)]
)
def test_decomposes_with_data(name: str, rank: int, decoder: nn.Module, tmp_path: Path) -> None:
    """The matrix of `up` has rank 4, which every format finds; a ring of two cores has its rank squared."""
    with torch.no_grad():
        decoder.get_parameter("up.weight").copy_(
            (torch.randn(12, 4) @ torch.randn(4, 256) / 10).reshape(12, 16, 4, 4)
        )
    plain = plain_transposed(decoder)
    errors = []
    for ranks in (rank // 2, rank):
        plan = make_plan(plain, (3, 8, 8), name, {"up.product": ranks})
        small = apply_plan(plain, plan, calibration=images())
        assert list(factorised_layers(small)) == ["up.product"]
        with torch.no_grad():
            found, expected = small(images()), decoder(images())
        errors.append(float((found - expected).norm() / expected.norm()))
    assert errors[0] > 0.01
    assert errors[1] < 1e-3
    save_compressed(small, plan, tmp_path / "small.safetensors")
    again, _ = load_compressed(plain, tmp_path / "small.safetensors")
    torch.testing.assert_close(again(images()), small(images()))


def test_is_exported_as_one_transposed_convolution_a_spreading(decoder: nn.Module, tmp_path: Path) -> None:
    plain = plain_transposed(decoder)
    small = apply_plan(plain, make_plan(plain, (3, 8, 8), "tucker", {"up.product": 4}), calibration=images())
    assert count_macs(small, (3, 8, 8)) < count_macs(plain, (3, 8, 8))
    for network, layers in ((plain, 1), (small, 2)):
        path = export_onnx(network, tmp_path / "network.onnx", (3, 8, 8), progress=False).path
        operators = [node.op_type for node in onnx.load(path).graph.node]
        assert operators.count("ConvTranspose") == 3
        assert operators.count("Conv") == layers
        assert set(operators) == {"Conv", "ConvTranspose", "Relu"}
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {session.get_inputs()[0].name: images().numpy()})
        np.testing.assert_allclose(found, network(images()).detach().numpy(), atol=1e-5)


def test_products_may_compute_in_integers(decoder: nn.Module, tmp_path: Path) -> None:
    plain = plain_transposed(decoder)
    plan = rankrl.search(
        plain,
        score=lambda network: -float((network(images()) - plain(images())).square().mean()),
        inputs=images(),
        bytes=0.9,
        selector="greedy",
        cache=None,
        progress=False,
        decomposition=layer_options(precisions=["int8"], skip=["narrow", "last", "grouped"]),
    ).plan
    small = apply_plan(plain, plan, calibration=images())
    assert is_rounded(small.get_submodule("up.product"))
    assert [spec.name for spec in compressible_layers(plain, (3, 8, 8))][1] == "up.product"
    torch.testing.assert_close(small(images()), plain(images()), atol=0.2, rtol=0.2)


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
