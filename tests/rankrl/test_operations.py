"""Registered operations go to JSON and back, in plans too, and refuse what they did not write."""

import json
from dataclasses import MISSING, FrozenInstanceError, fields, is_dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rankrl  # noqa: F401 - registers the operations of every package
from decomposition import (
    ChannelFactors,
    CompressionPlan,
    Factorise,
    GroupOperation,
    LayerOperation,
    LayerPlan,
    Operation,
    PlanError,
    Quantise,
    list_formats,
    list_operations,
)
from decomposition.operations import operation_from_dict, operation_kind
from rankrl.operations import KeepChannels, RemoveBlock

counts = st.lists(st.integers(1, 512), min_size=1, max_size=6).map(tuple)

STRATEGIES: dict[str, st.SearchStrategy[Operation]] = {
    "factorise": st.builds(
        Factorise,
        st.sampled_from(list_formats()),
        counts,
        st.none() | st.builds(ChannelFactors, counts, counts),
    ),
    "quantise": st.builds(Quantise, st.sampled_from([8, 4]), st.sampled_from(["uint8", "float32"])),
    "keep_channels": st.sets(st.integers(0, 300), min_size=1).map(lambda s: KeepChannels(tuple(sorted(s)))),
    "remove_block": st.builds(RemoveBlock, st.text(min_size=1)),
}
"""How to draw operations of each kind; a new kind needs an entry here."""
FREE_TEXT = {"block"}
"""Entries that may be any text."""


def operations(kind: str) -> st.SearchStrategy[Operation]:
    if kind not in STRATEGIES:
        pytest.fail(f"operation {kind!r} is registered and has no strategy here; add one to STRATEGIES")
    return STRATEGIES[kind]


@pytest.mark.parametrize("kind", list_operations())
def test_every_kind_says_what_it_is(kind: str) -> None:
    cls = operation_kind(kind)
    assert cls.kind == kind
    assert cls.description
    assert "\n" not in cls.description
    assert is_dataclass(cls)
    assert issubclass(cls, LayerOperation) != issubclass(cls, GroupOperation)


def test_group_operations_come_before_those_of_single_layers() -> None:
    kinds = [operation_kind(kind) for kind in list_operations()]
    groups = [kind.stage for kind in kinds if issubclass(kind, GroupOperation)]
    singles = [kind.stage for kind in kinds if issubclass(kind, LayerOperation)]
    assert max(groups) < min(singles)
    assert len({kind.stage for kind in kinds}) == len(kinds)


@pytest.mark.parametrize("kind", list_operations())
@given(data=st.data())
def test_every_operation_survives_json(kind: str, data: st.DataObject) -> None:
    operation = data.draw(operations(kind))
    content = operation.to_dict()
    assert content["operation"] == kind
    found = operation_from_dict(json.loads(json.dumps(content)), "a test")
    assert found == operation
    assert type(found) is operation_kind(kind)
    assert hash(found) == hash(operation)
    assert str(found) == str(operation)


@given(data=st.data())
def test_every_combination_survives_the_json_of_a_plan(data: st.DataObject) -> None:
    together = [kind for kind in list_operations() if not getattr(operation_kind(kind), "removes", False)]
    alone = [{kind} for kind in set(list_operations()) - set(together)]
    kinds = data.draw(st.sets(st.sampled_from(together)) | st.sampled_from(alone))
    drawn = [data.draw(operations(kind)) for kind in kinds]
    layer = LayerPlan("a.layer", tuple(sorted(drawn, key=lambda operation: operation.stage)))
    plan = CompressionPlan((layer, LayerPlan("another", reason="why")), "0123", (3, 8, 8), "a test")
    assert CompressionPlan.from_json(plan.to_json()) == plan
    for operation in drawn:
        assert layer.operation(type(operation)) == operation
        assert plan.chosen(type(operation)) == {"a.layer": operation}


@pytest.mark.parametrize("kind", list_operations())
@given(data=st.data())
def test_every_operation_is_read_strictly(kind: str, data: st.DataObject) -> None:
    content = data.draw(operations(kind)).to_dict()
    required = [each.name for each in fields(operation_kind(kind)) if each.default is MISSING]

    def refused(changed: dict[str, Any], message: str) -> None:
        with pytest.raises(PlanError, match=rf"the plan, layer 'x', {kind}: .*{message}"):
            operation_from_dict(changed, "the plan, layer 'x'")

    refused({**content, "extra": 1}, r"unknown entries \['extra'\].*allowed: ")
    for name in required:
        refused(
            {key: value for key, value in content.items() if key != name}, rf"missing entries \['{name}'\]"
        )
    for name in set(content) - {"operation"}:
        for wrong in (True, -1, 0.5, "text", [], [0.5], [True], ["1"], [-1], {}, [[]]):
            if not (name in FREE_TEXT and wrong == "text"):
                refused({**content, name: wrong}, "got |choose from ")
        if name in required:
            refused({**content, name: None}, "got |choose from ")


@pytest.mark.parametrize("kind", list_operations())
@given(data=st.data())
def test_operations_do_not_change(kind: str, data: st.DataObject) -> None:
    operation = data.draw(operations(kind))
    with pytest.raises(FrozenInstanceError):
        setattr(operation, fields(operation)[0].name, None)  # type: ignore[arg-type]
