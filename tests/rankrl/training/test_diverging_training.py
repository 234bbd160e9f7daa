"""A training that diverges starts again with half the rate, exactly as if it had begun with that one."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rankrl.data import ImageData
from rankrl.device import Precision
from rankrl.errors import NonFiniteError
from rankrl.training import EpochRow, TrainingProgress, TrainingRecipe, TrainingResult, train
from rankrl.training.epochs import TrainingState

FLOAT32 = Precision(torch.device("cpu"), torch.float32)
TOO_FAST = TrainingRecipe(
    epochs=4,
    batch_size=32,
    lr=1.0,
    optimizer="sgd",
    optimizer_options={"momentum": 0.9},
    schedule="one_cycle",
    warmup=0.3,
    ema_decay=0.9,
)
"""At this rate `plain_network` falls back to guessing, at a quarter of it it learns."""


def plain_network(seed: int = 0) -> nn.Module:
    """A network without normalisation, whose ReLUs die when the steps are too large."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(256, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class Fragile(nn.Module):
    """Its scores are infinite or NaN once a weight has grown too large."""

    def __init__(self, largest: float) -> None:
        super().__init__()
        self.largest = largest
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 1, 8, 8) to (N, 10)."""
        return self.linear(x.flatten(1)) / (self.linear.weight.abs().max() < self.largest)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def without_time(history: tuple[EpochRow, ...]) -> list[EpochRow]:
    return [dataclasses.replace(row, seconds=0.0) for row in history]


def assert_as_if_begun_with_its_rate(
    digits: ImageData, make: Callable[[], nn.Module], recipe: TrainingRecipe
) -> None:
    """The training halves its rate, learns, and equals one that was given the last rate."""
    found, expected = make(), make()
    result = train(found, digits, recipe, precision=FLOAT32)
    assert result.halvings > 0
    assert result.lr == recipe.lr / 2**result.halvings
    assert result.accuracy > 0.7
    slower = dataclasses.replace(recipe, lr=result.lr, halvings=0)
    alike = train(expected, digits, slower, precision=FLOAT32)
    assert same(weights(found), weights(expected))
    assert without_time(result.history) == without_time(alike.history)


def test_a_network_that_falls_back_to_guessing_starts_again(
    digits: ImageData, caplog: pytest.LogCaptureFixture
) -> None:
    assert_as_if_begun_with_its_rate(digits, plain_network, TOO_FAST)
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "fell back to guessing" in messages[0]
    assert "half the highest rate, 0.5 (halving 1 of 4)" in messages[0]


def test_a_loss_that_is_not_finite_starts_again(digits: ImageData, caplog: pytest.LogCaptureFixture) -> None:
    recipe = TrainingRecipe(epochs=3, batch_size=32, lr=0.2, schedule="constant", warmup=0.0)
    assert_as_if_begun_with_its_rate(digits, lambda: Fragile(1.0), recipe)
    assert "the training loss became" in caplog.records[0].getMessage()


def test_scores_that_are_not_finite_start_again(digits: ImageData, caplog: pytest.LogCaptureFixture) -> None:
    # One step an epoch: the loss is finite, and the weights that it leaves are not.
    recipe = TrainingRecipe(epochs=14, batch_size=10**6, lr=0.8, schedule="constant", warmup=0.0)
    assert_as_if_begun_with_its_rate(digits, lambda: Fragile(1.0), recipe)
    assert "class scores are NaN or infinite" in caplog.records[0].getMessage()


def test_a_network_that_never_learns_starts_again_after_the_warm_up(
    digits: ImageData, caplog: pytest.LogCaptureFixture
) -> None:
    # Dead from its first step: no class is answered better than by chance, and no number is infinite.
    recipe = dataclasses.replace(TOO_FAST, lr=1e3, halvings=1, warmup=0.7, schedule="constant")
    result = train(plain_network(), digits, recipe, precision=FLOAT32)
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "had learned nothing by the end of epoch 3" in message  # the first after 70 % of four epochs
    assert result.halvings == 1
    assert len(result.history) == recipe.epochs  # the last rate is followed to the end


def test_a_network_that_is_slow_to_begin_is_left_to_its_rate(digits: ImageData) -> None:
    # At this rate all epochs pass on the plateau of guessing: half of it would only make that longer.
    recipe = dataclasses.replace(TOO_FAST, lr=1e-5, warmup=0.0, schedule="constant")
    network = plain_network()
    with torch.no_grad():
        # Held at zero, so that not even the order of the scores tells anything.
        network.get_submodule("6").weight.zero_().requires_grad_(False)  # type: ignore[union-attr, operator]
        network.get_submodule("6").bias.zero_()  # type: ignore[union-attr, operator]
    result = train(network, digits, recipe, precision=FLOAT32)
    assert result.history[-1].loss == pytest.approx(2.3026, abs=0.005)
    assert result.halvings == 0


def test_a_few_steps_are_not_judged(digits: ImageData) -> None:
    recipe = dataclasses.replace(TOO_FAST, lr=1e3, epochs=2)
    assert train(plain_network(), digits, recipe, precision=FLOAT32).halvings == 0


def test_without_halvings_and_after_the_last_one_the_error_is_raised(digits: ImageData) -> None:
    for halvings, rate in ((0, "1"), (2, "0.25")):
        recipe = TrainingRecipe(epochs=2, batch_size=32, schedule="constant", warmup=0.0, lr=1.0)
        recipe = dataclasses.replace(recipe, halvings=halvings)
        with pytest.raises(NonFiniteError, match=rf"at learning rate {rate}\. Lower the learning rate"):
            train(Fragile(0.13), digits, recipe, precision=FLOAT32)


def test_a_healthy_training_is_not_touched(
    digits: ImageData, make_network: Callable[[int], nn.Module]
) -> None:
    recipe = TrainingRecipe(
        epochs=6,
        batch_size=64,
        lr=0.1,
        optimizer="sgd",
        optimizer_options={"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
        schedule="one_cycle",
        warmup=0.3,
    )
    guarded, free = make_network(0), make_network(0)
    result = train(guarded, digits, recipe, precision=FLOAT32)
    assert (result.lr, result.halvings) == (0.1, 0)
    train(free, digits, dataclasses.replace(recipe, halvings=0), precision=FLOAT32)
    assert same(weights(guarded), weights(free))


@pytest.fixture(scope="module")
def undisturbed(
    digits: ImageData, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, Tensor], TrainingResult, list[bytes | None]]:
    """What a training that nobody kills ends with, and the state file that each moment finds."""
    network, path = plain_network(), tmp_path_factory.mktemp("undisturbed") / "state.safetensors"
    files: list[bytes | None] = []

    def keep(_: TrainingProgress) -> None:
        files.append(path.read_bytes() if path.exists() else None)

    result = train(network, digits, TOO_FAST, precision=FLOAT32, state_file=path, on_step=keep)
    return weights(network), result, files


@pytest.mark.parametrize(
    "moment",
    [  # before and after the restarts that are still to come, and after the last one
        *(3, 8, 9),
        *(pytest.param(moment, marks=pytest.mark.slow) for moment in (4, 5, 6, 10, 13)),
    ],
)
def test_a_run_killed_around_its_restarts_goes_on_to_the_undisturbed_result(
    digits: ImageData,
    undisturbed: tuple[dict[str, Tensor], TrainingResult, list[bytes | None]],
    tmp_path: Path,
    moment: int,
) -> None:
    expected, result, files = undisturbed
    assert files[:2] == [None, None]  # in the first epoch
    path, found = tmp_path / "state.safetensors", files[moment - 1]
    assert found is not None
    path.write_bytes(found)
    resumed = plain_network(5)  # the file holds everything: other first weights do not matter
    again = train(resumed, digits, TOO_FAST, precision=FLOAT32, state_file=path, resume=True)
    assert same(weights(resumed), expected)
    assert without_time(again.history) == without_time(result.history)
    assert (again.lr, again.halvings) == (result.lr, result.halvings)


def test_a_state_remembers_whether_anything_was_learned(tmp_path: Path) -> None:
    state = TrainingState(plain_network(), TOO_FAST, {})
    state.learned = True
    state.save(path := tmp_path / "state.safetensors")
    restored = TrainingState(plain_network(5), TOO_FAST, {})
    restored.restore(path)
    assert restored.learned


def test_a_state_without_halvings_keeps_no_first_weights(digits: ImageData, tmp_path: Path) -> None:
    sizes = []
    for halvings in (0, 1):
        state = TrainingState(plain_network(), dataclasses.replace(TOO_FAST, halvings=halvings), {})
        state.save(path := tmp_path / f"{halvings}.safetensors")
        sizes.append(path.stat().st_size)
    assert sizes[1] > sizes[0]
