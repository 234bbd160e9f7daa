"""On a GPU, training from a CUDA graph gives the weights that training without one gives."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from decomposition import LayerPlan, Quantise, apply_plan, make_plan
from rankrl.data import ImageData
from rankrl.device import Precision
from rankrl.training import TrainingProgress, TrainingRecipe, train
from rankrl.training.epochs import CannotCaptureError, GraphedPass

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MakeNetwork = Callable[[int], nn.Module]
RECIPE = TrainingRecipe(
    epochs=3, batch_size=64, lr=5e-3, gradient_clip=1.0, ema_decay=0.9, distillation=0.5, product_decay=1e-3
)


def precisions() -> list[Precision]:
    return [Precision(torch.device("cuda"), dtype) for dtype in (torch.float32, torch.bfloat16)]


def compressed(network: nn.Module, data: ImageData) -> nn.Module:
    return apply_plan(network, make_plan(network, data.input_shape, "cp", 3))


def in_integers(network: nn.Module, data: ImageData) -> nn.Module:
    plan = make_plan(network, data.input_shape, "cp", {})
    layers = tuple(LayerPlan(layer.name, (Quantise(),)) for layer in plan.layers)
    images = data.train.x[:64].float() / 255
    return apply_plan(network, dataclasses.replace(plan, layers=layers), images)


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


def refuse(*_: object) -> None:
    raise CannotCaptureError("a test wants none")


@pytest.mark.parametrize("precision", precisions(), ids=lambda each: str(each.dtype))
@pytest.mark.parametrize("change", [compressed, in_integers])
def test_weights_are_those_of_training_without_a_graph(
    digits: ImageData,
    make_network: MakeNetwork,
    change: Callable[[nn.Module, ImageData], nn.Module],
    precision: Precision,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    networks = [change(make_network(0), digits) for _ in range(2)]
    results = []
    for network in networks:
        with caplog.at_level(logging.INFO, logger="rankrl"):
            results.append(train(network, digits, RECIPE, precision=precision, teacher=make_network(1)))
        assert ("without a CUDA graph" in caplog.text) == (len(results) == 2)
        monkeypatch.setattr("rankrl.training.loop.GraphedPass", refuse)
    assert same(*networks)
    assert [row.loss for row in results[0].history] == [row.loss for row in results[1].history]


def test_a_killed_training_goes_on_to_the_same_weights(
    digits: ImageData, make_network: MakeNetwork, tmp_path: Path
) -> None:
    precision, recipe = precisions()[1], dataclasses.replace(RECIPE, distillation=0.0)
    undisturbed, killed = make_network(0), make_network(0)
    train(undisturbed, digits, recipe, precision=precision)

    def stop(progress: TrainingProgress) -> None:
        if progress.epoch == 2:
            raise KeyboardInterrupt

    path = tmp_path / "state.safetensors"
    with pytest.raises(KeyboardInterrupt):
        train(killed, digits, recipe, precision=precision, state_file=path, on_step=stop)
    train(killed, digits, recipe, precision=precision, state_file=path, resume=True)
    assert same(undisturbed, killed)


def test_capturing_changes_neither_buffers_nor_random_numbers(make_network: MakeNetwork) -> None:
    network = make_network(0).cuda().train()
    x, y = torch.randn(16, 1, 8, 8, device="cuda"), torch.arange(16, device="cuda") % 10
    before = {key: value.clone() for key, value in network.state_dict().items()}
    drawn = torch.cuda.get_rng_state()

    def compute(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = network(x)
        loss = nn.functional.cross_entropy(outputs, y)
        loss.backward()
        return loss.detach(), outputs.detach()

    passes = GraphedPass(compute, network, x, y)
    assert torch.equal(drawn, torch.cuda.get_rng_state())
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())
    passes(x, y)
    assert network.bn.num_batches_tracked == 1
    assert all(parameter.grad is not None for parameter in network.parameters())


class Waits(nn.Module):
    """Looks at its values on the host."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the network on inputs that are not all zero."""
        return self.inner(x if float(x.abs().sum()) > 0 else x + 1)


class Draws(Waits):
    """Leaves itself out at random, as the host decides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the network, seldom on half of its inputs."""
        return self.inner(x if float(torch.rand(())) < 0.9 else x / 2)


@pytest.mark.parametrize(("kind", "reason"), [(Waits, "waits"), (Draws, "random numbers on the host")])
def test_networks_that_cannot_be_captured_are_trained_without(
    digits: ImageData,
    make_network: MakeNetwork,
    kind: type[Waits],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    network = kind(make_network(0))
    recipe = TrainingRecipe(epochs=6, lr=1e-2, batch_size=64)
    with caplog.at_level(logging.INFO, logger="rankrl"):
        result = train(network, digits, recipe, precision=precisions()[0])
    assert result.accuracy > 0.9
    assert reason in caplog.text
