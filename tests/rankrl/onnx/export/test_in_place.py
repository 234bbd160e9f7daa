"""What a network changes in place around its layers is the same in PyTorch's integers and in the file's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from fuzz_modules import in_place_functions, plan_in_integers, source_of, statements
from torch import nn

from decomposition import (
    apply_plan,
    build_structure,
    calibrate_ranges,
    integer_layers,
    load_compressed,
    save_compressed,
)
from decomposition.network.inputs import tensors_in
from rankrl.onnx.export import export_network

KINDS = ("convolution", "linear")


def inputs(count: int = 48, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def answers(dense: nn.Module, x: torch.Tensor, folder: Path) -> tuple[list[Any], list[Any], list[Any]]:
    """Return what the network without rounding, its simulated integers and its file answer."""
    network = build_structure(dense, plan_in_integers(dense, tuple(x.shape[1:])))
    calibrate_ranges(network, [x])
    path = folder / "integers.onnx"
    export_network(network, path, tuple(x.shape[1:]), [x.numpy()])
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        exact, simulated = ([y.numpy() for y in tensors_in(each(x))] for each in (dense, network))
    return exact, simulated, found


def network_of(changes: Sequence[str], kind: str) -> nn.Module:
    torch.manual_seed(0)
    space: dict[str, Any] = {}
    exec(source_of(changes, kind), space)
    network: nn.Module = space["Net"](outcomes=True).eval()
    return network


def off(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.abs(first - second).mean() / np.abs(first).max())


def check(dense: nn.Module, names: Sequence[str], folder: Path) -> None:
    exact, simulated, found = answers(dense, inputs(), folder)
    wrong = {
        name: (off(own, other), off(right, own))
        for name, right, own, other in zip(names, exact, simulated, found, strict=False)
        if not off(own, other) < max(0.01, 2 * off(right, own))
    }
    assert not wrong


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_done_to_outputs_is_done_in_the_file(kind: str, tmp_path: Path) -> None:
    functions = {call.partition("(")[0].removeprefix("y."): call for call in in_place_functions()}
    common = [
        functions[f"{name}_"] for name in ("mul", "add", "sub", "div", "neg", "exp", "sigmoid", "clamp")
    ]
    changes = [
        *common,
        "y.copy_(y.flip(1))",
        "y.relu_()",
        "y[:, ::2] = 0",
        "torch.mul(y, 2.0, out=y)",
        "y += 0.3",
    ]
    check(network_of(changes, kind), changes, tmp_path)


class Around(nn.Module):
    """Tensors that are changed after a layer has taken them, and by way of views."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv2d(each, 6, 3, padding=1) for each in (3, 6, 6, 6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = torch.sigmoid(self.a(x))
        y = self.b(h)
        h.mul_(30)  # no longer in the range in which `b` took it
        total = y + h
        rows = y.flatten(2)
        y.mul_(5)
        z = self.c(y)
        z[:, ::2].sub_(3)
        alias, z = z, z.add_(rows.view_as(z))
        return total, self.d(alias), z


def test_what_a_layer_has_taken_may_change_afterwards(tmp_path: Path) -> None:
    torch.manual_seed(0)
    check(Around().eval(), ("total", "by way of another name", "sum"), tmp_path)


class Pyramid(nn.Module):
    """One head for maps of which each is a hundredth of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1)
        for layer in (self.stem, self.head, self.last):
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        large = torch.relu(self.stem(x))
        return tuple(self.last(torch.relu(self.head(large * scale))) for scale in (1, 0.01, 1e-4))


class Recurrent(nn.Module):
    """One layer many times over, whose numbers grow, read in another order than they were made in."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        nn.init.orthogonal_(self.step.weight, gain=6.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        states = [self.step(x)]
        for _ in range(3):
            states.append(self.step(states[-1]))
        return tuple(self.head(torch.tanh(states[k] / 6 ** (k + 1))) for k in (3, 2, 1, 0))


@pytest.mark.parametrize("kind", [Pyramid, Recurrent])
def test_every_use_of_a_layer_has_ranges_of_its_own(kind: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    dense = kind().eval()
    check(dense, ("first", "second", "third", "fourth"), tmp_path)
    network = build_structure(dense, plan_in_integers(dense, (3, 8, 8)))
    calibrate_ranges(network, [inputs()])
    with torch.no_grad():
        first, second = ([y + 0.0 for y in tensors_in(network(inputs()))] for _ in range(2))
    assert all(map(torch.equal, first, second))  # a pass leaves nothing to the next


def test_a_refit_adds_nothing_to_the_bias_of_a_layer_of_several_uses() -> None:
    torch.manual_seed(0)
    dense, x = Pyramid().eval(), inputs()
    network = apply_plan(dense, plan_in_integers(dense, (3, 8, 8)), x)
    assert not network.head.bias.any()
    with torch.no_grad():
        for right, found in zip(dense(x), network(x), strict=True):
            assert off(np.asarray(right), np.asarray(found)) < 0.02


def test_ranges_of_several_uses_are_saved_and_read(tmp_path: Path) -> None:
    torch.manual_seed(0)
    dense, x = Pyramid().eval(), inputs()
    plan = plan_in_integers(dense, tuple(x.shape[1:]))
    network = apply_plan(dense, plan, x)
    assert {
        len(layer.input_range.low) for layer in integer_layers(network).values() if layer is not network.stem
    } == {3}
    save_compressed(network, plan, tmp_path / "small.safetensors", dense=dense)
    loaded = load_compressed(dense, tmp_path / "small.safetensors")[0].eval()
    again = build_structure(dense, plan).eval()
    again.load_state_dict(network.state_dict())
    for other in (loaded, again):
        for y, z in zip(network.eval()(x), other(x), strict=True):
            assert torch.equal(y + 0.0, z + 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", range(8))
def test_every_function_of_torch_that_works_in_place_is_simulated(
    kind: str, part: int, tmp_path: Path
) -> None:
    changes = statements()[part::8]
    check(network_of(changes, kind), changes, tmp_path)
