"""Networks inside of wrappers, and forms of a network that have no layers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import decomposition
from decomposition import DecompositionError
from decomposition.network.surgery import unwrapped

X = torch.randn(16, 3, 8, 8)
QUICK = decomposition.FitOptions(iterations=3)


def network(norm: type[nn.Module] = nn.BatchNorm2d) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 3)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 4)).eval()


def _compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def _compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def _inner(model: nn.Module) -> nn.Module:
    return nn.Sequential(_compiled(model), nn.Softmax(1)).eval()


@pytest.fixture
def distributed() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled": _compiled,
    "compiled in place": _compiled_in_place,
    "data parallel": nn.DataParallel,
    "distributed": nn.parallel.DistributedDataParallel,
    "averaged": AveragedModel,
    "compiled, then data parallel": lambda model: nn.DataParallel(_compiled(model)),
    "average of a compiled one": lambda model: AveragedModel(_compiled(model)),
}


SHAPE = (3, 8, 8)


def planned(model: nn.Module) -> decomposition.CompressionPlan:
    return decomposition.plan_by_heuristic(
        model, SHAPE, "tucker", "greedy", 0.5, calibration=X, candidates=3, options=QUICK
    )


@pytest.fixture(scope="module")
def plain_plan() -> decomposition.CompressionPlan:
    """What the network itself gets."""
    return planned(network())


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS.keys())
@pytest.mark.usefixtures("distributed")
def test_a_wrapped_network_becomes_what_the_plain_one_becomes(
    wrap: Callable[[nn.Module], nn.Module], plain_plan: decomposition.CompressionPlan, tmp_path: Path
) -> None:
    plain, wrapped = network(), wrap(network()).eval()
    assert decomposition.inspect_layers(wrapped, X) == decomposition.inspect_layers(plain, X)
    assert decomposition.count_macs(wrapped, SHAPE) == decomposition.count_macs(plain, SHAPE)
    assert planned(wrapped) == plain_plan
    small, other = (decomposition.apply_plan(each, plain_plan, X, options=QUICK) for each in (plain, wrapped))
    assert type(other) is nn.Sequential
    torch.testing.assert_close(other(X), small(X), rtol=0, atol=0)
    # A compressed network that was trained inside of a wrapper is saved as the one inside.
    decomposition.save_compressed(
        nn.DataParallel(other), plain_plan, tmp_path / "small.safetensors", dense=wrapped
    )
    loaded, _ = decomposition.load_compressed(wrapped, tmp_path / "small.safetensors")
    torch.testing.assert_close(loaded.eval()(X), small(X), rtol=0, atol=0)


def test_parts_are_unwrapped_in_a_copy_that_keeps_its_names(caplog: pytest.LogCaptureFixture) -> None:
    model = _inner(network())
    with caplog.at_level(logging.WARNING):
        plain, again = unwrapped(model), unwrapped(model)
    assert [name for name, _ in plain.named_parameters()] == [
        f"0.{n}" for n, _ in network().named_parameters()
    ]
    assert len(caplog.messages) == 1
    assert "OptimizedModule (0) taken off" in caplog.text
    torch.testing.assert_close(again(X), model(X), rtol=0, atol=0)
    assert type(model[0]).__name__ == "OptimizedModule"  # type: ignore[index]
    assert unwrapped(plain) is plain


def test_norms_that_processes_share_are_batch_norms() -> None:
    plain, shared = network(), nn.DataParallel(network(nn.SyncBatchNorm))
    assert decomposition.inspect_layers(shared, X) == decomposition.inspect_layers(plain, X)
    plan = decomposition.make_plan(plain, X, "tucker", 4)
    small, other = (decomposition.apply_plan(each, plan, X) for each in (plain, shared))
    torch.testing.assert_close(other(X), small(X))


def _quantised() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), torch.ao.nn.quantized.Linear(4, 4))


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "scripted": (lambda: torch.jit.script(network()), "RecursiveScriptModule, a program of TorchScript"),
    "traced": (lambda: torch.jit.trace(network(), X), "TopLevelTracedModule, a program of TorchScript"),
    "scripted part": (lambda: nn.Sequential(torch.jit.script(network())), r"layer '0' is a Recursive"),
    "exported": (lambda: torch.export.export(network(), (X,)).module(), "GraphModule, an exported program"),
    "exported program": (lambda: torch.export.export(network(), (X,)), "got a ExportedProgram"),
    "quantised": (_quantised, r"layer '1' is a Linear, quantised by torch.ao"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "what"), REFUSED.values(), ids=REFUSED.keys())
def test_programs_and_integers_are_refused_by_name(make: Callable[[], nn.Module], what: str) -> None:
    model = make()
    for act in (
        lambda: decomposition.make_plan(model, X, "tucker", 4),
        lambda: decomposition.plan_by_heuristic(model, X, "tucker", "greedy", 0.5),
        lambda: decomposition.plain_attention(model),
    ):
        with pytest.raises(DecompositionError, match=f"{what}.*give the n"):
            act()


def test_a_traced_graph_that_keeps_its_layers_is_a_network() -> None:
    plain = network()
    graph = torch.fx.symbolic_trace(plain)
    assert decomposition.inspect_layers(graph, X) == decomposition.inspect_layers(plain, X)
