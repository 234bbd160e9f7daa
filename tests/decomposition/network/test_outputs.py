"""The tensors in what networks return."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_leaves

from decomposition.network.inputs import leaves, tensors_in

A, B, C = (torch.full((2,), value) for value in (1.0, 2.0, 3.0))


class Detections(NamedTuple):
    boxes: Any
    logits: Any


@dataclass
class Result:
    first: Any
    second: Any = None


@pytest.mark.parametrize(
    ("output", "places"),
    [
        (A, [()]),
        ((A, B), [(0,), (1,)]),
        ({"z": A, "a": [B, "text", C]}, [("z",), ("a", 0), ("a", 2)]),
        (Detections(A, {"x": B}), [("boxes",), ("logits", "x")]),
        (namedtuple("Pair", "one two")(3, A), [("two",)]),
        (Result(A, Result(None, B)), [("first",), ("second", "second")]),
        (OrderedDict(one=A, size=A.shape), [("one",)]),
        (torch.return_types.max((A, B)), [(0,), (1,)]),
        (None, []),
        (Result, []),
    ],
)
def test_tensors_are_reached_in_order_with_their_places(output: Any, places: list[Any]) -> None:
    found = {place: leaf for place, leaf in leaves(output) if isinstance(leaf, torch.Tensor)}
    assert list(found) == places
    assert [id(each) for each in found.values()] == [id(each) for each in tensors_in(output)]
    for place, leaf in found.items():
        reached = output
        for part in place:
            try:
                reached = reached[part]
            except TypeError:
                reached = getattr(reached, part)
        assert reached is leaf


def test_order_is_that_of_torch() -> None:
    output = {"z": (A, [B, 2]), "a": Detections(C, None), "b": OrderedDict(y=A, x=B)}
    expected = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
    assert [id(each) for each in tensors_in(output)] == [id(each) for each in expected]
