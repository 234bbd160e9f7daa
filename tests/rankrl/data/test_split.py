"""A stratified split is a partition that keeps each class's share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankrl.data.datasets import stratified_split


@given(labels=st.lists(st.integers(0, 4), max_size=60), share=st.floats(0, 1), seed=st.integers(0, 9))
def test_the_two_sides_partition_the_indices_by_each_class_share(
    labels: list[int], share: float, seed: int
) -> None:
    y = torch.tensor(labels, dtype=torch.int64)
    size = int(share * len(labels))
    stay, drawn = stratified_split(y, size, seed)
    assert len(drawn) == size
    assert sorted(stay.tolist() + drawn.tolist()) == list(range(len(labels)))
    assert stay.tolist() == sorted(stay.tolist())
    for label in set(labels):
        exact = labels.count(label) * size / len(labels)
        assert abs(int((y[drawn] == label).sum()) - exact) < 1


def test_the_seed_decides_the_draw() -> None:
    y = torch.arange(100) % 5
    assert torch.equal(stratified_split(y, 20, 3)[1], stratified_split(y, 20, 3)[1])
    assert not torch.equal(stratified_split(y, 20, 3)[1], stratified_split(y, 20, 4)[1])


@pytest.mark.parametrize("size", [-1, 6])
def test_more_than_there_are_cannot_be_drawn(size: int) -> None:
    with pytest.raises(ValueError, match=f"cannot draw {size} of 5"):
        stratified_split(torch.zeros(5, dtype=torch.int64), size, 0)
