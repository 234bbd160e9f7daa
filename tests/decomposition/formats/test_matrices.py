"""Kronecker products and pivoting factorisations of weights."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import decomposition
import rankrl
from decomposition.choose.library import FitLibrary
from decomposition.choose.listing import CandidateLister
from decomposition.errors import DecompositionError
from decomposition.fit.fitting import LowRank, fit_weight
from decomposition.formats import get_format
from decomposition.network.cost import count_macs
from decomposition.network.geometry import WeightModes
from decomposition.network.layers import compressible_layers, inspect_layers
from decomposition.testing import MODES, modes_name, normal, random_cores
from rankrl.onnx.export import export_onnx

KRONECKER = get_format("kronecker")
PLAIN = [modes for modes in MODES if modes.plain]


@pytest.mark.parametrize("modes", PLAIN, ids=modes_name)
def test_the_weight_is_the_sum_of_kronecker_products_at_every_position(modes: WeightModes) -> None:
    first, second = random_cores(KRONECKER, modes, KRONECKER.expand(modes, 3))
    weight = KRONECKER.reconstruct([first, second], modes)
    for position in range(modes.kernel):
        pairs = zip(first, second[..., position], strict=True)
        torch.testing.assert_close(weight[..., position], sum(torch.kron(a, b) for a, b in pairs))


@pytest.mark.parametrize("modes", PLAIN, ids=modes_name)
def test_the_start_finds_a_sum_of_products_again(modes: WeightModes) -> None:
    ranks = KRONECKER.expand(modes, 2)
    weight = KRONECKER.reconstruct(random_cores(KRONECKER, modes, ranks), modes)
    found = KRONECKER.reconstruct(KRONECKER.start(weight, modes, ranks), modes)
    torch.testing.assert_close(found, weight, rtol=1e-9, atol=1e-9)
    noise = normal(tuple(weight.shape), seed=9)
    largest = KRONECKER.start(noise, modes, KRONECKER.max_ranks(modes))
    torch.testing.assert_close(KRONECKER.reconstruct(largest, modes), noise, rtol=1e-9, atol=1e-9)


def test_few_terms_run_in_stages_and_many_contract() -> None:
    dense = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1))
    (spec,) = inspect_layers(dense, (16, 9, 9))
    modes = KRONECKER.modes(spec)
    for rank, execution in ((2, "chain"), (KRONECKER.max_rank(modes), "dense")):
        layer = KRONECKER.build(dense[0], spec, modes, (rank,))  # type: ignore[arg-type]
        assert layer.execution == execution
        assert layer.staged == (execution == "chain")
        assert count_macs(layer, (16, 9, 9)) == KRONECKER.stage_macs(spec, modes, (rank,))[execution]


PIFA = get_format("pifa")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(6, 24, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 32, 1), nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 40)).eval()


def numbers(path: Path) -> int:
    """Count the floating-point numbers that a file stores."""
    stored = onnx.load(path).graph.initializer
    return sum(int(np.prod(each.dims)) for each in stored if each.data_type == onnx.TensorProto.FLOAT)


@given(
    out=st.integers(1, 12),
    inputs=st.integers(1, 12),
    share=st.floats(0, 1),
    vanishing=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_any_product_is_kept(out: int, inputs: int, share: float, vanishing: int, seed: int) -> None:
    rank = max(1, round(share * min(out, inputs)))
    dense = nn.Linear(inputs, out)
    spec = decomposition.inspect_layers(nn.Sequential(dense), (inputs,))[0]
    left, right = normal((out, rank), seed), normal((rank, inputs), seed + 1)
    left[:, rank - min(vanishing, rank) :] = 0  # a product of a lower rank, down to none
    layer = PIFA.build(dense.double(), spec, PIFA.modes(spec), (rank,))
    layer.load([left, right], torch.zeros(out))
    torch.testing.assert_close(layer.weight.flatten(1), left @ right, rtol=1e-9, atol=1e-9)
    assert decomposition.count_parameters(layer) == rank * (out + inputs - rank) + out
    layer.balance()
    torch.testing.assert_close(layer.weight.flatten(1), left @ right, rtol=1e-9, atol=1e-9)


def test_no_row_outgrows_those_of_the_identity() -> None:
    dense = nn.Linear(300, 200)
    spec = decomposition.inspect_layers(nn.Sequential(dense), (300,))[0]
    layer = PIFA.build(dense, spec, PIFA.modes(spec), (64,))
    left, right = normal((200, 64)), normal((64, 300), 1)
    left[:64] *= 1e-6  # the first rows would not do
    layer.load([left, right], torch.zeros(200))
    assert float(layer.cores()[0].detach().abs().max()) < 20
    found = layer.weight.detach().flatten(1).double()
    assert float((found - left @ right).norm() / (left @ right).norm()) < 1e-5


@pytest.mark.parametrize("kernel", [1, 9])
def test_the_fit_is_the_best_of_its_rank_with_a_kernel_too(kernel: int) -> None:
    modes = WeightModes((8,), (5,), kernel)
    weight, root = normal((8, 5, kernel)), normal((5 * kernel, 5 * kernel), 1)
    fit = fit_weight(PIFA, weight, modes, (3,), root @ root.T)
    values = np.linalg.svd((weight.flatten(1) @ root).numpy(), compute_uv=False)
    assert fit.error == pytest.approx(np.linalg.norm(values[3:]) / np.linalg.norm(values))


def test_formats_of_two_matrices_share_their_solutions(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(14, 10))
    solved: list[int] = []

    class Counted(LowRank):
        def __init__(self, *problem: Any) -> None:
            solved.append(1)
            super().__init__(*problem)

    monkeypatch.setattr("decomposition.fit.fitting.LowRank", Counted)
    specs = compressible_layers(model, (14,))
    (together,) = FitLibrary(model, specs, ("cp", "tensor_ring", "pifa")).all_candidates(limit=3)
    assert len(solved) == 1
    (alone,) = FitLibrary(model, specs, "pifa").all_candidates(limit=3)
    assert [each for each in together.candidates if each.generator == "pifa"] == list(alone.candidates[:-1])


def test_both_forms_of_a_file_store_what_was_announced(tmp_path: Path) -> None:
    model, x = network(), torch.randn(48, 6, 5, 5)
    plan = decomposition.plan_by_heuristic(model, (6, 5, 5), "pifa", "greedy", 0.6, calibration=x)
    small = decomposition.apply_plan(model, plan, calibration=x)
    export_onnx(small, tmp_path / "module.onnx", (6, 5, 5), progress=False)
    bias = 2 * 24  # what a batch norm is folded into
    assert numbers(tmp_path / "module.onnx") <= decomposition.count_parameters(small) - 2 * 24 + bias
    export_onnx(model, tmp_path / "dense.onnx", (6, 5, 5), progress=False)
    options = rankrl.DecompositionOptions(format="pifa", iterations=2)
    call = (tmp_path / "dense.onnx", x.numpy(), tmp_path / "file.onnx")
    result = rankrl.compress(*call, params=0.6, decomposition=options)
    assert {layer.operations[0].format for layer in result.plan if layer.operations} == {"pifa"}
    assert numbers(tmp_path / "file.onnx") == result.after["params"]
    for name in ("module", "file"):
        path = tmp_path / f"{name}.onnx"
        read = onnxruntime.SessionOptions()
        read.optimized_model_filepath = str(tmp_path / "read.onnx")
        onnxruntime.InferenceSession(path, read, providers=["CPUExecutionProvider"])
        operators = {node.op_type for node in onnx.load(tmp_path / "read.onnx").graph.node}
        assert not operators & {"EyeLike", "Equal", "Concat", "Gather"}, (
            "the runtime computes them in every pass"
        )


def test_among_others_it_takes_layers_without_a_kernel_in_floating_point() -> None:
    layers = (nn.Conv2d(6, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.Flatten(), nn.Linear(16 * 36, 20))
    model = nn.Sequential(*layers)
    specs = compressible_layers(model, (6, 8, 8))
    lister = CandidateLister(specs, ("tucker", "pifa"), precisions=("float32", "int8", "int8_weights"))
    alone = CandidateLister(specs, "pifa", precisions=("float32", "int8"))
    for spec in specs:
        offered = [each for each in lister.candidates(spec.name).candidates if each.generator == "pifa"]
        assert bool(offered) == (spec.kernel_elements == 1)
        assert all(len(each.operations) == 1 for each in offered)
        assert any(each.generator == "pifa" for each in alone.candidates(spec.name).candidates)


def test_integers_are_refused_with_what_to_do() -> None:
    model = network()
    rounded = decomposition.LayerPlan(
        "7", (decomposition.Factorise("pifa", (4,)), decomposition.Quantise(8, "float32"))
    )
    specs = decomposition.inspect_layers(model, (6, 5, 5))
    others = [decomposition.LayerPlan(spec.name, ()) for spec in specs if spec.name != "7"]
    plan = decomposition.CompressionPlan((*others, rounded), decomposition.fingerprint(specs), (6, 5, 5))
    with pytest.raises(DecompositionError, match=r"'7': pifa .* has no form in integers; quantise the"):
        decomposition.apply_plan(model, plan)
