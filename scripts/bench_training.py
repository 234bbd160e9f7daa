"""Images a second of the whole training loop and of a bare step on one batch, in turns.

    RANKRL_DATA=data python scripts/bench_training.py --output scripts/results/bench_training.csv

Both train the same network with the same optimizer. The bare step goes forward, backward and steps on a batch
that is there already, in the loop's precision and memory format. The loop also draws, crops, flips and
normalises its batches, watches the loss, follows its schedule, scores held-out images after every epoch and
writes its state. Ratios are medians over the turns.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_frame import command_line, in_turns, markdown, median_ratio, publish, say, seconds_of, zoo_network
from torch import nn

from rankrl.data import ImageData, batches, load_dataset
from rankrl.device import Precision, inference_precision
from rankrl.errors import counted
from rankrl.training import TrainingRecipe, train
from rankrl.training.recipe import build_optimizer

HELDOUT = 500
_WARM_UP = 3


def loop_speed(name: str, data: ImageData, recipe: TrainingRecipe, precision: Precision) -> float:
    """Measure the images a second of `train`, with everything it does."""
    model = zoo_network(name, data)
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder) / "state.safetensors"
        seconds = seconds_of(lambda: train(model, data, recipe, precision=precision, state_file=state))
    return recipe.epochs * (len(data.train) // recipe.batch_size) * recipe.batch_size / seconds


def bare_speed(name: str, data: ImageData, recipe: TrainingRecipe, precision: Precision) -> float:
    """Measure the images a second of forward, backward and step on one batch that is there already."""
    step = _bare_step(zoo_network(name, data), data, recipe, precision)
    seconds_of(step, _WARM_UP)
    steps = recipe.epochs * (len(data.train) // recipe.batch_size)
    return recipe.batch_size / seconds_of(step, steps, precision.device)


def _bare_step(
    model: nn.Module, data: ImageData, recipe: TrainingRecipe, precision: Precision
) -> Callable[[], None]:
    model = model.to(precision.device).to(memory_format=torch.channels_last).train()
    optimizer = build_optimizer(model, recipe)
    x, y = next(iter(batches(data.train, recipe.batch_size, mean=data.mean, std=data.std)))
    x, y = x.to(precision.device), y.to(precision.device)

    def step() -> None:
        with precision.autocast():
            loss = F.cross_entropy(model(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def report(options: argparse.Namespace) -> str:
    """Run both sides in turns and return the table as Markdown."""
    data = load_dataset("cifar10", heldout=HELDOUT, train_images=options.images)
    fastest = inference_precision()
    dtypes = dict.fromkeys((fastest.dtype, torch.float32))
    rows = []
    for name, optimizer, dtype in product(options.models, options.optimizers, dtypes):
        say(f"{name}, {optimizer}, {dtype}")
        precision = Precision(fastest.device, dtype)
        recipe = TrainingRecipe(epochs=options.epochs, batch_size=options.batch_size, optimizer=optimizer)
        sides = {
            side.__name__: partial(side, name, data, recipe, precision) for side in (loop_speed, bare_speed)
        }
        loop, bare = in_turns(sides, options.turns).values()
        medians = [f"{statistics.median(side):.0f}" for side in (loop, bare)]
        shown = str(dtype).removeprefix("torch.")
        rows.append((name, optimizer, shown, *medians, f"{median_ratio(loop, bare):.2f}"))
    head = ("model", "optimizer", "precision", "loop, images/s", "bare step, images/s", "loop ÷ bare")
    return (
        f"{options.images} training images, {HELDOUT} held out, {counted(options.epochs, 'epoch')}, batch "
        f"{options.batch_size}; medians of {options.turns} turns.\n\n{markdown(head, rows, left=range(3))}"
    )


def main() -> None:
    """Run both sides, print and perhaps save the table."""
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet20"])
    parser.add_argument("--optimizers", nargs="+", default=["onnx_adam", "sgd"])
    parser.add_argument("--images", type=int, default=10_240, help="training images (default 10240)")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    if min(options.images, options.epochs, options.batch_size, options.turns) < 1:
        parser.error("--images, --epochs, --batch-size and --turns must be at least 1")
    publish(report(options), options.output, section="bench_training", title="Training loop")


if __name__ == "__main__":
    main()
