"""The updates compute what the operators of ai.onnx.preview.training define."""

from collections.abc import Callable

import numpy as np
import onnx
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from onnx.backend.test.case import node as node_cases
from onnx.backend.test.case.node import adagrad as _adagrad_cases  # noqa: F401 - registers its cases
from onnx.backend.test.case.node import adam as _adam_cases  # noqa: F401 - registers its cases

from optim import OnnxAdagrad, OnnxAdam
from optim.kernels import adagrad_rates, adam_rates, complement

OFFICIAL_CASES = {case.name: case for case in node_cases._NodeTestCases}

RANKS = st.lists(st.integers(1, 4), max_size=4).map(tuple)
COEFFICIENTS = st.sampled_from([0.0, 1e-4, 0.01, 0.3])
DECAYS = st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.95, 0.999])


def step(
    operator: str,
    lists: list[list[torch.Tensor]],
    *,
    lr: float,
    update_count: int,
    foreach: bool | None = None,
    **attributes: float,
) -> list[list[torch.Tensor]]:
    """Update X's, G's, (V's,) H's; return those that it writes into."""
    cls = OnnxAdam if operator == "Adam" else OnnxAdagrad
    defaults = cls([torch.zeros(1)], **attributes).defaults
    checked = {name: defaults[name] for name in cls.attributes}
    counts = [update_count] * len(lists[0])
    cls.update(*lists, counts, lr=lr, maximize=False, foreach=foreach, **checked)
    return [lists[0], *lists[2:]]


def numpy_of(lists: list[list[torch.Tensor]]) -> list[list[np.ndarray]]:
    return [[tensor.numpy().copy() for tensor in tensors] for tensors in lists]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("name", ["test_adam", "test_adam_multiple", "test_adagrad", "test_adagrad_multiple"])
def test_official_case_is_reproduced_to_its_own_tolerances(name: str, foreach: bool) -> None:
    case = OFFICIAL_CASES[name]
    node = case.model.graph.node[0]
    attributes = {attribute.name: attribute.f for attribute in node.attribute}
    for inputs, expected in case.data_sets:
        rate, count, *arrays = inputs
        roles = 4 if node.op_type == "Adam" else 3
        n = len(arrays) // roles
        lists = [[torch.from_numpy(a.copy()) for a in arrays[i * n : (i + 1) * n]] for i in range(roles)]
        results = step(
            node.op_type, lists, lr=float(rate), update_count=int(count), foreach=foreach, **attributes
        )
        found = [tensor.numpy() for tensors in results for tensor in tensors]
        assert len(found) == len(expected)
        for array, wanted in zip(found, expected, strict=True):
            assert array.dtype == wanted.dtype
            np.testing.assert_allclose(array, wanted, rtol=case.rtol, atol=case.atol)


@pytest.mark.parametrize("optimizer_class", [OnnxAdam, OnnxAdagrad])
def test_defaults_are_those_of_the_operator_schema(optimizer_class: type) -> None:
    schema = onnx.defs.get_schema(optimizer_class.operator, 1, "ai.onnx.preview.training")
    optimizer = optimizer_class([torch.nn.Parameter(torch.zeros(1))])
    wanted = {name: attribute.default_value.f for name, attribute in schema.attributes.items()}
    assert {name: optimizer.defaults[name] for name in optimizer_class.attributes} == wanted


def bounds(
    operator: str, lists: list, results: list, rate: float, attributes: dict
) -> list[list[np.ndarray]]:
    """Sizes of what is added up on the way to X, V and H: their rounding errors are a few eps of these."""
    sizes: list[list[np.ndarray]] = [[] for _ in results]
    norm = attributes["norm_coefficient"]
    for i, (x, g) in enumerate(zip(lists[0], lists[1], strict=True)):
        gradient = norm * np.abs(x) + np.abs(g)
        denominator = np.sqrt(results[-1][i]) + attributes["epsilon"]
        direction = gradient
        if operator == "Adam":
            direction = attributes["alpha"] * np.abs(lists[2][i]) + (1 - attributes["alpha"]) * gradient
            sizes[1].append(direction)
        sizes[-1].append(lists[-1][i] + gradient**2)
        sizes[0].append(np.abs(x) + rate * direction / denominator)
    return sizes


@pytest.mark.parametrize("operator", ["Adam", "Adagrad"])
@given(data=st.data())
def test_one_step_equals_the_reference_evaluator_within_rounding(
    operator: str, run_reference: Callable, data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from([np.float32, np.float64]), label="dtype")
    shapes = data.draw(st.lists(RANKS, min_size=1, max_size=4), label="shapes")
    random = np.random.default_rng(data.draw(st.integers(0, 2**16), label="seed"))
    count = data.draw(st.one_of(st.just(0), st.just(1), st.integers(2, 10_000)), label="T")
    lr = data.draw(st.sampled_from([0.0, 1e-4, 0.1, 1.0]), label="R")
    attributes = {"epsilon": data.draw(st.sampled_from([1e-8, 1e-6, 1e-2]), label="epsilon")}
    attributes["norm_coefficient"] = data.draw(COEFFICIENTS, label="norm_coefficient")
    if operator == "Adam":
        attributes |= {"alpha": data.draw(DECAYS, label="alpha"), "beta": data.draw(DECAYS, label="beta")}
        attributes["norm_coefficient_post"] = data.draw(COEFFICIENTS, label="norm_coefficient_post")
    else:
        attributes["decay_factor"] = data.draw(COEFFICIENTS, label="decay_factor")
    roles = 4 if operator == "Adam" else 3
    arrays = [[np.asarray(random.normal(size=shape), dtype=dtype) for shape in shapes] for _ in range(roles)]
    arrays[-1] = [np.asarray(np.abs(array) + dtype(0.1)) for array in arrays[-1]]  # H is a sum of squares

    wanted = run_reference(operator, np.array(lr, dtype=np.float64), count, arrays, attributes)
    lists = [[torch.from_numpy(array.copy()) for array in tensors] for tensors in arrays]
    foreach = data.draw(st.sampled_from([None, False, True]), label="foreach")
    found = numpy_of(step(operator, lists, lr=lr, update_count=count, foreach=foreach, **attributes))

    like = torch.zeros((), dtype=torch.float64)
    if operator == "Adam":
        rate = adam_rates([count], like, lr=lr, alpha=attributes["alpha"], beta=attributes["beta"])[0]
    else:
        rate = adagrad_rates([count], like, lr=lr, decay_factor=attributes["decay_factor"])[0]
    sizes = bounds(operator, arrays, wanted, float(rate), attributes)
    for role in range(len(wanted)):
        for array, reference, size in zip(found[role], wanted[role], sizes[role], strict=True):
            assert array.dtype == reference.dtype == dtype
            assert np.all(np.abs(array - reference) <= 8 * np.finfo(dtype).eps * size)


@pytest.mark.parametrize(
    ("operator", "dtype", "first"),
    [
        *(("Adam", np.float32, 0), ("Adam", np.float64, 1)),
        *(("Adagrad", np.float32, 1), ("Adagrad", np.float64, 0)),
    ],
)
def test_a_hundred_steps_drift_no_further_than_rounding(
    operator: str, dtype: type, first: int, run_reference: Callable
) -> None:
    random = np.random.default_rng(1)
    shapes = [(3, 2), (5,), ()]
    attributes = {"norm_coefficient": 1e-3}
    attributes |= {"norm_coefficient_post": 1e-4} if operator == "Adam" else {"decay_factor": 0.01}
    roles = 3 if operator == "Adam" else 2
    state = [[np.asarray(random.normal(size=shape), dtype=dtype) for shape in shapes]]
    state += [[np.zeros(shape, dtype) for shape in shapes] for _ in range(roles - 1)]
    tensors = [[torch.from_numpy(array.copy()) for array in arrays] for arrays in state]
    for count in range(first, first + 100):
        grads = [np.asarray(random.normal(size=shape), dtype=dtype) for shape in shapes]
        state = run_reference(operator, np.array(0.01), count, [state[0], grads, *state[1:]], attributes)
        lists = [tensors[0], [torch.from_numpy(np.asarray(grad)) for grad in grads], *tensors[1:]]
        step(operator, lists, lr=0.01, update_count=count, **attributes)
    for arrays, found in zip(state, numpy_of(tensors), strict=True):
        for wanted, array in zip(arrays, found, strict=True):
            # as if a hundred errors of half a unit in the last place had all gone one way
            np.testing.assert_allclose(
                array, wanted, rtol=50 * np.finfo(dtype).eps, atol=50 * np.finfo(dtype).eps
            )


def test_rates_are_the_same_from_integers_and_from_tensors() -> None:
    counts = [0, 1, 2, 50, 100_000]
    tensors = [torch.tensor(count, dtype=torch.int32) for count in counts]
    like = torch.zeros((), dtype=torch.float64)
    options = {"lr": 0.3, "alpha": 0.9, "beta": 0.999}
    numbers = adam_rates(counts, like, **options)
    np.testing.assert_allclose(adam_rates(tensors, like, **options), numbers, rtol=1e-14)
    assert numbers[0] == 0.3
    numbers = adagrad_rates(counts, like, lr=0.3, decay_factor=0.1)
    np.testing.assert_allclose(adagrad_rates(tensors, like, lr=0.3, decay_factor=0.1), numbers, rtol=1e-14)


@given(st.floats(0, 2.0**100, width=32))
@example(0.1)
@example(0.3)
def test_the_complement_is_rounded_as_numpy_rounds(coefficient: float) -> None:
    assert complement(coefficient) == float(np.float32(1 - coefficient))
