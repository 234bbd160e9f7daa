"""The plan's JSON: it comes back as it went, and nothing else is accepted."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from decomposition import apply_plan, build_structure, load_compressed, save_compressed
from decomposition.errors import DecompositionError, PlanError
from decomposition.formats import get_format, list_formats
from decomposition.layers import inspect_layers
from decomposition.plan import CompressionPlan, LayerPlan, fingerprint, make_plan, without_growth

SHAPE = (3, 10, 10)

channels = st.none() | st.sets(st.integers(0, 300), min_size=1, max_size=6).map(sorted).map(tuple)
sizes = st.lists(st.integers(1, 64), min_size=1, max_size=4)
layer_names = st.text(min_size=1, max_size=12)
decomposed = st.builds(
    LayerPlan,
    layer_names,
    st.sampled_from(list_formats()),
    st.lists(st.integers(1, 512), min_size=1, max_size=6).map(tuple),
    st.none() | st.fixed_dictionaries({"out": sizes, "in": sizes}),
    kept=channels,
)
dense = st.builds(LayerPlan, layer_names, reason=st.none() | st.text(max_size=30), kept=channels)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=10,
)
plans = st.builds(
    CompressionPlan,
    st.lists(decomposed | dense, max_size=6, unique_by=lambda layer: layer.name).map(tuple),
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
    assert plan["3"].ranks == (4,)
    assert [layer.name for layer in plan] == ["0", "3", "7"]
    with pytest.raises(KeyError):
        plan["nothing"]


Change = Callable[[dict[str, Any]], object]

CHANGES: dict[str, tuple[Change, str]] = {
    "newer version": (lambda p: p.update(version=4), "version 4.*reads versions 1, 2 and 3"),
    "version of metadata without any": (
        lambda p: p.update(version=3),
        "version 3 is for plans with",
    ),
    "metadata in a plan without": (lambda p: p.update(metadata={"a": 1}), "version 1 is for"),
    "metadata no object": (lambda p: p.update(version=3, metadata=[1]), "metadata must be an object"),
    "metadata not finite": (
        lambda p: p.update(version=3, metadata={"a": {"b": [float("nan")]}}),
        r"metadata\['a'\]\['b'\]\[0\] is nan",
    ),
    "pruning version without kept channels": (lambda p: p.update(version=2), "version 2 is for plans with"),
    "kept channels in a plan without": (
        lambda p: p["layers"][0].update(kept=[0]),
        "version 1 is for those with neither",
    ),
    "no kept channel": (lambda p: p["layers"][0].update(kept=[]), "layer '0': kept must be a sorted list"),
    "unsorted channels": (lambda p: p["layers"][0].update(kept=[2, 1]), "kept must be a sorted list"),
    "channel twice": (lambda p: p["layers"][0].update(kept=[1, 1]), "kept must be a sorted list"),
    "negative channel": (lambda p: p["layers"][0].update(kept=[-1, 1]), "kept must be a sorted list"),
    "boolean channel": (lambda p: p["layers"][0].update(kept=[True]), "kept must be a sorted list"),
    "channels no list": (lambda p: p["layers"][0].update(kept=3), "kept must be a sorted list"),
    "no version": (lambda p: p.pop("version"), "version None"),
    "unknown entry": (lambda p: p.update(extra=1), r"unknown entries \['extra'\]"),
    "missing entry": (lambda p: p.pop("chosen_by"), r"missing entries \['chosen_by'\]"),
    "empty input shape": (lambda p: p.update(input_shape=[]), "input_shape"),
    "fractional input shape": (lambda p: p.update(input_shape=[3, 10.5]), "input_shape"),
    "boolean input shape": (lambda p: p.update(input_shape=[True]), "input_shape"),
    "fingerprint no text": (lambda p: p.update(fingerprint=7), "fingerprint must be a string"),
    "chosen_by no text": (lambda p: p.update(chosen_by=None), "chosen_by must be a string"),
    "layers no list": (lambda p: p.update(layers={}), "layers must be a list"),
    "layer no object": (lambda p: p["layers"].append("0"), "every layer must be an object"),
    "layer without name": (lambda p: p["layers"][0].pop("name"), "every layer must be an object"),
    "layer twice": (lambda p: p["layers"].append(p["layers"][0]), "layers twice: 0"),
    "layer without ranks": (lambda p: p["layers"][0].pop("ranks"), r"layer '0'.*missing entries \['ranks'\]"),
    "layer with unknown entry": (lambda p: p["layers"][0].update(rank=2), r"unknown entries \['rank'\]"),
    "unknown format": (lambda p: p["layers"][0].update(format="svd"), "unknown format 'svd'.*tucker"),
    "rank 0": (lambda p: p["layers"][0].update(ranks=[0, 2]), "integers of at least 1"),
    "fractional rank": (lambda p: p["layers"][0].update(ranks=[2.0, 2]), "integers of at least 1"),
    "boolean rank": (lambda p: p["layers"][0].update(ranks=[True, 2]), "integers of at least 1"),
    "ranks no list": (lambda p: p["layers"][0].update(ranks=2), "integers of at least 1"),
    "format without ranks": (lambda p: p["layers"][0].update(ranks=[]), "needs ranks"),
    "ranks without format": (lambda p: p["layers"][0].update(format=None), "a dense one has none"),
    "half of the factors": (lambda p: p["layers"][0].update(factors={"out": [8]}), "factors must be"),
    "factor 0": (lambda p: p["layers"][0].update(factors={"out": [0], "in": [3]}), "factors must be"),
    "reason no text": (lambda p: p["layers"][0].update(reason=3), "reason must be text"),
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
        (LayerPlan("0", "tucker", (1, 1)), plan["1"]), plan.fingerprint, plan.input_shape
    )
    with pytest.raises(PlanError, match="layer '0' cannot be decomposed: grouped"):
        forged.specs(model)


def test_a_plan_with_ranks_beyond_the_layer_is_refused(small_net: nn.Module) -> None:
    plan = make_plan(small_net, SHAPE, "tucker", 2)
    forged = CompressionPlan(
        (plan["0"], LayerPlan("3", "tucker", (13, 2)), plan["7"]), plan.fingerprint, SHAPE
    )
    with pytest.raises(DecompositionError, match="layer '3'"):
        forged.specs(small_net)


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
        assert layer.format == name
        assert layer.ranks == get_format(name).expand(layer.modes(spec), 1)
        assert layer.params(spec) < spec.params
    assert all(layer.format is None for layer in make_plan(small_net, SHAPE, name, 10**6))


def test_tensorised_plans_carry_their_factors(small_net: nn.Module) -> None:
    plan = make_plan(small_net, SHAPE, "tensor_ring", {"3": 2}, tensorised=True)
    assert plan["3"].factors == {"out": [4, 3], "in": [4, 2]}
    assert CompressionPlan.from_json(plan.to_json()) == plan


def test_layers_without_a_rank_stay_dense_with_a_reason(small_net: nn.Module) -> None:
    plan = make_plan(small_net, SHAPE, "tucker", {"3": [3, 2]})
    assert plan["3"].ranks == (3, 2)
    assert plan["0"] == LayerPlan("0", reason="no rank was given")


def test_ranks_for_unknown_layers_are_refused(small_net: nn.Module) -> None:
    with pytest.raises(PlanError, match="'1' is no compressible layer; choose from 0, 3, 7"):
        make_plan(small_net, SHAPE, "tucker", {"1": 2})


@pytest.mark.parametrize("rank", [0, -1, 2.0, True, "2", [1, 2, 3]])
def test_infeasible_ranks_given_by_hand_are_refused(small_net: nn.Module, rank: Any) -> None:
    with pytest.raises(DecompositionError, match="layer '3'"):
        make_plan(small_net, SHAPE, "tucker", {"3": rank})


@pytest.mark.parametrize("rank", [0, -1, 2.0, True])
def test_an_infeasible_rank_for_all_is_refused(small_net: nn.Module, rank: Any) -> None:
    with pytest.raises(DecompositionError, match="layer '0'"):
        make_plan(small_net, SHAPE, "tucker", rank)


def test_a_layer_that_would_get_no_smaller_stays_dense_with_the_reason(small_net: nn.Module) -> None:
    spec = next(spec for spec in inspect_layers(small_net, SHAPE) if spec.name == "7")
    entry = LayerPlan("7", "tucker", (10,))
    assert entry.params(spec) >= spec.params
    kept = without_growth(entry, spec)
    assert (kept.format, kept.ranks) == (None, ())
    assert str(entry.params(spec)) in (kept.reason or "")
    assert kept.params(spec) == spec.params
    assert kept.macs(spec) == spec.macs


def halved(dense: nn.Module) -> nn.Module:
    """The small network with half of the first layer's channels, as a pruning package would return it."""
    smaller = copy.deepcopy(dense)
    smaller[0] = nn.Conv2d(3, 4, 3, padding=1, bias=False)  # type: ignore[index]
    smaller[1] = nn.BatchNorm2d(4)  # type: ignore[index]
    smaller[3] = nn.Conv2d(4, 12, 3, stride=2)  # type: ignore[index]
    return smaller


def test_a_plan_holds_kept_channels_and_ranks_of_what_is_left(small_net: nn.Module) -> None:
    pruned = halved(small_net)
    left = make_plan(pruned, SHAPE, "tucker", {"3": (3, 4)})
    plan = left.with_removal(small_net, {"0": [1, 3, 5, 7], "3": list(range(12))})
    assert plan.kept_channels == {"0": [1, 3, 5, 7]}  # a layer that loses nothing is not named
    assert plan["3"].ranks == (3, 4)
    assert plan.fingerprint == fingerprint(inspect_layers(small_net, SHAPE))
    assert plan.after_removal(pruned) == left
    assert left.after_removal(pruned) == left
    assert CompressionPlan.from_json(plan.to_json()) == plan
    assert '"kept": [1, 3, 5, 7]'.replace(" ", "") in plan.to_json().replace(" ", "").replace("\n", "")


def test_plans_without_kept_channels_are_written_as_before(small_net: nn.Module) -> None:
    content = json.loads(make_plan(small_net, SHAPE, "tucker", 2).to_json())
    assert content["version"] == 1
    assert all("kept" not in layer for layer in content["layers"])


AS_BEFORE = """{
  "version": 1,
  "fingerprint": "%s",
  "input_shape": [3, 10, 10],
  "chosen_by": "user",
  "layers": [
    {
      "name": "0",
      "format": null,
      "ranks": [],
      "reason": "no rank was given"
    },
    {
      "name": "3",
      "format": "tucker",
      "ranks": [3, 2]
    },
    {
      "name": "7",
      "format": null,
      "ranks": [],
      "reason": "no rank was given"
    }
  ]
}
"""


def test_plans_without_metadata_are_written_as_before_and_still_read(small_net: nn.Module) -> None:
    plan = make_plan(small_net, SHAPE, "tucker", {"3": [3, 2]})
    assert plan.to_json() == AS_BEFORE % plan.fingerprint
    assert CompressionPlan.from_json(AS_BEFORE % plan.fingerprint) == plan
    removing = plan.with_removal(small_net, {"0": [1, 3]})
    assert json.loads(removing.to_json())["version"] == 2
    assert CompressionPlan.from_json(removing.to_json()) == removing


def test_metadata_goes_with_the_plan(small_net: nn.Module, tmp_path: Path) -> None:
    notes = {"preprocessing": {"mean": [0.5], "classes": ["cat", "[ 1 ]"], "size": [8, 8]}}
    plan = dataclasses.replace(make_plan(small_net, SHAPE, "tucker", 2), metadata=notes)
    assert json.loads(plan.to_json())["version"] == 3
    assert CompressionPlan.from_json(plan.to_json()) == plan
    removing = plan.with_removal(small_net, {"0": [1, 3, 5, 7]})
    assert CompressionPlan.from_json(removing.to_json()) == removing
    assert removing.after_removal(halved(small_net)).metadata == notes
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


def test_kept_channels_are_refused_by_what_cannot_remove_them(small_net: nn.Module, tmp_path: Path) -> None:
    left = make_plan(halved(small_net), SHAPE, "tucker", 2)
    plan = left.with_removal(small_net, {"0": [0, 1, 2, 3]})
    for refused in (apply_plan, build_structure):
        with pytest.raises(PlanError, match=r"removes channels from layer '0',.*rankrl\.carry_out"):
            refused(small_net, plan)
    with pytest.raises(PlanError, match="layer '0' has 8 output channels, the plan keeps 4"):
        plan.after_removal(small_net)
    with pytest.raises(PlanError, match="channels are kept in nothing, but the plan has no such layer"):
        left.with_removal(small_net, {"nothing": [0]})
    save_compressed(build_structure(halved(small_net), left), plan, tmp_path / "small.safetensors")
    with pytest.raises(PlanError, match="removes channels"):
        load_compressed(small_net, tmp_path / "small.safetensors")


def test_a_saved_model_loads_into_the_structure_that_a_callable_builds(
    small_net: nn.Module, tmp_path: Path
) -> None:
    pruned = halved(small_net)
    left = make_plan(pruned, SHAPE, "tucker", 2)
    plan = left.with_removal(small_net, {"0": [0, 1, 2, 3]})
    saved = build_structure(pruned, left)
    save_compressed(saved, plan, tmp_path / "small.safetensors")
    loaded, stored = load_compressed(
        small_net,
        tmp_path / "small.safetensors",
        structure=lambda model, plan: build_structure(halved(model), plan.after_removal(halved(model))),
    )
    assert stored == plan
    assert all(torch.equal(a, b) for a, b in zip(saved.parameters(), loaded.parameters(), strict=True))
