"""Inputs that a model does not take are refused with the layer, what it takes and what to do."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from several_inputs import WORDS, TextClassifier, TwoInputs
from torch import nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from decomposition import (
    DecompositionError,
    FitOptions,
    apply_plan,
    collect_moments,
    collect_sensitivities,
    inspect_layers,
    make_plan,
    reestimate_batch_norm,
)
from decomposition.calibration.calibration_set import (
    accepted,
    calibration_batches,
    checked_batches,
    gaps,
    labelled_batches,
)
from decomposition.calibration.metric import RowFactor, floored, select_inputs
from decomposition.network.inputs import joined, tensors_of

IMAGES = torch.randn(20, 3, 8, 8, generator=torch.Generator().manual_seed(0))
CLASSES = torch.arange(20) % 4
QUICK = FitOptions(iterations=10)


def classifier() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 36, 4)).eval()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            IMAGES[:, :1],
            r"layer '0' \(Conv2d\) takes 3 channels on axis 1 in float32, but gets \(2, 1, 8, 8\)",
        ),
        (
            IMAGES[..., :6],
            r"layer '3' \(Linear\) takes 432 numbers on the last axis in float32, but gets \(2, 288\)",
        ),
        ((IMAGES * 50 + 100).byte(), r"gets \(2, 3, 8, 8\) in uint8.*; give .*x.float\(\) / 255, normalised"),
        (IMAGES.long(), r"; give numbers in floating point, x.float\(\), normalised"),
        (IMAGES.movedim(1, -1), r"channels are on the last axis: give x.movedim\(-1, 1\)"),
        (list(IMAGES), r"without a batch axis: give torch.stack\(inputs\)"),
        (IMAGES[0], r"without a batch axis: .*x\[None\] of a single one"),
        ([IMAGES[:, None]], "pass inputs that it takes"),
        (IMAGES.to(torch.complex64), r"gets \(2, 3, 8, 8\) in complex64; pass inputs that it takes"),
    ],
)
def test_model_that_fails_on_inputs_is_explained(inputs: Any, message: str) -> None:
    model = classifier().train()
    pattern = re.compile(f"the calibration set: the model fails on inputs of .*{message}")
    with pytest.raises(DecompositionError, match=pattern):
        checked_batches(inputs, model)
    assert model.training
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_single_images_are_told_from_a_batch_where_convolutions_take_both() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    assert model(IMAGES[0]).shape == (4, 4, 4)
    with pytest.raises(DecompositionError, match=r"layer '0' .*give torch.stack\(inputs\).*single"):
        checked_batches([image[None].squeeze(0) for image in IMAGES[:, :, None][:, :, 0]], model)
    grey = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    with pytest.raises(DecompositionError, match=r"torch.stack"):
        checked_batches(list(IMAGES[:, :1]), grey)


def test_words_that_a_table_does_not_have_are_explained() -> None:
    tokens = torch.full((4, 9), WORDS)
    message = rf"layer 'embedding' \(Embedding\) takes whole numbers from 0 to {WORDS - 1}, but gets \(2, 9\)"
    with pytest.raises(DecompositionError, match=message):
        checked_batches(tokens, TextClassifier())
    later = torch.cat([torch.ones(60, 9, dtype=torch.long), tokens])
    model = TextClassifier()
    with pytest.raises(DecompositionError, match="takes whole numbers from 0"):
        collect_moments(model, inspect_layers(model, tokens - 1), later)


@pytest.mark.parametrize("own", [torch.float32, torch.float64, torch.bfloat16])
def test_floats_of_another_type_become_the_models(own: torch.dtype) -> None:
    model = classifier().to(own)
    for kind in (torch.float64, torch.float32, torch.float16):
        (batch,) = accepted(model, [IMAGES.to(kind)])
        assert isinstance(batch, torch.Tensor)
        assert batch.dtype == own
        torch.testing.assert_close(batch, IMAGES.to(kind).to(own))


def test_type_that_a_model_takes_stays() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.last((x - x.mean(1, keepdim=True)).float())
            return y

    x = torch.randn(6, 5, dtype=torch.float64)
    assert accepted(Casts(), [x])[0] is x


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last_becomes_the_usual_order_where_a_model_asks_for_it(channels: int) -> None:
    class Viewing(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self[1](self[0](x).view(len(x), -1))

    torch.manual_seed(0)
    model = Viewing(nn.Conv2d(channels, 4, 3), nn.Linear(144, 2)).eval()
    usual = IMAGES[:, :channels].contiguous()
    x = torch.empty_like(usual, memory_format=torch.channels_last).copy_(usual)
    (batch,) = accepted(model, [x])
    torch.testing.assert_close(model(batch), model(usual), rtol=0, atol=0)
    assert accepted(classifier(), [IMAGES.contiguous(memory_format=torch.channels_last)])[0].stride(1) == 1


def test_float64_is_fitted_like_float32() -> None:
    model = classifier()
    specs, double = inspect_layers(model, IMAGES), IMAGES.double()
    plan = make_plan(model, IMAGES, "tucker", 3)
    first, second = (apply_plan(model, plan, each, options=QUICK)(IMAGES) for each in (IMAGES, double))
    assert torch.equal(first, second)
    for collect in (collect_moments, collect_sensitivities):
        found, expected = (collect(model, specs, each)["0"] for each in (double, IMAGES))
        a, b = (each if isinstance(each, torch.Tensor) else each.mean for each in (found, expected))
        assert torch.equal(a, b)


class Masked(nn.Module):
    """Layer `seeing` gets what is not there as NaN; what it makes of it is masked."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seeing, self.behind = nn.Linear(6, 12), nn.Linear(12, 12)
        self.norm, self.last = nn.BatchNorm1d(12), nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        there = x.isfinite().all(-1, keepdim=True)
        features = torch.where(there, self.seeing(x), torch.zeros(()))
        y: torch.Tensor = self.last(self.norm(torch.relu(self.behind(features)).mean(1)))
        return y


def with_gaps(count: int = 40) -> torch.Tensor:
    x = torch.randn(count, 5, 6, generator=torch.Generator().manual_seed(1))
    x[3, 1] = float("nan")
    x[7, 2:, 0] = float("inf")
    return x


def test_gaps_that_a_model_masks_keep_from_fitting_those_layers_alone_that_see_them() -> None:
    model, x = Masked().eval(), with_gaps()
    assert gaps(x).tolist() == [3, 7]
    message = r"2 of 40 inputs, first in number 3 .*The model masks them.*skip=\['seeing'\]"
    specs = inspect_layers(model, x)
    with pytest.raises(DecompositionError, match=message):
        collect_moments(model, specs, x)
    others = [spec for spec in specs if spec.name != "seeing"]
    moments = collect_moments(model, others, x)
    assert set(moments) == {"behind", "last"}
    plan = make_plan(model, x, "tucker", {"behind": 5})
    small = apply_plan(model, plan, x, options=QUICK)
    with torch.no_grad():
        assert small(x).isfinite().all()
        assert float((small(x) - model(x)).norm() / model(x).norm()) < 1
    with pytest.raises(DecompositionError, match=message):
        apply_plan(model, make_plan(model, x, "tucker", {"seeing": 3}), x, options=QUICK)


def test_gaps_that_reach_the_outputs_are_refused_everywhere() -> None:
    model, x = classifier(), IMAGES.clone()
    x[5, 0, 0, 0] = float("nan")
    plan = make_plan(model, IMAGES, "tucker", 3)
    message = r"the calibration set holds NaN or infinite values in an input, first in number 5 \(from 0\)"
    for use in (
        lambda: apply_plan(model, plan, x),
        lambda: collect_sensitivities(model, inspect_layers(model, IMAGES), x),
        lambda: reestimate_batch_norm(model, x),
    ):
        with pytest.raises(DecompositionError, match=message):
            use()


def test_labels_are_told_from_inputs_by_what_the_forward_takes() -> None:
    model, two = classifier(), TwoInputs()
    numbers, boxes = torch.randn(20, 5), torch.randn(20, 4)
    targets = {"class": CLASSES, "box": boxes}
    dataset = TensorDataset(IMAGES, CLASSES)
    for data, labels in (
        ((IMAGES, CLASSES), CLASSES),
        ([IMAGES, CLASSES], CLASSES),
        ((IMAGES, boxes), boxes),
        ((IMAGES, targets), targets),
        ([(IMAGES, targets)], targets),
        ({"input": IMAGES, "labels": CLASSES}, CLASSES),
        ([{"input": IMAGES, "target": CLASSES}], CLASSES),
        ({"input": IMAGES, "labels": CLASSES, "targets": boxes}, {"labels": CLASSES, "targets": boxes}),
        (dataset, CLASSES),
    ):
        ((inputs, found),) = labelled_batches(data, model)
        assert (
            torch.equal(joined([inputs]), IMAGES)
            if isinstance(inputs, torch.Tensor)
            else set(inputs) == {"input"}
        )
        assert _same(found, labels)
    for data in (
        (IMAGES, numbers, CLASSES),
        ((IMAGES, numbers), CLASSES),
        [(IMAGES, numbers, {"y": CLASSES})],
    ):
        ((inputs, found),) = labelled_batches(data, two)
        assert [each.shape for each in tensors_of(inputs)] == [IMAGES.shape, numbers.shape]
        assert _same(found if isinstance(found, torch.Tensor) else found["y"], CLASSES)
    ((inputs, found),) = labelled_batches((IMAGES, numbers), two)
    assert found is None


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(_same(found[name], expected[name]) for name in expected)
    return torch.equal(found, expected)


def test_labels_that_the_forward_takes_are_inputs() -> None:
    class Labelled(nn.Module):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return x

    ((inputs, found),) = labelled_batches({"x": IMAGES, "labels": CLASSES}, Labelled())
    assert found is None
    assert isinstance(inputs, dict)
    assert set(inputs) == {"x", "labels"}
    with pytest.raises(DecompositionError, match="forward takes labels, x, but not image; name inputs"):
        labelled_batches({"image": IMAGES, "labels": CLASSES}, Labelled())


class Items(Dataset[Any]):
    def __init__(self, items: Any) -> None:
        self.items = items

    def __getitem__(self, index: int) -> Any:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(IMAGES)


def test_datasets_are_read_in_batches() -> None:
    many = Items([(image, 3) for image in IMAGES for _ in range(5)])
    found = labelled_batches(many, classifier())
    assert [len(inputs) for inputs, _ in found] == [64, 36]
    assert all((labels == 3).all() for _, labels in found)
    assert torch.equal(joined(calibration_batches(Stream(), classifier())), IMAGES)
    for items, reason in (
        ([object()] * 3, "found <class 'object'>"),
        ([IMAGES[0], IMAGES[1, :, :4]], "equal"),
    ):
        with pytest.raises(DecompositionError, match=rf"the items of the Items cannot be joined.*{reason}"):
            labelled_batches(Items(items), classifier())


def test_loader_that_fills_its_memory_again_is_read_right() -> None:
    def loader() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        images, labels = torch.empty(5, 3, 8, 8), torch.empty(5, dtype=torch.long)
        for first in range(0, 20, 5):
            yield images.copy_(IMAGES[first : first + 5]), labels.copy_(CLASSES[first : first + 5])

    inputs, labels = zip(*labelled_batches(loader(), classifier()), strict=True)
    assert torch.equal(torch.cat(inputs), IMAGES)
    assert torch.equal(torch.cat(labels), CLASSES)


def test_tensors_without_a_batch_or_without_numbers_are_refused() -> None:
    with pytest.raises(DecompositionError, match="an input is a single number; give a batch"):
        calibration_batches(torch.tensor(1.0))
    with pytest.raises(DecompositionError, match="inputs on the meta device hold no numbers"):
        checked_batches(IMAGES.to("meta"), classifier())


@pytest.mark.parametrize("data", [None, 3, "images", nn.ReLU(), IMAGES.numpy()])
def test_what_holds_no_inputs_is_refused(data: Any) -> None:
    with pytest.raises(DecompositionError, match=rf"given as a {type(data).__name__}; pass a tensor"):
        calibration_batches(data)


def test_pair_of_one_shape_may_be_batches_or_targets() -> None:
    noisy, clean = IMAGES + 1, IMAGES.clone()
    with pytest.raises(DecompositionError, match=r"two batches, two inputs, or inputs and targets"):
        calibration_batches((noisy, clean), classifier())
    assert len(calibration_batches(IMAGES.split(10), classifier())) == 2
    assert len(calibration_batches([noisy, clean], classifier())) == 2
    ((inputs, labels),) = labelled_batches([(noisy, clean)], classifier())
    assert torch.equal(tensors_of(inputs)[0], noisy)
    assert labels is clean


CHANNELS, KERNEL, OUTPUTS = 5, 2, 4


def correlated_patches(seed: int, count: int = 400) -> torch.Tensor:
    """Patches (count, in * kernel) whose channels explain one another in part."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    mixing = torch.randn(4, CHANNELS * KERNEL, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, CHANNELS * KERNEL, generator=generator, dtype=torch.float64)
    return hidden @ mixing + 0.5 * noise


def lost(
    weight: torch.Tensor, patches: torch.Tensor, sensitivity: torch.Tensor, change: torch.Tensor
) -> float:
    """Relative output error, from the outputs themselves."""

    raised = floored(sensitivity)  # as for every fit: no direction counts for nothing

    def size(matrix: torch.Tensor) -> float:
        outputs = patches @ matrix.T
        return float(((outputs @ raised) * outputs).sum())

    return (size(change) / size(weight)) ** 0.5


def problem(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    weight = torch.randn(OUTPUTS, CHANNELS, KERNEL, generator=generator, dtype=torch.float64)
    root = torch.randn(OUTPUTS, OUTPUTS, generator=generator, dtype=torch.float64)
    return weight, correlated_patches(seed), root @ root.T


def columns(reads: tuple[int, ...]) -> list[int]:
    return [channel * KERNEL + position for channel in reads for position in range(KERNEL)]


@given(seed=st.integers(0, 1000))
@settings(max_examples=20)
def test_the_weight_is_the_least_squares_solution_on_what_is_read(seed: int) -> None:
    weight, patches, sensitivity = problem(seed)
    matrix = weight.flatten(1)
    found = select_inputs(weight, patches.T @ patches / len(patches), sensitivity, range(1, CHANNELS))
    for count, selection in found.items():
        assert len(selection.reads) == count
        index = columns(selection.reads)
        expected, *_ = np.linalg.lstsq(patches[:, index].numpy(), (patches @ matrix.T).numpy(), rcond=None)
        best = torch.zeros_like(matrix)
        best[:, index] = torch.from_numpy(expected.T)
        assert not bool(selection.weight[:, [c for c in range(CHANNELS) if c not in selection.reads]].any())
        own = lost(matrix, patches, sensitivity, matrix - selection.weight.flatten(1))
        assert selection.error == pytest.approx(own, rel=1e-6)
        # The ridge keeps it a little away from the best.
        assert own <= 1.02 * lost(matrix, patches, sensitivity, matrix - best) + 1e-3


@given(seed=st.integers(0, 1000))
@settings(max_examples=20)
def test_of_all_single_channels_the_one_that_costs_least_goes(seed: int) -> None:
    weight, patches, sensitivity = problem(seed)
    metric = patches.T @ patches / len(patches)
    chosen = select_inputs(weight, metric, sensitivity, [CHANNELS - 1])[CHANNELS - 1]
    errors = []
    for reads in itertools.combinations(range(CHANNELS), CHANNELS - 1):
        index = columns(reads)
        solved = torch.linalg.lstsq(patches[:, index], patches @ weight.flatten(1).T).solution
        best = torch.zeros_like(weight.flatten(1))
        best[:, index] = solved.T
        errors.append(lost(weight.flatten(1), patches, sensitivity, weight.flatten(1) - best))
    assert chosen.error == pytest.approx(min(errors), rel=0.02, abs=1e-3)


def test_smaller_selections_are_part_of_larger_ones() -> None:
    weight, patches, sensitivity = problem(3)
    found = select_inputs(weight, RowFactor(patches / len(patches) ** 0.5), sensitivity, range(1, CHANNELS))
    for count in range(2, CHANNELS):
        assert set(found[count - 1].reads) < set(found[count].reads)
        assert found[count - 1].error >= found[count].error


def test_without_moments_the_other_columns_stay_as_they_are() -> None:
    weight, *_ = problem(5)
    selection = select_inputs(weight, None, None, [2])[2]
    strongest = weight.square().sum((0, 2)).topk(2).indices.sort().values.tolist()
    assert list(selection.reads) == strongest
    assert torch.allclose(selection.weight[:, strongest], weight[:, strongest])


def test_a_narrowed_layer_is_described_as_torch_builds_it() -> None:
    for bias in (False, True):
        wide, narrow = (
            inspect_layers(nn.Sequential(nn.Conv2d(i, o, 3, stride=2, padding=1, bias=bias)), (i, 9, 9))[0]
            for i, o in ((8, 12), (6, 4))
        )
        assert wide.narrowed(inputs=6, outputs=4) == narrow
    assert wide.narrowed() == wide
