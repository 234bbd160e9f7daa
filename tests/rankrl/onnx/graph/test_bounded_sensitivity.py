"""What bounds the cost of sensitivities: random directions, sketches, a share for every node."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_graphs import images
from torch import nn

from rankrl.onnx.export import export_onnx
from rankrl.onnx.graph import OnnxNetwork, calibration, find_sites
from rankrl.onnx.graph.calibration import PASSES, SKETCHED, Directions, Sketch, passes_by_node, shared_passes

COUNT = 64


def wide() -> nn.Module:
    """Return a network of 24 channels and 40 x 7 x 6 output numbers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.Tanh(), nn.Conv2d(24, 12, 3, padding=1), nn.Tanh(), nn.Conv2d(12, 40, 2)
    ).eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> OnnxNetwork:
    path = tmp_path_factory.mktemp("wide") / "net.onnx"
    export_onnx(wide(), path, (3, 10, 9))
    return OnnxNetwork.load(path)


def jacobian_products(after: nn.Module, y: torch.Tensor) -> torch.Tensor:
    """Return the mean over inputs of sum_p J_p' J_p, exactly."""
    total = torch.zeros(y.shape[1], y.shape[1], dtype=torch.float64)
    for each in y:
        jacobian = torch.autograd.functional.jacobian(lambda x: after(x[None]).flatten(), each)
        blocks = jacobian.flatten(2).double()  # (numbers, channels, positions)
        total += torch.einsum("ncp,nep->ce", blocks, blocks)
    return total / len(y)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def exact() -> torch.Tensor:
    network = wide()
    x = torch.from_numpy(images(COUNT))
    with torch.no_grad():
        y, outputs = network[0](x), network(x)
    return jacobian_products(network[1:], y[:16]) / float(outputs.double().square().mean())


def test_sketched_outputs_give_the_matrix_of_the_exact_jacobian(
    exported: OnnxNetwork, exact: torch.Tensor
) -> None:
    feeds = [{exported.inputs[0].name: images(COUNT)}]
    site = find_sites(exported, feeds[0])[0]
    found = calibration.collect_sensitivities(exported, [site], feeds, passes=24 * COUNT)[site.name]
    assert relative(found, exact) < 0.25
    identity = torch.eye(24, dtype=torch.float64) * exact.trace() / 24
    assert relative(found, exact) < 0.5 * relative(identity, exact)


def test_few_passes_are_never_worse_than_no_matrix(exported: OnnxNetwork, exact: torch.Tensor) -> None:
    feeds = [{exported.inputs[0].name: images(COUNT)}]
    site = find_sites(exported, feeds[0])[0]
    identity = torch.eye(24, dtype=torch.float64)

    def cosine(matrix: torch.Tensor) -> float:
        return float((matrix * exact).sum() / matrix.norm() / exact.norm())

    found = [
        cosine(calibration.collect_sensitivities(exported, [site], feeds, passes=64, seed=seed)[site.name])
        for seed in range(5)
    ]
    assert np.mean(found) > cosine(identity) - 0.02


def test_too_few_passes_leave_a_node_without_a_matrix(exported: OnnxNetwork) -> None:
    feeds = [{exported.inputs[0].name: images(8)}]
    sites = find_sites(exported, feeds[0])
    assert not calibration.collect_sensitivities(exported, sites, feeds, passes=63)


def test_effort_is_shared_among_nodes(exported: OnnxNetwork) -> None:
    sites = find_sites(exported, {exported.inputs[0].name: images(8)})
    free, bound = (passes_by_node(exported, sites, effort) for effort in (1e15, 1e9))
    assert free == [PASSES[1]] * 3
    assert 0 < bound[0] < bound[1] <= bound[2]  # less and less lies behind


@given(st.lists(st.floats(1, 1e9), min_size=1, max_size=20), st.integers(1, 5000), st.floats(1, 1e12))
def test_shares_keep_within_the_effort(efforts: list[float], most: int, effort: float) -> None:
    shares = shared_passes(efforts, most, effort)
    spent = sum(share * each for share, each in zip(shares, efforts, strict=True))
    assert spent <= effort * (1 + 1e-9)
    assert all(0 <= share <= most for share in shares)
    if min(shares) < most:  # nothing that a node could have used is left over
        waiting = [each for share, each in zip(shares, efforts, strict=True) if share < most]
        assert effort - spent <= sum(waiting) * (1 + 1e-6)


@pytest.mark.parametrize("count", [2, 5, 12])
def test_directions_estimate_without_bias(count: int) -> None:
    torch.manual_seed(0)
    factor = torch.randn(30, 12) * torch.linspace(0.2, 2, 12)
    expected = (factor.T @ factor).double()
    generator = np.random.default_rng(0)
    total = torch.zeros_like(expected)
    for _ in range(4000):
        directions = Directions.drawn(12, count, generator)
        reactions = factor @ torch.from_numpy(directions.matrix)
        total += directions.sensitivities(reactions[None])[0]
    assert relative(total / 4000, expected) < 0.15


def test_as_many_directions_as_channels_are_exact() -> None:
    directions = Directions.drawn(5, 7, np.random.default_rng(0))
    assert np.array_equal(directions.matrix, np.eye(5))


@pytest.mark.parametrize("numbers", [3, SKETCHED, SKETCHED + 1, 3000])
def test_sketches_keep_products_within_their_statistical_error(numbers: int) -> None:
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((2, numbers))
    rows[1] += rows[0]
    expected = rows @ rows.T
    products = np.stack([(each := Sketch(numbers, generator).of(rows)) @ each.T for _ in range(400)])
    assert each.shape == (2, min(numbers, SKETCHED))
    if numbers <= SKETCHED:
        np.testing.assert_allclose(products[0], expected)
        return
    lengths = np.sqrt(np.outer(expected.diagonal(), expected.diagonal()))
    deviation = np.sqrt(2 / SKETCHED) * lengths  # of one sketch
    assert (np.abs(products.mean(0) - expected) < 5 * deviation / np.sqrt(400)).all()
    assert (products.std(0) < 1.2 * deviation).all()


def test_a_head_of_many_numbers_is_measured_in_parts(
    exported: OnnxNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    feeds = [{exported.inputs[0].name: images(32)}]
    site = find_sites(exported, feeds[0])[0]
    seen: list[int] = []
    run = calibration.GraphSession.run

    def spied(self: calibration.GraphSession, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        outputs = run(self, feed)
        seen.append(sum(each.size for each in outputs))
        return outputs

    monkeypatch.setattr(calibration, "_ELEMENTS", 10_000)
    monkeypatch.setattr(calibration.GraphSession, "run", spied)
    calibration.collect_sensitivities(exported, [site], feeds, passes=24 * 32)
    assert max(seen) <= 10_000
