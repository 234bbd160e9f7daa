"""Factors from tensorly and for it: what they stand for is what tensorly says."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorly as tl
import tensorly.decomposition as tld
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from decomposition import (
    ChannelFactors,
    DecompositionError,
    Factorise,
    Fit,
    FitLibrary,
    FitOptions,
    PlanError,
    apply_fits,
    compressible_layers,
    factorised_layers,
    fit_weight,
    from_tensorly,
    get_format,
    list_formats,
    load_compressed,
    save_compressed,
)
from decomposition.network.geometry import WeightModes
from decomposition.network.layers import DecomposableModule
from decomposition.plan.save import as_operation

KNOWN = ["cp", "tensor_ring", "tensor_train", "tucker"]
CONTRACT: dict[str, Callable[[Any], Any]] = {
    "cp": tl.cp_to_tensor,
    "tensor_ring": tl.tr_to_tensor,
    "tensor_train": tl.tt_to_tensor,
    "tucker": tl.tucker_to_tensor,
}


def partial_tucker(weight: np.ndarray) -> tuple[Any, np.ndarray]:
    factors = tld.partial_tucker(weight, rank=[5, 4], modes=[0, 1], n_iter_max=5)
    return factors, tl.tenalg.multi_mode_dot(*factors[0], modes=[0, 1])


def whole(
    name: str, decompose: Callable[[np.ndarray], Any]
) -> Callable[[np.ndarray], tuple[Any, np.ndarray]]:
    def run(weight: np.ndarray) -> tuple[Any, np.ndarray]:
        found = decompose(weight)
        return found, CONTRACT[name](found)

    return run


# tensorly's own routines: format, and a weight's decomposition with the tensor that tensorly makes of it.
ROUTINES = {
    "parafac": ("cp", whole("cp", lambda w: tld.parafac(w, 5, n_iter_max=5, init="random", random_state=0))),
    "parafac normalised": (
        "cp",
        whole("cp", lambda w: tld.parafac(w, 5, n_iter_max=5, normalize_factors=True, random_state=0)),
    ),
    "tucker": (
        "tucker",
        whole("tucker", lambda w: tld.tucker(w, rank=[5, 4, *[2] * (w.ndim - 2)], n_iter_max=5)),
    ),
    "partial_tucker": ("tucker", partial_tucker),
    "tensor_train": (
        "tensor_train",
        whole("tensor_train", lambda w: tld.tensor_train(w, [1, 4, *[3] * (w.ndim - 2), 1])),
    ),
    "tensor_ring": (
        "tensor_ring",
        whole("tensor_ring", lambda w: tld.tensor_ring(w, [2, 3, *[2] * (w.ndim - 1)])),
    ),
}


def convolution(**options: Any) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(6, 8, 3, padding=1, stride=2, dtype=torch.float64, **options)


@pytest.mark.parametrize("backend", ["numpy", "pytorch"])
@pytest.mark.parametrize("joint", [True, False], ids=["joint", "apart"])
@pytest.mark.parametrize("routine", ROUTINES)
def test_what_tensorly_computes_becomes_a_layer_of_that_weight(
    routine: str, joint: bool, backend: str
) -> None:
    dense = convolution()
    weight = dense.weight.detach()
    name, decompose = ROUTINES[routine]
    with tl.backend_context(backend):
        factors, full = decompose(tl.tensor((weight.flatten(2) if joint else weight).numpy()))
        fit = from_tensorly(factors, dense)
        assert tl.get_backend() == backend
    full = torch.as_tensor(full).reshape(weight.shape)
    assert fit.error == pytest.approx(float((weight - full).norm() / weight.norm()), rel=1e-9)
    network, plan = apply_fits(nn.Sequential(dense), (6, 9, 9), {"0": fit}, chosen_by="tensorly")
    assert (plan["0"].operations, plan.chosen_by) == ((Factorise(name, fit.ranks),), "tensorly")
    x = torch.randn(2, 6, 9, 9, dtype=torch.float64)
    expected = F.conv2d(x, full, dense.bias, stride=2, padding=1)
    torch.testing.assert_close(network(x), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(9, 7), (7, 9)),
        (nn.Conv1d(6, 5, 4), (5, 6, 4)),
        (nn.Conv2d(6, 5, 1), (5, 6)),
        (nn.Conv2d(6, 5, 1), (5, 6, 1)),
        (nn.Conv2d(6, 5, 1), (5, 6, 1, 1)),
        (nn.Conv2d(4, 5, (1, 3)), (5, 4, 3)),
        (nn.Conv2d(4, 5, (1, 3)), (5, 4, 1, 3)),
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else type(value).__name__,
)
@pytest.mark.parametrize("name", KNOWN)
def test_every_kind_of_layer_takes_factors(
    name: str, layer: DecomposableModule, shape: tuple[int, ...]
) -> None:
    generator = np.random.default_rng(0)
    head, bonds = (3, 2, 2, 2), (1 if name == "tensor_train" else 2, 3, 2, 2)
    closing = bonds[0]
    if name == "cp":
        factors: Any = (generator.normal(size=3), [generator.normal(size=(n, 3)) for n in shape])
    elif name == "tucker":
        core = generator.normal(size=tuple(min(h, n) for h, n in zip(head, shape, strict=False)))
        factors = (core, [generator.normal(size=(n, r)) for n, r in zip(shape, core.shape, strict=True)])
    else:
        ends = [*bonds[: len(shape)], closing]
        factors = [generator.normal(size=(ends[j], n, ends[j + 1])) for j, n in enumerate(shape)]
    with tl.backend_context("numpy"):
        expected = torch.from_numpy(CONTRACT[name](factors))
    fit = from_tensorly(factors, layer)
    assert fit.tensor_format is get_format(name)
    assert fit.modes is not None
    found = fit.tensor_format.reconstruct(fit.cores, fit.modes)
    torch.testing.assert_close(found.reshape(expected.shape), expected, rtol=1e-10, atol=1e-10)


@st.composite
def fits(draw: st.DrawFn) -> tuple[str, nn.Conv2d, Fit]:
    """Draw random cores of a format for a convolution, channels split where the format can."""
    name = draw(st.sampled_from(KNOWN))
    size = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    out, inp = draw(st.sampled_from([2, 6, 16])), draw(st.sampled_from([1, 4, 12]))
    layer = nn.Conv2d(inp, out, size)
    spec = compressible_layers(nn.Sequential(layer), (inp, 4, 4))[0]
    tensor_format = get_format(name)
    modes = tensor_format.modes(spec, tensorised=tensor_format.tensorisable and draw(st.booleans()))
    ranks = tuple(draw(st.integers(1, min(4, largest))) for largest in tensor_format.max_ranks(modes))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 100)))
    shapes = tensor_format.core_shapes(modes, ranks)
    cores = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return name, layer, Fit(cores, 0.5, tensor_format, modes, ranks)


@given(drawn=fits())
def test_there_and_back_is_the_same_tensor(drawn: tuple[str, nn.Conv2d, Fit]) -> None:
    name, layer, fit = drawn
    assert fit.tensor_format is not None
    assert fit.modes is not None
    with tl.backend_context("numpy"):
        theirs = fit.to_tensorly()
        full = torch.from_numpy(theirs.to_tensor() if name != "tensor_ring" else tl.tr_to_tensor(theirs))
    expected = fit.tensor_format.reconstruct(fit.cores, fit.modes)
    assert tuple(theirs.shape) == fit.modes.sizes
    torch.testing.assert_close(full.reshape(expected.shape), expected, rtol=1e-10, atol=1e-10)
    back = from_tensorly(theirs, layer)
    assert (back.tensor_format, back.ranks) == (fit.tensor_format, fit.ranks)
    assert back.modes is not None
    found = back.tensor_format.reconstruct(back.cores, back.modes)  # type: ignore[union-attr]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert as_operation(back).modes(compressible_layers(nn.Sequential(layer), (layer.in_channels, 4, 4))[0])


@pytest.mark.parametrize("name", KNOWN)
def test_fits_of_every_origin_and_layers_are_given_to_tensorly(name: str, tmp_path: Path) -> None:
    dense = convolution()
    model = nn.Sequential(dense)
    specs = compressible_layers(model, (6, 9, 9))
    first, second = (
        FitLibrary(model, specs, name, options=FitOptions(iterations=3), folder=tmp_path) for _ in range(2)
    )
    (chosen,) = first.formats
    ranks = Factorise(name, chosen.expand(first.modes("0", chosen), 2))
    computed, read = first.fit("0", ranks), second.fit("0", ranks)
    network, _ = apply_fits(model, (6, 9, 9), {"0": read})
    layer = factorised_layers(network)["0"]
    with tl.backend_context("pytorch"):
        for found in (computed.to_tensorly(), read.to_tensorly(), layer.to_tensorly()):
            full = CONTRACT[name](found)
            assert isinstance(full, torch.Tensor)
            torch.testing.assert_close(full.reshape(dense.weight.shape), layer.weight.detach())


def test_a_formats_own_weights_are_not_shared_with_tensorly() -> None:
    fit = fit_weight(get_format("tucker"), torch.ones(4, 3, 9), WeightModes((4,), (3,), 9), (1, 1))
    for backend in ("numpy", "pytorch"):
        before = [core.clone() for core in fit.cores]
        with tl.backend_context(backend):
            theirs = fit.to_tensorly()
            theirs.factors[0][:] = 7
        assert all(bool((a == b).all()) for a, b in zip(before, fit.cores, strict=True))


@pytest.mark.parametrize("name", sorted(set(list_formats()) - set(KNOWN)))
def test_a_format_that_tensorly_does_not_know_is_refused(name: str) -> None:
    modes = WeightModes((8,), (6,), 9, (3, 3))
    fit = fit_weight(get_format(name), torch.randn(8, 6, 9), modes, get_format(name).expand(modes, 2))
    with pytest.raises(DecompositionError, match=f"no object for the format '{name}'.*cp, tensor_ring"):
        fit.to_tensorly()
    with pytest.raises(DecompositionError, match=f"cannot be read as '{name}'"):
        from_tensorly(
            (None, [np.ones((8, 1)), np.ones((6, 1)), np.ones((9, 1))]), convolution(), tensor_format=name
        )


def test_a_train_can_be_read_as_a_ring() -> None:
    cores = [np.ones((1, 8, 2)), np.ones((2, 6, 3)), np.ones((3, 9, 1))]
    assert from_tensorly(cores, convolution()).ranks == (2, 3)
    fit = from_tensorly(cores, convolution(), tensor_format="tensor_ring")
    assert as_operation(fit) == Factorise("tensor_ring", (1, 2, 3))
    ring = [np.ones((2, 8, 2)), np.ones((2, 6, 3)), np.ones((3, 9, 2))]
    with pytest.raises(DecompositionError, match=r"begins and ends with rank 1.*with 2"):
        from_tensorly(ring, convolution(), tensor_format="tensor_train")


def ones(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [np.ones(shape) for shape in shapes]


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (None, "got nothing.*CPTensor"),
        (np.ones((8, 6, 9)), "got a ndarray.*list of cores"),
        ("factors", "got a str"),
        ([], "got a list"),
        (ones((8, 2), (6, 2)), r"arrays of shapes \(8, 2\), \(6, 2\)"),
        (
            (None, ones((8, 2), (6, 3), (9, 2))),
            r"cp has parts of shapes \(8, 2\), \(6, 3\).*not belong together",
        ),
        ((np.ones(3), ones((8, 2), (6, 2), (9, 2))), r"cp has parts of shapes \(3,\) and"),
        ((np.ones((2, 2, 9)), ones((8, 2))), "tucker has parts of shapes"),
        ((np.ones((2, 3, 9)), ones((8, 2), (6, 2))), "tucker has parts of shapes"),
        (ones((1, 8, 2), (3, 6, 2), (2, 9, 1)), "tensor_train has parts of shapes"),
        (ones((2, 8, 2), (2, 6, 2), (2, 9, 3)), "tensor_ring has parts of shapes"),
        (
            (None, ones((6, 2), (8, 2), (9, 2))),
            r"cp stands.*\(6, 8, 9\).*\(8, 6, 9\) or \(8, 6, 3, 3\).*order",
        ),
        ((np.ones((2, 2, 4)), ones((8, 2), (6, 2))), r"tucker stands for a tensor of shape \(8, 6, 4\)"),
        (ones((1, 8, 2), (2, 7, 2), (2, 9, 1)), r"tensor_train stands for a tensor of shape \(8, 7, 9\)"),
        (ones((1, 8, 2), (2, 6, 1)), r"tensor_train stands for a tensor of shape \(8, 6\)"),
        ((None, ones((8, 60), (6, 60), (9, 60))), r"Conv2d\(6, 8.*cp ranks \(60,\) are outside 1..\(48,\)"),
        ((None, [np.full((8, 1), np.nan), *ones((6, 1), (9, 1))]), "NaN or infinite"),
        ((None, [torch.ones(8, 1, dtype=torch.complex64), *ones((6, 1), (9, 1))]), "complex"),
        ((None, ["a", "b", "c"]), "got a str among tensorly's factors"),
    ],
)
def test_what_cannot_be_read_is_refused_saying_what_can(factors: Any, message: str) -> None:
    with pytest.raises(DecompositionError, match=message):
        from_tensorly(factors, convolution())


def test_layers_that_cannot_be_decomposed_take_no_factors() -> None:
    factors = (None, ones((8, 2), (6, 2), (9, 2)))
    for layer in (convolution(groups=2), nn.ConvTranspose2d(6, 8, 3), nn.ReLU()):
        with pytest.raises(DecompositionError, match="Conv1d, Conv2d or Linear with groups=1"):
            from_tensorly(factors, layer)  # type: ignore[arg-type]
    with pytest.raises(DecompositionError, match="there is no format 'svd'"):
        from_tensorly(factors, convolution(), tensor_format="svd")
    with pytest.raises(DecompositionError, match="'cp' and cannot be read as 'tucker'"):
        from_tensorly(factors, convolution(), tensor_format="tucker")


def test_given_factors_are_saved_with_the_plan_and_larger_ones_stay_out(tmp_path: Path) -> None:
    model = nn.Sequential(convolution(), nn.ReLU(), nn.Flatten(), nn.Linear(200, 10, dtype=torch.float64))
    weight = model[0].weight.detach().numpy()
    train = from_tensorly(tld.tensor_train(weight.reshape(4, 2, 6, 9), [1, 2, 3, 4, 1]), model[0])  # type: ignore[arg-type]
    grown = fit_weight(
        get_format("cp"), model[3].weight.detach()[..., None], WeightModes((10,), (200,), 1), (10,)
    )
    network, plan = apply_fits(model, (6, 9, 9), {"0": train, "3": grown})
    assert plan["0"].operations == (Factorise("tensor_train", train.ranks, ChannelFactors((4, 2), (6,))),)
    assert not plan["3"].operations
    assert "no fewer" in str(plan["3"].reason)
    save_compressed(network, plan, tmp_path / "small.safetensors")
    again, found = load_compressed(model, tmp_path / "small.safetensors")
    assert found == plan
    x = torch.randn(2, 6, 9, 9, dtype=torch.float64)
    assert torch.equal(again(x), network(x))
    with pytest.raises(PlanError, match="'1' is no compressible layer; choose from 0, 3"):
        apply_fits(model, (6, 9, 9), {"1": train})


def test_importing_the_package_leaves_tensorly_alone() -> None:
    code = "import sys, decomposition; sys.exit('tensorly' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
