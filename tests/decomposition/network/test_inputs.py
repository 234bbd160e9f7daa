"""Models that take integers, several tensors, or tensors by name."""

import json
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from centring import Centre
from hypothesis import given
from hypothesis import strategies as st
from several_inputs import LENGTH, WORDS, OneInput, TextClassifier, TwoInputs, WordHead
from torch import nn
from torch.utils._pytree import tree_leaves
from torchvision import tv_tensors

import decomposition
from decomposition import (
    CompressionPlan,
    DecompositionError,
    FitOptions,
    InputSpec,
    PlanError,
    Positional,
    TensorSpec,
    apply_plan,
    collect_moments,
    collect_sensitivities,
    count_macs,
    inspect_layers,
    load_compressed,
    make_plan,
    plan_by_heuristic,
    reestimate_batch_norm,
    save_compressed,
)
from decomposition.calibration.calibration_set import calibration_batches
from decomposition.network.inputs import (
    as_inputs,
    count_inputs,
    example_batch,
    input_shape_of,
    joined,
    leaves,
    plain,
    rows,
    run_model,
    split,
    tensors_in,
    tensors_of,
)

QUICK = FitOptions(iterations=3)
PAIR = InputSpec((TensorSpec((3, 8, 8)), TensorSpec((5,))))
NAMED = InputSpec(PAIR.tensors, ("image", "numbers"))


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(48, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def numbers() -> torch.Tensor:
    return torch.randn(48, 5, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(1, WORDS, (48, LENGTH), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def two() -> TwoInputs:
    torch.manual_seed(0)
    return TwoInputs().eval()


@pytest.fixture
def text() -> TextClassifier:
    torch.manual_seed(0)
    return TextClassifier().eval()


def in_ways(images: torch.Tensor, numbers: torch.Tensor) -> dict[str, Any]:
    """The same calibration set in all forms that two inputs may have."""
    labels = torch.zeros(len(images), dtype=torch.long)
    parts = list(zip(images.split(20), numbers.split(20), labels.split(20), strict=True))
    return {
        "tuple": (images, numbers),
        "dict": {"image": images, "numbers": numbers},
        "batches": [(image, number) for image, number, _ in parts],
        "lists": [[image, number] for image, number, _ in parts],
        "labelled": [((image, number), label) for image, number, label in parts],
        "labelled dicts": [[{"numbers": n, "image": i}, label] for i, n, label in parts],
        "flat with labels": [[image, number, label] for image, number, label in parts],
    }


def test_shape_of_one_tensor_of_floats_is_its_shape(images: torch.Tensor) -> None:
    assert input_shape_of(images) == input_shape_of([3, 8, 8]) == input_shape_of((images,)) == (3, 8, 8)


def test_example_of_several_tensors_is_specified(
    images: torch.Tensor, numbers: torch.Tensor, tokens: torch.Tensor
) -> None:
    assert input_shape_of((images, numbers)) == PAIR
    assert input_shape_of({"image": images, "numbers": numbers}) == NAMED
    assert input_shape_of(PAIR) is PAIR
    shape = input_shape_of(tokens)
    assert shape == InputSpec((TensorSpec((LENGTH,), "int64", int(tokens[0, 0])),))


def test_example_batch_is_one_that_the_model_takes(two: TwoInputs, text: TextClassifier) -> None:
    batch = example_batch(two.double(), NAMED, 3)
    assert isinstance(batch, dict)
    assert {name: (x.shape[1:], x.dtype) for name, x in batch.items()} == {
        "image": ((3, 8, 8), torch.float64),
        "numbers": ((5,), torch.float64),
    }
    assert run_model(two, batch).shape == (3, 3)
    lengths = InputSpec((TensorSpec((), "int32", 7), TensorSpec((2,), "bool", True)))
    first, second = tensors_of(example_batch(text, lengths, 2))
    assert first.tolist() == [7, 7]
    assert first.dtype == torch.int32
    assert second.tolist() == [[True, True], [True, True]]


@given(
    st.lists(
        st.builds(
            TensorSpec,
            st.lists(st.integers(1, 9), max_size=3).map(tuple),
            st.sampled_from(["int64", "uint8", "bool"]),
            st.integers(0, 1),
        ),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
def test_specifications_go_to_json_and_back(tensors: list[TensorSpec], named: bool) -> None:
    names = tuple(f"input{j}" for j in range(len(tensors))) if named else None
    spec = InputSpec(tuple(tensors), names)
    assert InputSpec.from_json(spec.to_json()) == spec


@pytest.mark.parametrize("size", [1, 5, 48, 100])
def test_parts_of_a_batch_join_to_it(images: torch.Tensor, numbers: torch.Tensor, size: int) -> None:
    for whole in (images, Positional((images, numbers)), {"image": images, "numbers": numbers}):
        parts = split(whole, size)
        assert sum(map(count_inputs, parts)) == count_inputs(whole)
        assert all(map(torch.equal, tensors_of(joined(parts)), tensors_of(whole)))
        assert all(map(torch.equal, tensors_of(rows(whole, slice(0, size))), tensors_of(parts[0])))


def test_calibration_sets_in_all_forms_hold_the_same(
    two: TwoInputs, images: torch.Tensor, numbers: torch.Tensor
) -> None:
    expected = two(images, numbers)
    for name, calibration in in_ways(images, numbers).items():
        batches = calibration_batches(calibration, two)
        again = calibration_batches(batches, two)
        assert [type(x) for x in again] == [type(x) for x in batches], name
        assert torch.allclose(run_model(two, joined(batches)), expected, atol=1e-6), name


def test_labels_of_a_network_with_one_input_are_left_away(images: torch.Tensor, small_net: nn.Module) -> None:
    classes = torch.zeros(48, dtype=torch.long)
    for labels in (classes, torch.zeros(48, 4), torch.zeros(48, 8, 8)):
        (batch,) = calibration_batches([(images, labels)], small_net)
        assert batch is images
    assert [len(batch) for batch in calibration_batches((images[:4], images[4:]), small_net)] == [4, 44]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        return y if mask is None else y * mask


def test_pairs_that_may_be_inputs_or_labels_are_refused(numbers: torch.Tensor) -> None:
    with pytest.raises(DecompositionError, match="two inputs of the model or inputs and labels"):
        calibration_batches([(numbers, numbers)], Masked())
    (batch,) = calibration_batches([(numbers, torch.zeros(48, dtype=torch.long))], Masked())
    assert batch is numbers
    (batch,) = calibration_batches([((numbers, numbers), numbers)], Masked())
    assert count_inputs(batch) == 48
    assert isinstance(batch, Positional)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "given as a tuple; pass a tensor"),
        ({"x": 3}, "a dict of int; pass a tensor"),
        ((torch.zeros(3, 2), torch.zeros(4, 2)), r"different numbers of inputs.*\[3, 4\]"),
        ((torch.zeros(3, 2), torch.tensor(1.0)), "is a single number"),
    ],
)
def test_inputs_of_another_kind_are_refused(given: Any, message: str) -> None:
    with pytest.raises(DecompositionError, match=message):
        as_inputs(given)


@pytest.mark.parametrize("shape", [(3, "8"), (3.0, 8, 8), "image"])
def test_example_that_is_none_is_refused(shape: Any) -> None:
    with pytest.raises(DecompositionError, match=r"such as \(3, 32, 32\)"):
        input_shape_of(shape)


def test_model_that_does_not_take_the_example_is_named_with_it(
    text: TextClassifier, two: TwoInputs, tokens: torch.Tensor
) -> None:
    with pytest.raises(
        DecompositionError, match=r"does not accept an input of shape .* a batch of real ones"
    ):
        inspect_layers(text, (LENGTH,))
    with pytest.raises(DecompositionError, match=r"the inputs int64 \(9,\).*pass a batch of real inputs"):
        inspect_layers(two, tokens)


def test_two_inputs_are_treated_like_one_that_holds_both(
    two: TwoInputs, images: torch.Tensor, numbers: torch.Tensor
) -> None:
    one, flat = OneInput(two), torch.cat([images.flatten(1), numbers], 1)
    specs, expected = inspect_layers(two, (images, numbers)), inspect_layers(one, flat)
    assert [(s.name, s.macs, s.refusal) for s in specs] == [
        (s.name.removeprefix("network."), s.macs, s.refusal) for s in expected
    ]
    assert count_macs(two, (images, numbers)) == count_macs(one, flat) == sum(spec.macs for spec in specs)
    for collect in (collect_moments, collect_sensitivities):
        collected: Callable[..., dict[str, Any]] = collect  # type: ignore[assignment]
        both, alone = collected(two, specs, (images, numbers)), collected(one, expected, flat)
        for name, found in both.items():
            other = alone[f"network.{name}"]
            first, second = (x if isinstance(x, torch.Tensor) else x.mean for x in (found, other))
            assert torch.allclose(first, second, rtol=1e-5, atol=1e-8), name


def test_two_inputs_give_the_same_plan_and_weights_in_all_forms(
    two: TwoInputs, images: torch.Tensor, numbers: torch.Tensor
) -> None:
    one, flat = OneInput(two), torch.cat([images.flatten(1), numbers], 1)
    options: Any = {"candidates": 2, "options": QUICK}
    expected = plan_by_heuristic(one, flat, "tucker", "greedy", 0.6, calibration=flat, **options)
    small = apply_plan(one, expected, flat, options=QUICK)(flat)
    for name, calibration in in_ways(images, numbers).items():
        example = calibration if name in ("tuple", "dict") else (images, numbers)
        plan = plan_by_heuristic(two, example, "tucker", "greedy", 0.6, calibration=calibration, **options)
        assert [layer.operations for layer in plan] == [layer.operations for layer in expected], name
        found = apply_plan(two, plan, calibration, options=QUICK)(images, numbers)
        assert torch.allclose(found, small, rtol=1e-3, atol=1e-4), name


def test_tokens_are_fitted_like_the_words_that_they_stand_for(
    text: TextClassifier, tokens: torch.Tensor
) -> None:
    head: WordHead = text.head
    words = text.embedding(tokens).detach()
    plan = plan_by_heuristic(text, tokens, "cp", "greedy", 0.7, calibration=tokens, options=QUICK)
    ranks = {name: operation.ranks for name, operation in plan.chosen(decomposition.Factorise).items()}
    assert ranks
    behind = make_plan(head, words, "cp", {name.removeprefix("head."): rank for name, rank in ranks.items()})
    found = apply_plan(text, plan, tokens, options=QUICK)(tokens)
    expected = apply_plan(head, behind, words, options=QUICK)(words)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["tuple", "dict"])
def test_plans_and_saved_models_keep_what_the_model_takes(
    two: TwoInputs, images: torch.Tensor, numbers: torch.Tensor, tmp_path: Path, form: str
) -> None:
    calibration = in_ways(images, numbers)[form]
    plan = make_plan(two, calibration, "tucker", 4)
    assert plan.input_shape == (PAIR if form == "tuple" else NAMED)
    assert CompressionPlan.from_json(plan.to_json()) == plan
    small = apply_plan(two, plan, calibration, options=QUICK)
    save_compressed(small, plan, tmp_path / "small.safetensors")
    loaded, found = load_compressed(TwoInputs().eval(), tmp_path / "small.safetensors")
    assert found == plan
    assert torch.equal(loaded(images, numbers), small(images, numbers))


@pytest.mark.parametrize(
    "shape",
    [
        [],
        {},
        3,
        [[3]],
        [{"shape": [3]}],
        [{"shape": [0], "dtype": "int64"}],
        [{"shape": [3], "dtype": "Tensor"}],
        {"x": {"shape": [3], "dtype": "int64", "value": "a"}},
        [{"shape": [3], "dtype": "bool", "other": 1}],
    ],
)
def test_plan_with_inputs_that_make_no_sense_is_refused(two: TwoInputs, shape: Any) -> None:
    text = make_plan(two, PAIR, "tucker", 4).to_json()
    kept = text[text.index('"chosen_by"') :]
    head = text[: text.index('"input_shape"')]
    with pytest.raises(PlanError, match="input_shape must be a list of positive integers, or tell of"):
        CompressionPlan.from_json(f'{head}"input_shape": {json.dumps(shape)}, {kept}')


def test_batch_norms_are_reestimated_with_several_inputs(images: torch.Tensor, numbers: torch.Tensor) -> None:
    torch.manual_seed(0)

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)

        def forward(self, image: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.norm(self.conv(image)) + numbers.mean(1)[:, None, None, None]
            return y

    model = Normalised().eval()
    decomposition.reestimate_batch_norm(model, (images, numbers))
    expected = model.conv(images).mean((0, 2, 3))
    assert torch.allclose(model.norm.running_mean, expected, atol=1e-5)  # type: ignore[arg-type]


def test_examples_are_of_the_type_of_the_first_layer() -> None:
    class Positions(nn.Module):
        """Adds positions in float32 to what a layer in bfloat16 makes."""

        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Parameter(torch.zeros(1, 8, 4, 4))
            self.first = nn.Conv2d(3, 8, 3, padding=1, dtype=torch.bfloat16)
            self.last = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last((self.first(x).float() + self.positions).mean((2, 3)))

    model = Positions().eval()
    assert example_batch(model, (3, 4, 4)).dtype == torch.bfloat16  # type: ignore[union-attr]
    assert [spec.name for spec in inspect_layers(model, (3, 4, 4))] == ["first", "last"]
    assert example_batch(nn.ParameterList([torch.zeros(2, dtype=torch.float64)]), (3,)).dtype == torch.float64  # type: ignore[union-attr]


COARSER = FitOptions(iterations=10)


def centred(*, in_place: bool) -> nn.Sequential:
    torch.manual_seed(0)
    convolutions = nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), nn.ReLU(inplace=True), nn.Conv2d(12, 12, 3)
    return nn.Sequential(Centre(in_place=in_place), *convolutions).eval()


@pytest.fixture
def batch() -> torch.Tensor:
    return 2 * torch.rand(24, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_network_that_changes_its_inputs_is_treated_like_one_that_does_not(batch: torch.Tensor) -> None:
    kept = batch.clone()
    found: list[dict[str, Any]] = []
    for in_place in (False, True):
        model = centred(in_place=in_place)
        specs = inspect_layers(model, batch)
        options: Any = {"calibration": batch, "options": COARSER}
        plan = plan_by_heuristic(model, batch, "tucker", "greedy", 0.6, candidates=4, **options)
        small = apply_plan(model, plan, batch, options=COARSER, batch_norm="reestimate")
        reestimate_batch_norm(model, batch.split(8))
        found.append(
            {
                "macs": count_macs(model, batch),
                "plan": [layer.operations for layer in plan],
                "moments": collect_moments(model, specs, batch)["1"].mean,
                "sensitivities": collect_sensitivities(model, specs, batch)["1"],
                "output": run_model(small, batch),
                "mean": model[2].running_mean,
            }
        )
        assert torch.equal(batch, kept)
        assert batch._version == 0
    before, after = found
    for name, value in before.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(after[name], value, msg=name)
        else:
            assert after[name] == value, name


@pytest.mark.parametrize("kind", [nn.Parameter, tv_tensors.Image], ids=["parameter", "image"])
def test_inputs_of_other_classes_are_plain_tensors_to_the_network(kind: Any, batch: torch.Tensor) -> None:
    model, tensor = centred(in_place=True), kind(batch.clone())
    specs = inspect_layers(model, tensor)
    seen = []
    model[1].register_forward_pre_hook(lambda _, inputs: seen.append(type(inputs[0])))
    found, expected = (collect_moments(model, specs, each)["1"] for each in ([tensor], [batch]))
    assert type(found.mean) is torch.Tensor
    assert torch.equal(found.mean, expected.mean)
    small = apply_plan(model, make_plan(model, tensor, "tucker", 4), tensor, options=COARSER)
    assert {type(each) for each in small.state_dict().values()} == {torch.Tensor}
    assert set(seen) == {torch.Tensor}
    assert torch.equal(tensor, batch)


def test_plain_tensors_share_the_memory_of_what_they_are_made_from(batch: torch.Tensor) -> None:
    assert plain(batch) is batch
    for tensor in (nn.Parameter(batch), tv_tensors.Image(batch), batch.clone().requires_grad_()):
        found = plain(tensor)
        assert type(found) is torch.Tensor
        assert not found.requires_grad
        assert found.data_ptr() == tensor.data_ptr()


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions:UserWarning")
def test_tensors_without_one_number_beside_the_other_are_refused(batch: torch.Tensor) -> None:
    ragged = torch.nested.nested_tensor([batch[0], batch[1, :, :4]], layout=torch.jagged)
    quantised = torch.quantize_per_tensor(batch, 0.1, 0, torch.quint8)
    for tensor, kind in ((batch.to_sparse(), "sparse_coo"), (quantised, "quint8"), (ragged, "jagged")):
        with pytest.raises(DecompositionError, match=f"{kind}.*; give a dense tensor"):
            as_inputs(tensor)


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
