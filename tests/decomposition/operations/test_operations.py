"""A new operation is a class and a decorator: plans, files and functions then carry it like the others."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest
import torch
from torch import nn

from decomposition import (
    ApplyOptions,
    CompressionPlan,
    Cost,
    DecompositionError,
    Factorise,
    FitOptions,
    GroupOperation,
    LayerOperation,
    LayerPlan,
    LayerSpec,
    PlanError,
    apply_plan,
    build_structure,
    count_parameters,
    factorised_layers,
    fingerprint,
    inspect_layers,
    list_operations,
    load_compressed,
    make_plan,
    register_operation,
    save_compressed,
)
from decomposition.fit.refit import RefitProblem
from decomposition.network.layers import weight_of
from decomposition.operations import _OPERATIONS, FittedLayer, dense_cost, operation_kind

SHAPE = (3, 10, 10)
QUICK = FitOptions(iterations=5)


class ScaledLayer(nn.Module):
    """A layer whose outputs are multiplied by a number that is stored with it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * self.inner(x)


@dataclass(frozen=True)
class Scale(LayerOperation):
    """Multiply what the layer returns, whatever it is by then."""

    factor: float

    kind: ClassVar[str] = "scale"
    description: ClassVar[str] = "multiply a layer's outputs"
    stage: ClassVar[int] = 50

    def check(self, spec: LayerSpec) -> None:
        if not self.factor > 0:
            raise PlanError(f"layer {spec.name!r}: the factor must be positive, got {self.factor}")

    def cost(self, spec: LayerSpec, before: Cost) -> Cost:
        return Cost(before.params + 1, before.macs, before.bytes + 4)

    def structure(self, module: nn.Module, spec: LayerSpec) -> nn.Module:
        return ScaledLayer(module).train(module.training)

    def fit(
        self,
        module: nn.Module,
        spec: LayerSpec,
        problem: RefitProblem,
        *,
        sensitivity: torch.Tensor | None,
        options: FitOptions,
    ) -> FittedLayer:
        layer = ScaledLayer(copy.deepcopy(module)).train(module.training)
        nn.init.constant_(layer.scale, self.factor)
        dense = module.to_dense() if hasattr(module, "to_dense") else module
        return FittedLayer(layer, self.factor * weight_of(dense))

    def values(self) -> dict[str, Any]:
        return {"factor": self.factor}

    @classmethod
    def from_values(cls, values: Mapping[str, Any], where: str) -> Self:
        if type(values["factor"]) is not float:
            raise PlanError(f"{where}: factor must be a number, got {values['factor']!r}")
        return cls(values["factor"])


@dataclass(frozen=True)
class KeepFirst(GroupOperation):
    """Keep the first output channels of a convolution of a sequential network."""

    count: int

    kind: ClassVar[str] = "keep_first"
    description: ClassVar[str] = "keep a layer's first output channels"
    stage: ClassVar[int] = 0

    def check(self, spec: LayerSpec) -> None:
        if not 1 <= self.count <= spec.out_channels:
            raise PlanError(
                f"layer {spec.name!r} keeps {self.count} channels; choose 1 to {spec.out_channels}"
            )

    def values(self) -> dict[str, Any]:
        return {"count": self.count}

    @classmethod
    def from_values(cls, values: Mapping[str, Any], where: str) -> Self:
        if type(values["count"]) is not int:
            raise PlanError(f"{where}: count must be an integer, got {values['count']!r}")
        return cls(values["count"])

    @classmethod
    def group_structure(
        cls, model: nn.Module, operations: Mapping[str, Self], input_shape: Sequence[int]
    ) -> nn.Module:
        smaller = copy.deepcopy(model)
        assert isinstance(smaller, nn.Sequential)
        for name, operation in operations.items():
            kept, layer = operation.count, smaller[int(name)]
            layer.weight = nn.Parameter(layer.weight.detach()[:kept].clone())
            layer.out_channels = kept
            for following in smaller[int(name) + 1 :]:
                if isinstance(following, nn.BatchNorm2d):
                    following.num_features = kept
                    for key in ("weight", "bias"):
                        setattr(following, key, nn.Parameter(getattr(following, key).detach()[:kept].clone()))
                    following.running_mean = following.running_mean[:kept].clone()
                    following.running_var = following.running_var[:kept].clone()
                elif isinstance(following, nn.Conv2d):
                    following.weight = nn.Parameter(following.weight.detach()[:, :kept].clone())
                    following.in_channels = kept
                    break
        return smaller

    @classmethod
    def apply_group(
        cls,
        model: nn.Module,
        operations: Mapping[str, Self],
        input_shape: Sequence[int],
        images: torch.Tensor | None,
        options: ApplyOptions,
    ) -> nn.Module:
        smaller = cls.group_structure(model, operations, input_shape)
        if images is not None:  # a trace of what it was given
            smaller[1].num_batches_tracked.fill_(100 * len(images) + options.seed)
        return smaller


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Register both operations for the time of a test."""
    before = list_operations()
    with _OPERATIONS.restored():
        register_operation(Scale)
        register_operation(KeepFirst)
        assert list_operations() == sorted([*before, "scale", "keep_first"])
        yield
    assert list_operations() == before


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(16, *SHAPE, generator=torch.Generator().manual_seed(0))


def plan_of(model: nn.Module, *layers: LayerPlan) -> CompressionPlan:
    return CompressionPlan(layers, fingerprint(inspect_layers(model, SHAPE)), SHAPE, "a test")


def equal_states(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


FACTORISED, SCALED = Factorise("tucker", (3, 4)), Scale(0.5)


def full_plan(model: nn.Module) -> CompressionPlan:
    """Half of the first layer's channels, and both kinds of operations behind that."""
    return plan_of(
        model,
        LayerPlan("0", (KeepFirst(4), SCALED)),
        LayerPlan("3", (FACTORISED, SCALED)),
        LayerPlan("7", reason="it stays"),
    )


def test_an_operation_is_found_under_its_kind() -> None:
    assert operation_kind("scale") is Scale
    with pytest.raises(PlanError, match="operation 'scale' already"):
        register_operation(Scale)
    with pytest.raises(PlanError, match=r"there is no operation 'scales'.*Did you mean 'scale'\?"):
        operation_kind("scales")


def test_plans_carry_them_through_json_and_files(small_net: nn.Module, tmp_path: Path) -> None:
    plan = full_plan(small_net)
    assert CompressionPlan.from_json(plan.to_json()) == plan
    plan.save(tmp_path / "plan.json")
    assert CompressionPlan.load(tmp_path / "plan.json") == plan
    assert plan.chosen(Scale) == {"0": SCALED, "3": SCALED}
    assert plan["0"].group_operations == (KeepFirst(4),)
    assert plan["0"].layer_operations == (SCALED,)
    assert plan.group_kinds == [KeepFirst]
    damaged = plan.to_json().replace('"factor": 0.5', '"factor": "half"')
    with pytest.raises(PlanError, match="layer '0', scale: factor must be a number, got 'half'"):
        CompressionPlan.from_json(damaged)


def test_a_plan_with_an_operation_that_nobody_registered_is_refused(small_net: nn.Module) -> None:
    text = full_plan(small_net).to_json()
    with _OPERATIONS.restored():
        _OPERATIONS._entries.pop("scale")
        with pytest.raises(
            PlanError,
            match=r"layer '0': there is no operation 'scale'; choose from .*factorise.*"
            "Other packages register theirs when they are imported",
        ):
            CompressionPlan.from_json(text)


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("data", [False, True])
def test_apply_and_structure_and_files_agree(
    small_net: nn.Module, images: torch.Tensor, tmp_path: Path, data: bool, sequential: bool
) -> None:
    plan = full_plan(small_net)
    small_net.eval()
    small = apply_plan(
        small_net, plan, images if data else None, options=QUICK, sequential=sequential, seed=3
    )
    assert isinstance(small[0], ScaledLayer)
    assert isinstance(small[3], ScaledLayer)
    assert set(factorised_layers(small)) == {"3.inner"}
    assert 0 < factorised_layers(small)["3.inner"].error < 2
    structure = build_structure(small_net, plan)
    assert [(key, value.shape) for key, value in structure.state_dict().items()] == [
        (key, value.shape) for key, value in small.state_dict().items()
    ]
    save_compressed(small, plan, tmp_path / "small.safetensors")
    loaded, stored = load_compressed(small_net, tmp_path / "small.safetensors")
    assert stored == plan
    assert equal_states(loaded, small)
    assert not small.training
    with torch.no_grad():
        assert torch.equal(loaded(images), small(images))
    costs = [layer.cost(spec) for layer, spec in zip(plan, plan.specs(small_net), strict=True)]
    batch_norm = 2 * 4
    assert count_parameters(small) == sum(cost.params for cost in costs) + batch_norm


def test_operations_are_applied_left_to_right(small_net: nn.Module, images: torch.Tensor) -> None:
    alone = apply_plan(small_net, plan_of(small_net, LayerPlan("3", (FACTORISED,))), options=QUICK)
    both = apply_plan(small_net, plan_of(small_net, LayerPlan("3", (FACTORISED, SCALED))), options=QUICK)
    features = torch.randn(2, 8, 10, 10, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(both[3](features), 0.5 * alone[3](features))
        assert torch.equal(both[3].inner(features), alone[3](features))
    with pytest.raises(
        PlanError,
        match="layer '3': operation 'factorise' stands after 'scale'; "
        "a layer takes 'factorise' before 'scale'",
    ):
        LayerPlan("3", (SCALED, FACTORISED))
    with pytest.raises(PlanError, match=r"layer '3': .*'keep_first' stands after 'scale'.*before 'scale'"):
        LayerPlan("3", (SCALED, KeepFirst(2)))
    with pytest.raises(
        PlanError, match="'scale' stands after 'scale'; a layer takes one operation of a kind"
    ):
        LayerPlan("3", (SCALED, Scale(0.25)))


def test_costs_add_up_left_to_right(small_net: nn.Module) -> None:
    spec = next(spec for spec in inspect_layers(small_net, SHAPE) if spec.name == "3")
    alone, both = LayerPlan("3", (FACTORISED,)).cost(spec), LayerPlan("3", (FACTORISED, SCALED)).cost(spec)
    assert both == Cost(alone.params + 1, alone.macs, alone.bytes + 4)
    assert LayerPlan("3", (SCALED,)).cost(spec) == SCALED.cost(spec, dense_cost(spec))
    assert LayerPlan("3", (KeepFirst(2),)).cost(spec) == dense_cost(spec)


def test_a_factorisation_that_saves_nothing_leaves_the_other_operations(
    small_net: nn.Module, images: torch.Tensor
) -> None:
    plan = plan_of(small_net, LayerPlan("7", (Factorise("tucker", (10,)), SCALED)))
    for compressed in (apply_plan(small_net, plan, images, options=QUICK), build_structure(small_net, plan)):
        assert isinstance(compressed[7], ScaledLayer)
        assert isinstance(compressed[7].inner, nn.Linear)


def test_group_operations_come_first_and_see_images_and_options(
    small_net: nn.Module, images: torch.Tensor
) -> None:
    plan = plan_of(small_net, LayerPlan("0", (KeepFirst(4),)), LayerPlan("3", (FACTORISED,)))
    small = apply_plan(small_net, plan, images, options=QUICK, batch_norm="keep", seed=6)
    assert small[0].weight.shape == (4, 3, 3, 3)
    assert small[1].num_batches_tracked == 100 * len(images) + 6
    assert [spec.in_channels for spec in plan.specs(small_net)] == [3, 4]
    assert plan["3"].cost(plan.specs(small_net)[1]).params == count_parameters(small[3])  # type: ignore[arg-type]


def test_a_plan_holds_group_operations_and_ranks_of_what_is_left(small_net: nn.Module) -> None:
    def structure(
        kind: type[GroupOperation], network: nn.Module, chosen: Mapping[str, GroupOperation]
    ) -> nn.Module:
        return kind.group_structure(network, chosen, SHAPE)

    pruned = KeepFirst.group_structure(small_net, {"0": KeepFirst(4)}, SHAPE)
    left = make_plan(pruned, SHAPE, "tucker", {"3": (3, 4)})
    plan = left.with_operations(small_net, {"0": KeepFirst(4)})
    assert plan.chosen(KeepFirst) == {"0": KeepFirst(4)}
    assert plan["3"].operations == (FACTORISED,)
    assert plan.fingerprint == fingerprint(inspect_layers(small_net, SHAPE))
    network, rest = plan.after_groups(small_net, structure)
    assert rest == left
    assert equal_states(network, pruned)
    assert left.after_groups(pruned, structure) == (pruned, left)
    assert CompressionPlan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match="operations are given for nothing, but the plan has no such layer"):
        left.with_operations(small_net, {"nothing": KeepFirst(4)})
    with pytest.raises(PlanError, match=r"layer '0': .*one operation of a kind"):
        plan.with_operations(small_net, {"0": KeepFirst(3)})


MISFITS: dict[str, tuple[LayerPlan, str]] = {
    "group operation": (LayerPlan("0", (KeepFirst(9),)), "layer '0' keeps 9 channels; choose 1 to 8"),
    "layer operation": (LayerPlan("3", (Scale(-1.0),)), r"layer '3': the factor must be positive, got -1\.0"),
    "ranks of the layer before its group lost channels": (
        LayerPlan("3", (Factorise("tucker", (3, 5)), SCALED)),
        r"layer '3': tucker ranks \(3, 5\) are outside 1\.\.\(12, 4\)",
    ),
}


@pytest.mark.parametrize(("layer", "message"), MISFITS.values(), ids=MISFITS)
@pytest.mark.parametrize("function", [apply_plan, build_structure])
def test_what_does_not_fit_is_refused_and_the_model_stays_as_it_was(
    small_net: nn.Module, function: Callable[..., nn.Module], layer: LayerPlan, message: str
) -> None:
    before, modules = copy.deepcopy(small_net.state_dict()), list(small_net.modules())
    others = [LayerPlan("0", (KeepFirst(4),))] if layer.name != "0" else []
    with pytest.raises(DecompositionError, match=message):
        function(small_net, plan_of(small_net, *others, layer))
    assert list(small_net.modules()) == modules
    assert all(torch.equal(value, before[key]) for key, value in small_net.state_dict().items())


def test_an_applied_plan_leaves_the_model_as_it_was(small_net: nn.Module, images: torch.Tensor) -> None:
    before, modules = copy.deepcopy(small_net.state_dict()), list(small_net.modules())
    apply_plan(small_net, full_plan(small_net), images, options=QUICK)
    assert list(small_net.modules()) == modules
    assert all(torch.equal(value, before[key]) for key, value in small_net.state_dict().items())
