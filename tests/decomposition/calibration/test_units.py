"""Quantities of different units in one output are found from its answers; feature maps stay whole."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit, softmax
from torch import nn

from decomposition import collect_sensitivities, compressible_layers
from decomposition.calibration.units import Answers, Array, Units, find_units

INPUTS = 30


def found(answers: Array) -> Units | None:
    return find_units(Answers.of([answers[:7], answers[7:]]))


def boxes(drawn: np.random.Generator, anchors: int) -> Array:
    centres = drawn.uniform(0, 640, (1, 4, anchors))
    return centres + drawn.normal(0, 20, (INPUTS, 4, anchors))


def scores(drawn: np.random.Generator, count: int, anchors: int) -> Array:
    return expit(3 * drawn.standard_normal((INPUTS, count, anchors)) - 2)


def poses(drawn: np.random.Generator, joints: int) -> Array:
    """Draw pixels and a confidence for every joint, (inputs, joints, 3)."""
    return np.concatenate([boxes(drawn, joints)[:, :2], scores(drawn, 1, joints)], 1).transpose(0, 2, 1)


@pytest.mark.parametrize("anchors", [16, 100])
@pytest.mark.parametrize("last", [False, True])
def test_a_detector_has_boxes_and_classes(anchors: int, last: bool) -> None:
    drawn = np.random.default_rng(0)
    logits = 3 * drawn.standard_normal((INPUTS, 20, anchors))
    masks = drawn.normal(0, 0.5, (INPUTS, 32, anchors))
    kinds = {
        ("0:4", "4:24"): [boxes(drawn, anchors), scores(drawn, 20, anchors)],
        ("0:4", "4:24", ""): [boxes(drawn, anchors), logits],
        ("0:4", "4:24", "24:56"): [boxes(drawn, anchors), scores(drawn, 20, anchors), masks],
        ("0:4", "4"): [boxes(drawn, anchors), scores(drawn, 1, anchors)],
    }
    for names, parts in kinds.items():
        answers = np.concatenate(parts, 1)
        units = found(answers.transpose(0, 2, 1) if last else answers)
        assert units is not None
        assert units.axis == (2 if last else 1)
        assert units.names == list(filter(None, names))
        variances = [answers[:, group].var(0, ddof=1).mean() for group in units.groups]
        np.testing.assert_allclose(units.spreads, variances)


def test_quantities_may_alternate() -> None:
    drawn = np.random.default_rng(0)
    units = found(poses(drawn, 17))
    assert units is not None
    assert (units.axis, units.names) == (2, ["0:2", "2"])
    units = found(poses(drawn, 17).reshape(INPUTS, 51))
    assert units is not None
    assert units.names == ["0:2, 3:5, 6:8, ...", "2, 5, 8, ..."]
    assert units.groups[1].tolist() == list(range(2, 51, 3))


@pytest.mark.parametrize("rectified", [False, True])
@pytest.mark.parametrize("shape", [(64,), (64, 5, 5), (256, 7), (768,)])
def test_a_feature_map_is_one_quantity(shape: tuple[int, ...], rectified: bool) -> None:
    drawn = np.random.default_rng(1)
    wide = (1, shape[0], *[1] * (len(shape) - 1))
    for _ in range(10):
        scales = 10 ** drawn.uniform(-0.5, 0.5, wide)  # by a factor of ten
        answers = scales * drawn.standard_normal((INPUTS, *shape)) + drawn.standard_normal(wide)
        answers[:, drawn.choice(shape[0], 3, replace=False)] *= 1e-3  # some are hardly used
        assert found(np.maximum(answers, 0) if rectified else answers) is None


def test_classes_and_pictures_are_one_quantity() -> None:
    drawn = np.random.default_rng(2)
    assert found(softmax(6 * drawn.standard_normal((INPUTS, 1000)), 1)) is None
    assert found(softmax(6 * drawn.standard_normal((INPUTS, 21, 8, 8)), 1)) is None
    rare = drawn.normal(-6, 2, (1, 80, 1)) + 2 * drawn.standard_normal((INPUTS, 80, 50))
    assert found(expit(rare)) is None
    middle = np.clip(1.2 - np.hypot(*np.mgrid[-1:1:28j, -1:1:28j]), 0.02, 1)  # nothing at the edges
    assert found(middle * drawn.uniform(size=(INPUTS, 1, 28, 28))) is None


def test_channels_that_do_not_vary_join_what_has_their_size() -> None:
    drawn = np.random.default_rng(3)
    strides, zeros = np.full((INPUTS, 1, 50), 16.0), np.zeros((INPUTS, 1, 50))
    answers = np.concatenate([boxes(drawn, 50), strides, scores(drawn, 20, 50), zeros], 1)
    units = found(answers)
    assert units is not None
    assert len(units.groups) == 2
    assert {0, 1, 2, 3} <= set(units.groups[0].tolist())
    assert sum(map(len, units.groups)) == 26
    assert found(np.ones((INPUTS, 5, 4))) is None
    assert found(answers * np.nan) is None


@given(st.integers(0, 1000), st.integers(2, 16))
def test_few_numbers_of_a_row_are_told_by_their_deviations(seed: int, width: int) -> None:
    drawn = np.random.default_rng(seed)
    answers = drawn.standard_normal((INPUTS, width)) + 5
    units = found(answers * np.where(np.arange(width) == seed % width, 100, 1))
    assert units is not None
    assert [seed % width] in [group.tolist() for group in units.groups]
    assert found(answers) is None


def test_moments_are_those_of_all_batches() -> None:
    answers = np.random.default_rng(4).normal(1e4, 1, (INPUTS, 3, 5))
    known = Answers.of(np.array_split(answers, 4))
    np.testing.assert_allclose(known.variance, answers.var(0, ddof=1), rtol=1e-9)
    np.testing.assert_allclose(known.square, np.square(answers).mean(0))
    assert (known.low == answers.min(0)).all()


def test_a_large_output_takes_little_memory() -> None:
    answers = np.random.default_rng(5).standard_normal((64, 84, 4200), dtype=np.float32)
    tracemalloc.start()
    Answers.of([answers])
    assert tracemalloc.get_traced_memory()[1] < 1.5 * answers.nbytes
    tracemalloc.stop()


class Head(nn.Module):
    """Joints of a pose in pixels beside their confidences, (N, joints, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.sure = nn.Linear(8, 10), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pixels = 300 * self.places(x).unflatten(1, (5, 2))
        return torch.cat([pixels, self.sure(x).sigmoid()[..., None]], 2)


def test_sensitivities_count_every_quantity() -> None:
    torch.manual_seed(0)
    model, x = Head().eval(), torch.randn(4000, 8)
    specs = compressible_layers(model, (8,))
    matrices = collect_sensitivities(model, specs, x)
    losses = []  # of an error of the size of each layer's output
    for name, layer in (("places", model.places), ("sure", model.sure)):
        moved = layer.weight @ torch.cov(x.T) @ layer.weight.T
        losses.append(float(torch.trace(matrices[name].float() @ moved)))
    assert 0.5 < losses[0] / losses[1] < 2
