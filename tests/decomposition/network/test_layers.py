"""Which layers are found, what they cost, and which are refused for what reason."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from decomposition.choose.heuristics import plan_by_heuristic
from decomposition.errors import DecompositionError
from decomposition.network.cost import count_macs, count_parameters
from decomposition.network.layers import (
    LayerSpec,
    compressible_layers,
    inspect_layers,
    is_decomposable_module,
    skipping,
)


class Forward(nn.Module):
    """A module whose forward is a given function of itself and its input."""

    def __init__(self, forward: object, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)
        self._function = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(self, x)  # type: ignore[operator]


def by_name(model: nn.Module, shape: tuple[int, ...]) -> dict[str, LayerSpec]:
    return {spec.name: spec for spec in inspect_layers(model, shape)}


def test_layers_come_in_forward_order_with_their_dotted_names() -> None:
    model = Forward(
        lambda self, x: self.last(self.block(x).mean((2, 3))),
        last=nn.Linear(4, 2),
        block=nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3)), nn.ReLU(), nn.Conv2d(4, 4, 1)),
    )
    specs = compressible_layers(model, (3, 8, 8))
    assert [spec.name for spec in specs] == ["block.0.0", "block.2", "last"]
    assert [spec.index for spec in specs] == [0, 1, 2]
    assert [spec.kind for spec in specs] == ["conv2d", "conv2d", "linear"]


def test_a_spec_describes_its_layer() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, (3, 1), stride=(1, 2), padding=1, bias=True))
    (spec,) = compressible_layers(model, (3, 9, 7))
    assert spec.weight_shape == tuple(model[0].weight.shape)  # type: ignore[arg-type, union-attr]
    assert (spec.kernel_size, spec.kernel_elements, spec.stride) == ((3, 1), 3, (1, 2))
    assert spec.input_sizes == ((9, 7),)
    assert spec.output_sizes == (tuple(model(torch.zeros(1, 3, 9, 7)).shape[2:]),)
    assert spec.params == count_parameters(model)
    assert spec.bias


@given(
    channels=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    groups=st.sampled_from([1, 2]),
)
def test_macs_of_a_convolution_equal_what_torch_counts(
    channels: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int], groups: int
) -> None:
    inp, out = (groups * count for count in channels)
    model = nn.Sequential(nn.Conv2d(inp, out, kernel, stride, groups=groups, padding=1, dilation=2))
    (spec,) = inspect_layers(model, (inp, 8, 9))
    assert spec.macs == count_macs(model, (inp, 8, 9))


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Conv1d(3, 5, 3, stride=2)), (3, 11)),
        (nn.Sequential(nn.Linear(4, 5)), (4,)),
        (nn.Sequential(nn.Linear(4, 5, bias=False)), (7, 4)),
    ],
    ids=["conv1d", "linear", "linear over positions"],
)
def test_macs_of_other_layers_equal_what_torch_counts(model: nn.Module, shape: tuple[int, ...]) -> None:
    assert compressible_layers(model, shape)[0].macs == count_macs(model, shape)


class Functional(nn.Module):
    """Products that no module computes: batched by a transform, and in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.vmap(self.first)(x)
        with torch.inference_mode():
            return self.second(y.clone()) @ y.new_ones(3, 2)


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Functional(), (4,)),
        (
            nn.Sequential(nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, groups=2), nn.Conv2d(6, 4, 3, groups=2)),
            (4, 7, 6),
        ),
        (nn.LSTM(5, 4, 2, bidirectional=True), (6, 5)),
    ],
    ids=["functions", "transposed and grouped", "recurrent"],
)
def test_macs_are_those_of_torchs_own_counter(model: nn.Module, shape: tuple[int, ...]) -> None:
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton where it is installed

    aten, counter = torch.ops.aten, FlopCounterMode(display=False)
    with counter, torch.no_grad(), torch.backends.mkldnn.flags(enabled=False):
        model(torch.zeros(1, *shape))
    counts = counter.get_flop_counts()["Global"]
    assert 2 * count_macs(model, shape) == sum(
        counts.get(o, 0) for o in (aten.convolution, aten.addmm, aten.mm)
    )


def test_the_layers_macs_add_up_to_the_models(small_net: nn.Module) -> None:
    specs = inspect_layers(small_net, (3, 10, 10))
    assert sum(spec.macs for spec in specs) == count_macs(small_net, (3, 10, 10))


def test_a_module_used_twice_is_one_layer_with_two_calls() -> None:
    layer = nn.Conv2d(4, 4, 3)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    (spec,) = compressible_layers(model, (4, 8, 8))
    assert spec.name == "0"
    assert spec.input_sizes == ((8, 8), (6, 6))
    assert spec.output_positions == 36 + 16
    assert spec.macs == count_macs(model, (4, 8, 8))


def test_a_grouped_convolution_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1))
    specs = by_name(model, (4, 8, 8))
    assert "groups=2" in (specs["0"].refusal or "")
    assert "groups=8" in (specs["1"].refusal or "")
    assert [spec.name for spec in compressible_layers(model, (4, 8, 8))] == ["2"]


def test_two_layers_with_one_weight_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight  # type: ignore[union-attr]
    specs = by_name(model, (4,))
    assert "belongs to another layer" in (specs["0"].refusal or "")
    assert "belongs to another layer" in (specs["1"].refusal or "")
    assert specs["2"].refusal is None


def test_a_layer_that_is_never_called_is_refused_and_comes_last() -> None:
    model = Forward(lambda self, x: self.used(x), spare=nn.Linear(4, 4), used=nn.Linear(4, 4))
    specs = inspect_layers(model, (4,))
    assert [spec.name for spec in specs] == ["used", "spare"]
    assert "never called" in (specs[1].refusal or "")


def test_subclasses_are_not_taken_for_what_they_extend() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._conv_forward(x, self.weight - self.weight.mean(), self.bias)

    model = nn.Sequential(Standardised(3, 4, 3), nn.Conv2d(4, 4, 1))
    assert not is_decomposable_module(model[0])
    specs = by_name(model, (3, 5, 5))
    assert "a Standardised, which may compute something else than the Conv2d" in (specs["0"].refusal or "")
    assert specs["1"].refusal is None


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.ConvTranspose2d(3, 4, 3, stride=2), (3, 5, 6)),
        (nn.ConvTranspose2d(4, 8, (2, 3), stride=(2, 1), groups=2, output_padding=(1, 0)), (4, 5, 6)),
        (nn.ConvTranspose1d(3, 4, 3, stride=2), (3, 5)),
        (nn.Conv3d(3, 4, 3, padding=1), (3, 4, 5, 6)),
    ],
    ids=["transposed", "transposed in groups", "transposed 1d", "3d"],
)
def test_other_convolutions_are_listed_with_their_cost_and_refused(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    model = nn.Sequential(layer, nn.ReLU())
    (spec,) = inspect_layers(model, shape)
    name = type(layer).__name__
    product = name.startswith("ConvTranspose") and layer.groups == 1
    reason = "decomposition.plain_transposed(model) gives" if product else "only Conv1d, Conv2d and Linear"
    assert (spec.refusal or "").startswith(f"a {name}; {reason}")
    assert spec.macs == count_macs(model, shape)
    assert spec.params == count_parameters(model)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize(
    "rewrite",
    [nn.utils.weight_norm, nn.utils.parametrizations.weight_norm, nn.utils.spectral_norm],
    ids=["weight_norm by hook", "weight_norm by parametrization", "spectral_norm by hook"],
)
def test_a_weight_that_is_computed_at_every_call_is_refused(
    rewrite: Callable[[nn.Module], nn.Module],
) -> None:
    model = nn.Sequential(rewrite(nn.Conv2d(3, 4, 3)), nn.Conv2d(4, 4, 1))
    specs = by_name(model, (3, 5, 5))
    assert specs["0"].refusal is not None
    assert specs["1"].refusal is None


def test_only_a_batch_norm_right_behind_the_layer_is_its_own() -> None:
    model = Forward(
        lambda self, x: self.c(self.norm_b(torch.relu(self.b(self.norm_a(self.a(x)))))),
        a=nn.Conv2d(3, 4, 1),
        norm_a=nn.BatchNorm2d(4),
        b=nn.Conv2d(4, 4, 1),
        norm_b=nn.BatchNorm2d(4),
        c=nn.Conv2d(4, 4, 1),
    )
    specs = by_name(model, (3, 5, 5))
    assert [specs[name].batch_norm for name in "abc"] == ["norm_a", None, None]


def test_a_functional_use_of_the_weight_is_not_seen_as_a_call() -> None:
    model = Forward(lambda self, x: F.linear(x, self.layer.weight), layer=nn.Linear(3, 3))
    assert "never called" in (inspect_layers(model, (3,))[0].refusal or "")


def test_the_cost_of_a_weight_that_is_used_without_its_layer_is_counted() -> None:
    model = Forward(
        lambda self, x: F.linear(input=F.linear(x, self.a.weight), weight=self.b.weight),
        a=nn.Linear(3, 4),
        b=nn.Linear(4, 2),
    )
    specs = inspect_layers(model, (5, 3))
    assert [spec.macs for spec in specs] == [5 * 12, 5 * 8]
    assert sum(spec.macs for spec in specs) == count_macs(model, (5, 3))


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("fast_path", [True, False])
def test_the_layers_of_a_transformer_add_up_to_the_models(batch_first: bool, fast_path: bool) -> None:
    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = self.encoder(x if batch_first else x.transpose(0, 1))  # type: ignore[operator]
        return self.head(y.mean(1 if batch_first else 0))  # type: ignore[operator, no-any-return]

    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=batch_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = Forward(forward, encoder=encoder, head=nn.Linear(16, 3)).eval()
    torch.backends.mha.set_fastpath_enabled(fast_path)
    try:
        specs, macs = by_name(model, (7, 16)), count_macs(model, (7, 16))
        assert torch.backends.mha.get_fastpath_enabled() == fast_path
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    assert sum(spec.macs for spec in specs.values()) == macs
    assert specs["encoder.layers.1.self_attn"].macs == 7 * 3 * 16 * 16
    assert specs["encoder.layers.0.linear1"].macs == 7 * 16 * 32
    attention = specs["encoder.layers.1.self_attn.out_proj"]
    assert attention.macs == 7 * 16 * 16
    assert "a NonDynamicallyQuantizableLinear" in (attention.refusal or "")


@pytest.mark.parametrize(
    "model",
    [
        Forward(lambda self, x: self.layer(x.reshape(-1, 4, 6)), layer=nn.Linear(6, 5)),
        Forward(lambda self, x: self.layer(x.reshape(-1, 1, 6, 2)), layer=nn.Conv2d(1, 3, (3, 1))),
        Forward(lambda self, x: self.layer(x.reshape(-1, 6)), layer=nn.Linear(6, 5)),
    ],
    ids=["windows of a linear layer", "windows of a convolution", "positions on the batch axis"],
)
def test_every_piece_that_an_input_is_cut_into_counts(model: nn.Module) -> None:
    (spec,) = compressible_layers(model, (3, 4, 12))
    assert spec.macs == count_macs(model, (3, 4, 12))


def test_a_wrong_input_shape_is_named(small_net: nn.Module) -> None:
    with pytest.raises(DecompositionError, match=r"input of shape \(4, 10, 10\)"):
        inspect_layers(small_net, (4, 10, 10))
    assert not any(module._forward_hooks for module in small_net.modules())


def test_a_model_that_refuses_an_input_without_a_word_is_named_too() -> None:
    def forward(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == 4
        return x

    with pytest.raises(DecompositionError, match=r"input of shape \(3, 5\).*AssertionError|assert"):
        inspect_layers(Forward(forward), (3, 5))


@pytest.mark.parametrize(
    ("skip", "left"),
    [(["body"], {"body.0", "body.1"}), (["*.1", "fc"], {"body.1", "fc"}), (["head?"], set()), ([], set())],
)
def test_layers_are_left_as_they_are_by_name_module_or_pattern(skip: list[str], left: set[str]) -> None:
    body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    model = nn.Sequential(OrderedDict(body=body, flat=nn.Flatten(), fc=nn.Linear(128, 4)))
    specs = inspect_layers(model, (3, 8, 8))
    if skip and not left:
        with pytest.raises(DecompositionError, match=r"no layer matches 'head\?'; the layers are body\.0"):
            skipping(specs, skip)
        return
    found = skipping(specs, skip)
    assert {spec.name for spec in found if spec.refusal is not None} == left
    assert [replace(spec, refusal=None) for spec in found] == [replace(s, refusal=None) for s in specs]
    plan = plan_by_heuristic(model, (3, 8, 8), "tucker", "greedy", 0.9, skip=skip, progress=False)
    assert all(not layer.operations for layer in plan if layer.name in left)


def test_inspection_leaves_the_model_alone(small_net: nn.Module) -> None:
    small_net.train()
    before = {key: value.clone() for key, value in small_net.state_dict().items()}
    inspect_layers(small_net, (3, 10, 10))
    assert small_net.training
    assert all(torch.equal(value, before[key]) for key, value in small_net.state_dict().items())
    assert not any(module._forward_hooks for module in small_net.modules())


def test_parameters_are_counted_once_and_batch_norm_included() -> None:
    shared = nn.Linear(3, 3)
    assert count_parameters(nn.Sequential(shared, shared, nn.BatchNorm1d(3))) == 12 + 6
