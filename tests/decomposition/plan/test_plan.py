"""The plan's JSON: it comes back as it went, and nothing else is accepted."""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from decomposition import apply_plan, build_structure, load_compressed, save_compressed
from decomposition.errors import DecompositionError, PlanError
from decomposition.formats import get_format, list_formats
from decomposition.network.layers import inspect_layers
from decomposition.operations import ChannelFactors, Factorise
from decomposition.plan.plan import CompressionPlan, LayerPlan, fingerprint, make_plan, without_growth

SHAPE = (3, 10, 10)

sizes = st.lists(st.integers(1, 64), min_size=1, max_size=4).map(tuple)
layer_names = st.text(min_size=1, max_size=12)
factorised = st.builds(
    Factorise,
    st.sampled_from(list_formats()),
    st.lists(st.integers(1, 512), min_size=1, max_size=6).map(tuple),
    st.none() | st.builds(ChannelFactors, sizes, sizes),
)
entries = st.builds(
    LayerPlan, layer_names, st.just(()) | st.tuples(factorised), st.none() | st.text(max_size=30)
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)
plans = st.builds(
    CompressionPlan,
    st.lists(entries, max_size=6, unique_by=lambda layer: layer.name).map(tuple),
    st.text(max_size=16),
    st.lists(st.integers(1, 500), min_size=1, max_size=3).map(tuple),
    st.text(max_size=10),
    metadata=st.dictionaries(st.text(max_size=6), json_values, max_size=3),
)


@given(plan=plans)
def test_a_plan_survives_its_json(plan: CompressionPlan) -> None:
    assert CompressionPlan.from_json(plan.to_json()) == plan


def test_a_plan_survives_its_file(small_net: nn.Module, tmp_path: Path) -> None:
    plan = make_plan(small_net, SHAPE, "tucker", 2)
    plan.save(tmp_path / "plan.json")
    assert CompressionPlan.load(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert plan.specs(small_net) == inspect_layers(small_net, SHAPE)


def test_a_plan_gives_its_layers_by_name(small_net: nn.Module) -> None:
    plan = make_plan(small_net, SHAPE, "cp", {"3": 4})
    assert plan["3"].operations == (Factorise("cp", (4,)),)
    assert plan["3"].operation(Factorise) == Factorise("cp", (4,))
    assert plan["0"].operation(Factorise) is None
    assert plan.chosen(Factorise) == {"3": Factorise("cp", (4,))}
    assert [layer.name for layer in plan] == ["0", "3", "7"]
    with pytest.raises(KeyError):
        plan["nothing"]


Change = Callable[[dict[str, Any]], object]


def first(change: Change) -> Change:
    """Change the first operation of the first layer."""
    return lambda plan: change(plan["layers"][0]["operations"][0])


def layer(**values: Any) -> Change:
    """Set values of the first layer."""
    return lambda plan: plan["layers"][0].update(values)


def operation(**values: Any) -> Change:
    return first(lambda operation: operation.update(values))


NO_RANKS = ([], [0, 2], [-2, 2], [2.0, 2], [True, 2], ["2", 2], 2)
NO_FACTORS = (
    *({"out": [8]}, {"out": [8], "in": [3], "kernel": [9]}, {"out": [0], "in": [3]}),
    *({"out": [8], "in": [True]}, {"out": [], "in": [3]}, [8, 3]),
)
CHANGES: dict[str, tuple[Change, str]] = {
    "another version": (lambda p: p.update(version=5), "version 5; this release reads version 3"),
    "boolean version": (lambda p: p.update(version=True), "version True"),
    "version in text": (lambda p: p.update(version="3"), "version '3'"),
    "no version": (lambda p: p.pop("version"), "version None"),
    "metadata no object": (lambda p: p.update(metadata=[1]), "metadata must be an object"),
    "metadata not finite": (
        lambda p: p.update(metadata={"a": {"b": [math.nan]}}),
        r"\['a'\]\['b'\]\[0\] is nan",
    ),
    "unknown entry": (lambda p: p.update(extra=1), r"unknown entries \['extra'\]"),
    "missing entry": (lambda p: p.pop("chosen_by"), r"missing entries \['chosen_by'\]"),
    **{
        f"input shape {shape}": (lambda p, shape=shape: p.update(input_shape=shape), "input_shape")
        for shape in ([], [3, 10.5], [True])
    },
    "fingerprint no text": (lambda p: p.update(fingerprint=7), "fingerprint must be a string"),
    "chosen_by no text": (lambda p: p.update(chosen_by=None), "chosen_by must be a string"),
    "layers no list": (lambda p: p.update(layers={}), "layers must be a list"),
    "layer no object": (lambda p: p["layers"].append("0"), "every layer must be an object"),
    "layer without name": (lambda p: p["layers"][0].pop("name"), "every layer must be an object"),
    "layer's name no text": (layer(name=0), "every layer must be an object"),
    "layer twice": (lambda p: p["layers"].append(p["layers"][0]), "layers twice: 0"),
    "layer without operations": (
        lambda p: p["layers"][0].pop("operations"),
        r"'0': .*missing .*'operations'",
    ),
    "layer with unknown entry": (
        layer(rank=2),
        "'0': unknown .*'rank'.*allowed: .*'name', 'operations', 'reason'",
    ),
    "a format beside the operations": (layer(format="tucker"), "layer '0': unknown entries .*'format'"),
    "kept channels beside the operations": (layer(kept=[0]), "layer '0': unknown entries .*'kept'"),
    "operations no list": (layer(operations={}), r"layer '0': operations .* list, got \{\}"),
    "operations null": (layer(operations=None), "layer '0': operations .* list, got None"),
    "operation no object": (
        layer(operations=["factorise"]),
        "layer '0': .* kind as `operation`, got 'factorise'",
    ),
    "operation without kind": (first(lambda o: o.pop("operation")), "layer '0': .* object with its kind"),
    "kind no text": (operation(operation=3), "layer '0': .* object with its kind"),
    "unknown kind": (operation(operation="factorize"), "'0': .*'factorize'; .*Did you mean 'factorise'"),
    "operation twice": (
        lambda p: p["layers"][0]["operations"].append(p["layers"][0]["operations"][0]),
        "layer '0': operation 'factorise' stands after 'factorise'",
    ),
    "unknown value of an operation": (
        operation(rank=2),
        "layer '0', factorise: unknown entries .*'rank'.*allowed: .*'factors', 'format', 'ranks'",
    ),
    "operation without ranks": (first(lambda o: o.pop("ranks")), "layer '0', factorise: .*missing .*'ranks'"),
    "operation without format": (
        first(lambda o: o.pop("format")),
        "layer '0', factorise: .*missing .*'format'",
    ),
    **{
        f"format {name}": (
            operation(format=name),
            f"'0', factorise: .* format {re.escape(repr(name))}; .*tucker",
        )
        for name in ("svd", None, ["cp"])
    },
    **{
        f"ranks {ranks}": (
            operation(ranks=ranks),
            f"'0', factorise: .*integers of at least 1, got {re.escape(repr(ranks))}",
        )
        for ranks in NO_RANKS
    },
    **{
        f"factors {factors}": (
            operation(factors=factors),
            f"'0', factorise: factors must be .*'out'.*'in'.*, got {re.escape(repr(factors))}",
        )
        for factors in NO_FACTORS
    },
    "reason no text": (layer(reason=3), "layer '0': reason must be text, got 3"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_a_damaged_plan_is_refused(small_net: nn.Module, change: Change, message: str) -> None:
    content = json.loads(make_plan(small_net, SHAPE, "tucker", 2).to_json())
    change(content)
    with pytest.raises(PlanError, match=message):
        CompressionPlan.from_json(json.dumps(content))


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"plan"'])
def test_text_that_is_no_plan_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"plan\.json"):
        CompressionPlan.load(path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"missing\.json cannot be read"):
        CompressionPlan.load(tmp_path / "missing.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match=r"binary\.json cannot be read"):
        CompressionPlan.load(tmp_path / "binary.json")


def test_a_plan_for_another_model_is_refused(small_net: nn.Module) -> None:
    plan = make_plan(small_net, SHAPE, "tucker", 2)
    renamed = nn.Sequential(nn.Identity(), *small_net)
    with pytest.raises(PlanError, match="layers that the model does not have"):
        plan.specs(renamed)
    small_net[7] = nn.Linear(12, 11)  # type: ignore[index]
    with pytest.raises(PlanError, match="fingerprint"):
        plan.specs(small_net)


def test_a_plan_that_decomposes_a_refused_layer_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 8, 3))
    plan = make_plan(model, (4, 8, 8), "tucker", 1)
    assert "groups=2" in (plan["0"].reason or "")
    forged = CompressionPlan(
        (LayerPlan("0", (Factorise("tucker", (1, 1)),)), plan["1"]), plan.fingerprint, plan.input_shape
    )
    with pytest.raises(PlanError, match="layer '0' cannot be decomposed: grouped"):
        forged.specs(model)


def test_the_fingerprint_knows_the_structure_and_not_the_weights(small_net: nn.Module) -> None:
    first = fingerprint(inspect_layers(small_net, SHAPE))
    for parameter in small_net.parameters():
        nn.init.normal_(parameter)
    assert fingerprint(inspect_layers(small_net, SHAPE)) == first
    small_net[3].stride = (1, 1)  # type: ignore[index]
    assert fingerprint(inspect_layers(small_net, SHAPE)) != first


@pytest.mark.parametrize("name", list_formats())
def test_one_rank_for_all_is_capped_at_each_layers_maximum(small_net: nn.Module, name: str) -> None:
    plan = make_plan(small_net, SHAPE, name, 1)
    for layer, spec in zip(plan, plan.specs(small_net), strict=True):
        operation = layer.operation(Factorise)
        assert operation is not None
        assert layer.operations == (operation,)
        assert operation.format == name
        assert operation.ranks == get_format(name).expand(operation.modes(spec), 1)
        assert layer.cost(spec).params < spec.params
    assert make_plan(small_net, SHAPE, name, 10**6).chosen(Factorise) == {}


def test_layers_without_a_rank_stay_dense_with_a_reason(small_net: nn.Module) -> None:
    plan = make_plan(small_net, SHAPE, "tucker", {"3": [3, 2]})
    assert plan["3"] == LayerPlan("3", (Factorise("tucker", (3, 2)),))
    assert plan["0"] == LayerPlan("0", reason="no rank was given")


def test_ranks_for_unknown_layers_are_refused(small_net: nn.Module) -> None:
    with pytest.raises(PlanError, match="'1' is no compressible layer; choose from 0, 3, 7"):
        make_plan(small_net, SHAPE, "tucker", {"1": 2})


WRONG = (0, -1, 2.0, True)


@pytest.mark.parametrize("ranks", [*({"3": rank} for rank in (*WRONG, "2", [1, 2, 3])), *WRONG])
def test_infeasible_ranks_given_by_hand_are_refused(small_net: nn.Module, ranks: Any) -> None:
    layer = "3" if isinstance(ranks, dict) else "0"
    with pytest.raises(DecompositionError, match=f"layer '{layer}'"):
        make_plan(small_net, SHAPE, "tucker", ranks)


def test_a_layer_that_would_get_no_smaller_stays_dense_with_the_reason(small_net: nn.Module) -> None:
    spec = next(spec for spec in inspect_layers(small_net, SHAPE) if spec.name == "7")
    entry = LayerPlan("7", (Factorise("tucker", (10,)),))
    assert entry.cost(spec).params >= spec.params
    kept = without_growth(entry, spec)
    assert kept.operations == ()
    assert str(entry.cost(spec).params) in (kept.reason or "")
    assert kept.cost(spec).params == spec.params
    assert kept.cost(spec).macs == spec.macs


def forged(model: nn.Module, *layers: LayerPlan) -> CompressionPlan:
    """A plan for the model that nobody checked."""
    return CompressionPlan(layers, fingerprint(inspect_layers(model, SHAPE)), SHAPE)


MISFITS: dict[str, tuple[Factorise, str]] = {
    "rank too large": (Factorise("tucker", (13, 2)), r"layer '3': .*\(13, 2\).*outside 1\.\.\(12, 8\)"),
    "rank too many": (Factorise("cp", (2, 2)), r"layer '3': cp .*one rank, got \[2, 2\]; give \[1\.\."),
    "rank too few": (
        Factorise("tucker", (2,)),
        r"layer '3': .* 2 ranks.*got \[2\]; give \[1\.\.12, 1\.\.8\]",
    ),
    "unknown format": (Factorise("svd", (2,)), "there is no format 'svd'; choose from .*tucker"),
    "factors of other channels": (
        Factorise("tensor_ring", (2,) * 5, ChannelFactors((4, 4), (4, 2))),
        r"layer '3': the factors .*\[4, 4\].* do not multiply to its channels \(out 12, in 8\)",
    ),
}


@pytest.mark.parametrize(("operation", "message"), MISFITS.values(), ids=MISFITS)
@pytest.mark.parametrize("function", [apply_plan, build_structure, lambda model, plan: plan.specs(model)])
def test_what_does_not_fit_is_refused_and_the_model_stays_as_it_was(
    small_net: nn.Module, function: Callable[..., object], operation: Factorise, message: str
) -> None:
    before = {key: value.clone() for key, value in small_net.state_dict().items()}
    modules = list(small_net.modules())
    plan = forged(small_net, LayerPlan("0"), LayerPlan("3", (operation,)), LayerPlan("7"))
    with pytest.raises(DecompositionError, match=message):
        function(small_net, plan)
    assert list(small_net.modules()) == modules
    assert small_net.training
    after = small_net.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())


def test_metadata_goes_with_the_plan(small_net: nn.Module, tmp_path: Path) -> None:
    notes = {"preprocessing": {"mean": [0.5], "classes": ["cat", "[ 1 ]"], "size": [8, 8]}}
    plan = dataclasses.replace(make_plan(small_net, SHAPE, "tucker", 2), metadata=notes)
    assert CompressionPlan.from_json(plan.to_json()) == plan
    assert plan.after_groups(small_net, lambda kind, model, chosen: model)[1].metadata == notes
    save_compressed(build_structure(small_net, plan), plan, tmp_path / "small.safetensors")
    assert load_compressed(small_net, tmp_path / "small.safetensors")[1].metadata == notes
    assert plan != dataclasses.replace(plan, metadata={})
    notes["preprocessing"]["mean"].append(0.6)  # type: ignore[attr-defined]
    assert plan.metadata["preprocessing"]["mean"] == [0.5]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"a": (1, 2)}, r"metadata\['a'\] is \(1, 2\).*JSON"),
        ({"a": {1: 2}}, r"metadata\['a'\] has the key 1.*text"),
        ({"a": [float("inf")]}, r"metadata\['a'\]\[0\] is inf"),
        ([1], "metadata must be an object"),
    ],
)
def test_metadata_that_json_cannot_hold_is_refused(small_net: nn.Module, metadata: Any, message: str) -> None:
    plan = make_plan(small_net, SHAPE, "tucker", 2)
    with pytest.raises(PlanError, match=message):
        dataclasses.replace(plan, metadata=metadata)


def test_text_that_looks_like_a_list_stays_as_it_is(small_net: nn.Module) -> None:
    plan = dataclasses.replace(make_plan(small_net, SHAPE, "tucker", 2), chosen_by="[ 1,  2 ]")
    assert CompressionPlan.from_json(plan.to_json()) == plan


WRITTEN = """{
  "version": 3,
  "fingerprint": "57e129f3aff39ca0",
  "input_shape": [3, 10, 10],
  "chosen_by": "user",
  "layers": [
    {
      "name": "0",
      "operations": [],
      "reason": "no rank was given"
    },
    {
      "name": "3",
      "operations": [
        {
          "operation": "factorise",
          "format": "tensor_ring",
          "ranks": [2, 2, 2, 2, 2],
          "factors": {
            "out": [4, 3],
            "in": [4, 2]
          }
        }
      ]
    },
    {
      "name": "7",
      "operations": [],
      "reason": "no rank was given"
    }
  ]
}
"""


def test_a_plan_is_written_like_this(small_net: nn.Module) -> None:
    plan = make_plan(small_net, SHAPE, "tensor_ring", {"3": 2}, tensorised=True)
    assert plan.to_json() == WRITTEN
    assert CompressionPlan.from_json(WRITTEN) == plan


def saved_with(
    model: nn.Module,
    plan: CompressionPlan,
    path: Path,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Save the structure with random cores, then change one tensor in the file."""
    save_compressed(build_structure(model, plan), plan, path)
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file(
        {**tensors, name: change(tensors[name])}, path, {"rankrl.plan": plan.to_json()}
    )


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("1.weight", lambda t: t.to(torch.complex64), "is torch.complex64, but the model needs"),
        ("1.weight", lambda t: t.long(), "is torch.int64, but the model needs"),
        ("1.weight", lambda t: t > 0, "is torch.bool, but the model needs"),
        ("1.weight", lambda t: t / 0, "holds NaN or infinite values"),
        ("1.running_var", lambda t: t / 0, "holds NaN or infinite values"),
        ("1.num_batches_tracked", lambda t: t + 0.5, "is torch.float32, but the model needs torch.int64"),
    ],
)
def test_saved_weights_of_another_kind_are_refused(
    small_net: nn.Module,
    tmp_path: Path,
    name: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    message: str,
) -> None:
    path = tmp_path / "small.safetensors"
    saved_with(small_net, make_plan(small_net, SHAPE, "tucker", 2), path, name, change)
    with pytest.raises(PlanError, match=rf"{re.escape(name)} {message}"):
        load_compressed(small_net, path)


def test_saved_weights_in_half_precision_and_infinite_masks_are_loaded(
    small_net: nn.Module, tmp_path: Path
) -> None:
    small_net.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    plan, path = make_plan(small_net, SHAPE, "tucker", 2), tmp_path / "small.safetensors"
    saved_with(small_net, plan, path, "1.weight", torch.Tensor.half)
    loaded, _ = load_compressed(small_net, path)
    assert torch.equal(loaded.get_buffer("mask"), torch.tensor([0.0, -torch.inf]))
    kinds = {name: parameter.dtype for name, parameter in loaded.named_parameters()}
    assert [name for name, kind in kinds.items() if kind == torch.float16] == ["1.weight"]
