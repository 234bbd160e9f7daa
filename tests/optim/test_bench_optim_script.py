"""The benchmark script measures what it says and writes only its own section."""

import bench_optim as bench
import pytest
import torch

pytestmark = pytest.mark.slow


def test_the_models_have_the_sizes_of_their_papers() -> None:
    def size(shapes: list[tuple[int, ...]]) -> int:
        return sum(torch.Size(shape).numel() for shape in shapes)

    assert size(bench.cifar_resnet_shapes(20)) == 269_722
    assert size(bench.cifar_resnet_shapes(56)) == 853_018
    assert size(bench.resnet50_shapes()) == 25_557_032


def test_peak_memory_counts_what_is_alive_at_a_time() -> None:
    tensor = torch.zeros(1000)
    with bench.PeakMemory() as memory:
        tensor.add_(1)
        first = tensor * 2
        del first
        second = tensor * 3
        third = second + 1
        del second, third
    assert memory.peak == 2 * tensor.nbytes


@pytest.mark.parametrize("algorithm", ["Adam", "Adagrad"])
def test_no_more_memory_than_torch_foreach(algorithm: str) -> None:
    rows = {row[0]: row for row in bench.compare([(64, 64, 3, 3)] * 12, algorithm, rounds=1, device="cpu")}
    _, _, state, temporary = rows[f"Onnx{algorithm}"]
    _, _, torch_state, torch_temporary = rows["torch foreach"]
    assert state <= torch_state
    assert temporary <= torch_temporary
