"""Plans are carried out on any model, or refused with the model untouched."""

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from decomposition import (
    DecompositionError,
    Factorise,
    PlanError,
    Quantise,
    apply_plan,
    build_structure,
    contracted,
    count_macs,
    count_parameters,
    decay_groups,
    factorised_layers,
    inspect_layers,
    list_formats,
    load_compressed,
    make_plan,
    reestimate_batch_norm,
    save_compressed,
)
from decomposition.fit.fit_options import FitOptions
from decomposition.fit.fitting import Fit, fit_weight
from decomposition.plan import save
from decomposition.plan.apply import dense_form

QUICK = FitOptions(iterations=30)
COARSE = FitOptions(iterations=2)
"""For what holds of any fit."""


class SmallNet(nn.Module):
    """A residual network with batch norm, a shared module, a nested Sequential and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU())
        self.shared = nn.Conv2d(12, 12, 3, padding=1)
        self.body = nn.Sequential(nn.Sequential(nn.Conv2d(12, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16)))
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + F.relu(self.shared(x))
        x = x + F.relu(self.shared(x))
        return self.head(F.relu(self.body(x)).mean((2, 3)))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    network = SmallNet()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return network.eval()


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(48, 3, 10, 10, generator=torch.Generator().manual_seed(1))


def relative_error(model: nn.Module, other: nn.Module, images: torch.Tensor) -> float:
    with torch.no_grad():
        expected, got = model(images), other(images)
    return float((expected - got).norm() / expected.norm())


@pytest.mark.parametrize(
    ("name", "sequential"),
    [
        *((name, True) for name in list_formats()),
        ("tucker", False),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in list_formats() if name != "tucker"),
    ],
)
def test_network_of_exactly_the_planned_ranks_is_reproduced(
    model: nn.Module, images: torch.Tensor, name: str, sequential: bool
) -> None:
    plan = make_plan(model, (3, 10, 10), name, 2)
    for layer_name, layer in factorised_layers(build_structure(model, plan)).items():
        for core in layer.cores():
            nn.init.normal_(core)
        dense = layer.to_dense()
        original = dict(model.named_modules())[layer_name]
        original.weight.data = dense.weight.data / dense.weight.data.std()  # type: ignore[union-attr]
    options = FitOptions(iterations=100, starts=3)
    compressed = apply_plan(model, plan, images, sequential=sequential, options=options)
    assert relative_error(model, compressed, images) < 1e-2


@pytest.mark.parametrize("name", list_formats())
def test_costs_of_the_result_are_those_of_the_plan(model: nn.Module, images: torch.Tensor, name: str) -> None:
    plan = make_plan(model, (3, 10, 10), name, 2)
    compressed = apply_plan(model, plan, images, options=COARSE)
    specs = {spec.name: spec for spec in inspect_layers(model, (3, 10, 10))}
    costs = {layer.name: layer.cost(specs[layer.name]) for layer in plan}
    change = sum(cost.params - specs[name].params for name, cost in costs.items())
    assert count_parameters(compressed) == count_parameters(model) + change
    assert count_macs(compressed, (3, 10, 10)) == sum(cost.macs for cost in costs.values())
    assert all(cost.bytes == 4 * cost.params for cost in costs.values())
    assert set(factorised_layers(compressed)) == set(plan.chosen(Factorise))


def test_model_is_left_untouched(model: nn.Module, images: torch.Tensor) -> None:
    before = copy.deepcopy(model.state_dict())
    kinds = [type(m) for m in model.modules()]
    apply_plan(model, make_plan(model, (3, 10, 10), "tensor_ring", 2), images, options=COARSE)
    assert [type(m) for m in model.modules()] == kinds
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_data_fits_reproduce_outputs_better_than_weight_fits(model: nn.Module, images: torch.Tensor) -> None:
    mixing = torch.randn(3, 3, generator=torch.Generator().manual_seed(2)) * torch.tensor([4.0, 1.0, 0.1])
    images = torch.einsum("nchw,cd->ndhw", images, mixing)
    plan = make_plan(model, (3, 10, 10), "tucker", 3)
    to_weights = relative_error(model, apply_plan(model, plan, None), images)
    to_data = relative_error(model, apply_plan(model, plan, images, sequential=False), images)
    sequential = relative_error(model, apply_plan(model, plan, images, sequential=True), images)
    assert to_data < to_weights
    assert sequential < to_weights


def test_sequential_refit_undoes_the_errors_of_earlier_layers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12)).eval()
    images = torch.randn(4000, 12) @ torch.randn(12, 12)
    plan = make_plan(model, (12,), "tucker", {"0": 5, "1": 5})
    plain = relative_error(model, apply_plan(model, plan, images, sequential=False), images)
    sequential = relative_error(model, apply_plan(model, plan, images, sequential=True), images)
    assert sequential <= plain * 1.001


def test_mean_output_is_corrected(model: nn.Module, images: torch.Tensor) -> None:
    images = images + 3.0
    plan = make_plan(model, (3, 10, 10), "tensor_ring", {"shared": 1, "body.0.0": 1})
    compressed = apply_plan(model, plan, images, sequential=False, options=QUICK)
    seen: dict[str, list[torch.Tensor]] = {"dense": [], "compressed": []}
    for key, network in (("dense", model), ("compressed", compressed)):
        layer = dict(network.named_modules())["shared"]
        handle = layer.register_forward_hook(lambda _, __, y, key=key: seen[key].append(y.mean((0, 2, 3))))
        with torch.no_grad():
            network(images)
        handle.remove()
    first = slice(0, 1)
    torch.testing.assert_close(
        torch.stack(seen["compressed"][first]), torch.stack(seen["dense"][first]), rtol=0.2, atol=0.1
    )


def test_same_seed_gives_the_same_model(model: nn.Module, images: torch.Tensor) -> None:
    plan = make_plan(model, (3, 10, 10), "cp", 3)
    first = apply_plan(model, plan, images, options=COARSE, max_patches=500, seed=3).state_dict()
    second = apply_plan(model, plan, images, options=COARSE, max_patches=500, seed=3).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_batch_norm_reestimation_matches_the_calibration_set(model: nn.Module, images: torch.Tensor) -> None:
    reestimate_batch_norm(model, images)
    norm = model.stem[1]  # type: ignore[index]
    entering = model.stem[0](images)  # type: ignore[index]
    torch.testing.assert_close(norm.running_mean, entering.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)
    assert norm.momentum == 0.1
    assert not model.training


def test_non_finite_weights_and_empty_calibration_are_refused(model: nn.Module, images: torch.Tensor) -> None:
    plan = make_plan(model, (3, 10, 10), "cp", 2)
    with pytest.raises(DecompositionError, match="calibration set is empty"):
        apply_plan(model, plan, images[:0])
    with pytest.raises(DecompositionError, match="calibration set holds NaN"):
        apply_plan(model, plan, images * float("nan"))
    with torch.no_grad():
        model.shared.weight[0, 0, 0, 0] = float("inf")  # type: ignore[union-attr, index]
    with pytest.raises(DecompositionError, match="'shared': its weight holds NaN"):
        apply_plan(model, plan, images)


def test_model_that_mixes_its_batch_is_refused_sequentially(images: torch.Tensor) -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.layer(x).mean((2, 3))
            return y + 10 * y.flip(0)

    model = Mixing()
    plan = make_plan(model, (3, 10, 10), "tucker", 2)
    with pytest.raises(DecompositionError, match="sequential=False"):
        apply_plan(model, plan, images, options=COARSE)
    apply_plan(model, plan, images, options=COARSE, sequential=False)


@pytest.mark.parametrize("name", list_formats())
def test_saved_model_loads_to_the_same_outputs(
    model: nn.Module, images: torch.Tensor, name: str, tmp_path: Path
) -> None:
    plan = make_plan(model, (3, 10, 10), name, 2)
    compressed = apply_plan(model, plan, images, options=COARSE)
    save_compressed(compressed, plan, tmp_path / "small.safetensors")
    loaded, stored = load_compressed(SmallNet(), tmp_path / "small.safetensors")
    assert stored == plan
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(images), compressed(images), rtol=0, atol=0)
    assert list(tmp_path.iterdir()) == [tmp_path / "small.safetensors"]


def test_saved_model_is_refused_by_another_architecture(model: nn.Module, tmp_path: Path) -> None:
    plan = make_plan(model, (3, 10, 10), "cp", 2)
    save_compressed(build_structure(model, plan), plan, tmp_path / "small.safetensors")
    with pytest.raises(PlanError, match="another model"):
        load_compressed(nn.Sequential(nn.Conv2d(3, 8, 3)), tmp_path / "small.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    with pytest.raises(PlanError, match="cannot be read"):
        load_compressed(model, tmp_path / "broken.safetensors")


def test_model_that_is_not_what_the_plan_says_is_not_saved(model: nn.Module, tmp_path: Path) -> None:
    plan, other = make_plan(model, (3, 10, 10), "cp", 2), make_plan(model, (3, 10, 10), "cp", 3)
    for wrong in (model, build_structure(model, other), contracted(build_structure(model, plan))):
        with pytest.raises(PlanError, match="is not what the plan makes of its dense model"):
            save_compressed(wrong, plan, tmp_path / "small.safetensors")
    smaller = make_plan(nn.Sequential(nn.Conv2d(3, 8, 3)), (3, 10, 10), "cp", 2)
    with pytest.raises(PlanError, match="is not what the plan makes of its dense model"):
        save_compressed(build_structure(model, plan), smaller, tmp_path / "small.safetensors")
    assert not list(tmp_path.iterdir())


def test_file_that_reads_back_different_does_not_appear(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(model, (3, 10, 10), "cp", 2)
    small, path = build_structure(model, plan), tmp_path / "small.safetensors"
    save_compressed(small, plan, path)
    before = path.read_bytes()
    write = save.save_file

    def write_wrongly(tensors: dict[str, torch.Tensor], *args: Any, **options: Any) -> None:
        name = next(iter(tensors))
        write({**tensors, name: tensors[name] + 1e-7}, *args, **options)

    monkeypatch.setattr(save, "save_file", write_wrongly)
    with pytest.raises(PlanError, match=r"tensor 'stem\.0\.reduce\.weight' is another one"):
        save_compressed(small, plan, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_model_that_needs_more_than_its_tensors_is_not_saved(model: nn.Module, tmp_path: Path) -> None:
    class Scaled(SmallNet):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("factor", torch.ones(()), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.factor

    scaled = Scaled().eval()
    plan = make_plan(scaled, (3, 10, 10), "cp", 2)
    small = build_structure(scaled, plan)
    small.factor.fill_(2.0)  # type: ignore[operator, union-attr]
    with pytest.raises(PlanError, match="other outputs, although its tensors are the same"):
        save_compressed(small, plan, tmp_path / "small.safetensors", dense=scaled)
    save_compressed(small, plan, tmp_path / "small.safetensors", dense=dense_form(small, plan))


@pytest.mark.parametrize("prepare", ["channels last", "bfloat16", "shared layers"])
def test_unusual_models_are_saved_and_loaded(model: nn.Module, tmp_path: Path, prepare: str) -> None:
    if prepare == "bfloat16":
        model = model.bfloat16()
    plan = make_plan(model, (3, 10, 10), "tensor_ring", 2)
    small = build_structure(model, plan).eval()
    if prepare == "channels last":
        small = small.to(memory_format=torch.channels_last)
    save_compressed(small, plan, tmp_path / "small.safetensors")
    loaded, _ = load_compressed(model, tmp_path / "small.safetensors")
    for before, after in zip(small.parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_model_is_loaded_in_the_types_that_it_was_saved_in(
    model: nn.Module, tmp_path: Path, dtype: torch.dtype
) -> None:
    model.register_buffer("table", torch.ones(3, dtype=torch.complex64))
    model.register_buffer("not_saved", torch.ones(3), persistent=False)
    plan = make_plan(model, (3, 10, 10), "tensor_ring", 2)
    # Module.to takes complex numbers for floating-point ones.
    small = build_structure(model, plan).eval()._apply(lambda x: x.to(dtype) if x.is_floating_point() else x)
    types = {name: tensor.dtype for name, tensor in small.state_dict().items()}
    save_compressed(small, plan, tmp_path / "small.safetensors")
    for architecture in (model, copy.deepcopy(model).double()):
        before = {name: tensor.dtype for name, tensor in architecture.state_dict().items()}
        loaded, _ = load_compressed(architecture, tmp_path / "small.safetensors")
        assert {name: tensor.dtype for name, tensor in loaded.state_dict().items()} == types
        assert {name: tensor.dtype for name, tensor in architecture.state_dict().items()} == before
        assert loaded.not_saved.dtype == dtype


@pytest.mark.parametrize("name", ["expand.bias", "expand.weight", "reduce.weight"])
def test_layers_of_two_types_are_not_loaded(model: nn.Module, tmp_path: Path, name: str) -> None:
    path = tmp_path / "small.safetensors"
    plan = make_plan(model, (3, 10, 10), "cp", 2)
    save_compressed(build_structure(model, plan), plan, path)
    with safe_open(path, framework="pt") as file:
        tensors, metadata = {each: file.get_tensor(each) for each in file.keys()}, file.metadata()  # noqa: SIM118
    changed = next(each for each in tensors if each.endswith(name))
    save_file(tensors | {changed: tensors[changed].half()}, path, metadata)
    with pytest.raises(PlanError, match=r"parameters of several types .*torch\.float16"):
        load_compressed(SmallNet(), path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_network_that_diverged_is_not_saved(model: nn.Module, tmp_path: Path, value: float) -> None:
    plan = make_plan(model, (3, 10, 10), "tensor_ring", 2)
    small = build_structure(model, plan).eval()
    name, parameter = next(small.named_parameters())
    with torch.no_grad():
        parameter.flatten()[0].fill_(value)
    with pytest.raises(
        PlanError, match=f"not written, because {re.escape(name)} holds NaN or infinite values"
    ):
        save_compressed(small, plan, tmp_path / "small.safetensors")
    assert not list(tmp_path.iterdir())


class Routed(nn.Module):
    """Sends inputs with a negative mean through a layer of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.rare = nn.Conv2d(3, 12, 3), nn.Conv2d(3, 12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.usual(x)
        if float(x.detach()[0].mean()) <= 0:  # as for the zeros that layers are listed with
            y = y + self.rare(x)
        return y.mean((2, 3))


@pytest.mark.parametrize("sequential", [True, False])
def test_decomposed_layer_that_no_calibration_input_reaches_is_named(
    images: torch.Tensor, sequential: bool
) -> None:
    model, images = Routed().eval(), images.abs()
    plan = make_plan(model, (3, 10, 10), "tucker", 2)
    with pytest.raises(DecompositionError, match=r"layer 'rare'.*none of the calibration inputs reache"):
        apply_plan(model, plan, images, options=COARSE, sequential=sequential)
    one = make_plan(model, (3, 10, 10), "tucker", {"usual": 2})
    assert list(factorised_layers(apply_plan(model, one, images, sequential=sequential))) == ["usual"]


def test_layers_that_share_a_bias_are_refused_where_it_cannot_stay_shared(images: torch.Tensor) -> None:
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.Conv2d(12, 12, 3)).eval()
    model[1].bias = model[0].bias
    plan = make_plan(model, (3, 10, 10), "tucker", {"1": 2})
    with pytest.raises(DecompositionError, match="the plan adds up to"):
        apply_plan(model, plan, images, options=QUICK)


def test_cores_that_overflow_the_models_type_are_named(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit_hugely(*args: Any, **options: Any) -> Fit:
        fit = fit_weight(*args, **options)
        return replace(fit, cores=[1e30 * core for core in fit.cores])

    monkeypatch.setattr("decomposition.operations.fit_weight", fit_hugely)
    plan = make_plan(model, (3, 10, 10), "cp", 2)
    with pytest.raises(DecompositionError, match=r"'stem\.0': its cores are not finite in torch\.float16"):
        apply_plan(model.half(), plan, options=QUICK)


@pytest.mark.parametrize("name", list_formats())
def test_contracted_form_computes_the_same_from_the_same_cores(
    model: nn.Module, images: torch.Tensor, name: str
) -> None:
    compressed = apply_plan(model, make_plan(model, (3, 10, 10), name, 2), images, options=COARSE)
    form = contracted(compressed)
    assert count_parameters(form) == count_parameters(compressed)
    assert relative_error(compressed, form, images) < 1e-5
    assert {layer.execution for layer in factorised_layers(form).values()} == {"dense"}


class NormAndActivate(nn.BatchNorm2d):
    """A batch norm that does more than normalise, as timm's BatchNormAct2d does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(super().forward(x))


def test_batch_norm_of_a_kind_of_its_own_is_refitted_as_what_it_computes(images: torch.Tensor) -> None:
    def network(norm: type[nn.BatchNorm2d], activation: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 12, 3, bias=False), norm(12), activation, nn.Conv2d(12, 12, 3)]
        layers[1].running_mean.uniform_(-0.5, 0.5)
        return nn.Sequential(*layers).eval()

    plain, own = network(nn.BatchNorm2d, nn.ReLU()), network(NormAndActivate, nn.Identity())
    outputs = [
        apply_plan(each, make_plan(each, images.shape[1:], "tucker", 4), images, options=COARSE)(images)
        for each in (plain, own)
    ]
    torch.testing.assert_close(outputs[1], outputs[0])


class Outputs(nn.Module):
    """Returns a dict of nested outputs; `mixed` makes one of them depend on the whole batch."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.layer, self.mixed = nn.Conv2d(3, 12, 3), mixed

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        y = self.layer(x)
        return {"out": y, "more": (y.mean(0, keepdim=True) + y if self.mixed else y, None)}


def test_outputs_may_be_nested_and_all_of_them_are_checked(images: torch.Tensor) -> None:
    for mixed in (False, True):
        model = Outputs(mixed).eval()
        plan = make_plan(model, images.shape[1:], "tucker", 3)
        if mixed:
            with pytest.raises(DecompositionError, match="sequential=False"):
                apply_plan(model, plan, images, options=COARSE)
        else:
            small = apply_plan(model, plan, images, options=COARSE)
            assert len(small(images)["out"]) == len(images)


def test_layer_whose_input_does_not_count_the_batch_is_refused_by_name(images: torch.Tensor) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bias = nn.Conv2d(3, 12, 3), nn.Linear(7, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(x) * self.bias(x.new_ones(5, 7)).mean(0)[:, None, None]

    model = Positions().eval()
    plan = make_plan(model, images.shape[1:], "tucker", 3)
    with pytest.raises(DecompositionError, match=r"layer 'bias'.*\(5, 7\).*sequential=False"):
        apply_plan(model, plan, images, options=COARSE)


@pytest.mark.parametrize(
    ("calibration", "message"),
    [
        ([("an image", torch.zeros(4))], "given as a str; pass a tensor"),
        ([torch.zeros(4, 3, 8, 8), None], "holds a NoneType; pass batches of model inputs"),
        (np.zeros((4, 3, 8, 8)), r"given as a ndarray; .* torch.as_tensor reads arrays"),
        ([torch.zeros(4, 3, 8, 8), torch.zeros(4, 3, 9, 9)], r"shapes \(3, 8, 8\) and \(3, 9, 9\)"),
    ],
)
def test_calibration_of_something_else_is_refused(model: nn.Module, calibration: Any, message: str) -> None:
    with pytest.raises(DecompositionError, match=message):
        apply_plan(model, make_plan(model, (3, 8, 8), "tucker", 3), calibration)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_model_that_keeps_a_computed_weight_is_compressed_around_it(images: torch.Tensor) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 12, 3), nn.utils.weight_norm(nn.Conv2d(12, 12, 3)), nn.Conv2d(12, 16, 3)]
    model = nn.Sequential(*layers)
    plan = make_plan(model, images.shape[1:], "tucker", 8)
    expected = model(images)  # the weight that it leaves behind is one that torch does not copy
    small = apply_plan(model, plan, images, options=QUICK)
    assert set(factorised_layers(small)) == {"0", "2"}
    assert (small(images) - expected).square().mean() < 0.5 * expected.var()


@pytest.mark.parametrize("name", list_formats())
def test_network_may_ask_its_layers_for_their_description_and_weight(images: torch.Tensor, name: str) -> None:
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.Linear(24, 20)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(self.conv(x.to(self.conv.weight.dtype)))
            assert y.shape[1] == self.conv.out_channels == self.norm.num_features
            y = F.adaptive_avg_pool2d(y, (1, 2)).reshape(-1, self.head.in_features)
            return self.head(y) + F.linear(y, self.head.weight)

    torch.manual_seed(0)
    model = Asking().eval()
    plan = make_plan(model, images.shape[1:], name, {"conv": 2, "head": 4})
    small = apply_plan(model, plan, images, options=COARSE)
    for layer in factorised_layers(small).values():
        torch.testing.assert_close(layer.weight, layer.to_dense().weight)
        assert layer.extra_repr()
    expected = small(images)
    torch.testing.assert_close(contracted(small)(images), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sequential", [True, False])
@pytest.mark.parametrize("kind", ["rows of a table", "temperatures in time"])
def test_inputs_far_from_zero_are_fitted_as_well_as_centred_ones(kind: str, sequential: bool) -> None:
    """The bias takes up what their mean makes of an error; what is left to fit is the same."""
    torch.manual_seed(0)
    layers: list[nn.Module]
    if kind == "rows of a table":
        layers = [nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3)]
        x, far = torch.randn(300, 12) @ torch.randn(12, 12) / 3, 1000 * torch.linspace(0.5, 2, 12)
    else:
        layers = [nn.Conv1d(8, 12, 3), nn.Tanh(), nn.Flatten(), nn.Linear(84, 3)]
        x, far = (
            torch.einsum("nct,cd->ndt", torch.randn(300, 8, 9), torch.randn(8, 8) / 3),
            torch.tensor(2900.0),
        )
    network = nn.Sequential(*layers)
    moved = copy.deepcopy(network)
    with torch.no_grad():
        weight = network[0].weight.double().reshape(len(network[0].weight), -1)
        moved[0].bias -= (weight * far.double()).sum(1).float()
    rounding = Quantise(activations="float32")
    losses = []
    for model, inputs in ((network, x), (moved, x + far)):
        plan = make_plan(model, tuple(x.shape[1:]), "tucker", ranks={"0": 5})
        first, *others = plan.layers
        plan = replace(plan, layers=(replace(first, operations=(*first.operations, rounding)), *others))
        losses.append(relative_error(model, apply_plan(model, plan, inputs, sequential=sequential), inputs))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


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
