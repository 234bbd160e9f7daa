"""Images a second of the whole training loop, of a bare step on one batch and of a plain loop in PyTorch.

    RANKRL_DATA=data python scripts/bench_training.py --output scripts/results/bench_training.csv

All train the same network with the same optimizer. The bare step goes forward, backward and steps on a batch
that is there already, in the loop's precision and memory format. The loop also draws, crops, flips and
normalises its batches, watches the loss, follows its schedule, scores held-out images after every epoch and
writes its state. The plain loop is what a tutorial shows: torchvision's transforms of one image at a time, a
DataLoader with worker processes, float32. They run in turns; ratios are medians over the turns.

`--part factorised` compares two ways to train factorised layers instead: always in stages, and as they do it,
contracted to a dense weight where what passes between the stages takes longer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2 as transforms

from decomposition import build_structure, factorised_layers, list_formats, make_plan
from decomposition.formats.layers import StagedLayer
from rankrl.data import ImageData, batches, load_dataset
from rankrl.device import Precision, inference_precision
from rankrl.errors import counted
from rankrl.models import create_model
from rankrl.report.run_folder import hardware_line, shown_command, write_section
from rankrl.training import TrainingRecipe, train
from rankrl.training.recipe import build_optimizer

HELDOUT = 500
LOADER_WORKERS = 2
_FACTORISED_STEPS = 9


def loop_speed(name: str, data: ImageData, recipe: TrainingRecipe, precision: Precision) -> float:
    """Return the images a second of `train`, with everything it does."""
    model = create_model(name, input_shape=data.input_shape, num_classes=data.classes)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        train(model, data, recipe, precision=precision, state_file=Path(folder) / "state.safetensors")
        seconds = time.perf_counter() - start
    steps = len(data.train) // recipe.batch_size
    return recipe.epochs * steps * recipe.batch_size / seconds


def bare_step(
    model: nn.Module, data: ImageData, recipe: TrainingRecipe, precision: Precision
) -> Callable[[], None]:
    """Return what goes forward, backward and steps on one batch that is there already."""
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


def factorised_speeds(
    name: str, data: ImageData, recipe: TrainingRecipe, precision: Precision, tensor_format: str, rank: int
) -> tuple[int, int, float, float]:
    """Return how many layers train contracted and of how many, and images a second in stages and so."""
    dense = create_model(name, input_shape=data.input_shape, num_classes=data.classes)
    model = build_structure(dense, make_plan(dense, data.input_shape, tensor_format, rank))
    layers = list(factorised_layers(model).values())
    for layer in layers:
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.1)
    step = bare_step(model, data, recipe, precision)
    contracted = [isinstance(layer, StagedLayer) and layer.trains_contracted for layer in layers]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_FACTORISED_STEPS):
        for as_trained, times in seconds.items():
            for layer in layers:
                layer.rounds_between = not as_trained  # which keeps it in stages
            step()  # what the other form left in the caches is gone
            _wait(precision)
            start = time.perf_counter()
            step()
            _wait(precision)
            times.append(time.perf_counter() - start)
    staged, trained = (recipe.batch_size / statistics.median(seconds[each]) for each in (False, True))
    return sum(contracted), len(layers), staged, trained


def bare_speed(name: str, data: ImageData, recipe: TrainingRecipe, precision: Precision) -> float:
    """Return the images a second of forward, backward and step on one batch that is there already."""
    model = create_model(name, input_shape=data.input_shape, num_classes=data.classes)
    step = bare_step(model, data, recipe, precision)
    for _ in range(3):
        step()
    steps = recipe.epochs * (len(data.train) // recipe.batch_size)
    _wait(precision)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(precision)
    return steps * recipe.batch_size / (time.perf_counter() - start)


class _Transformed(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The training images, each cropped, flipped and normalised when it is asked for."""

    def __init__(self, data: ImageData) -> None:
        self.images = data.train
        self.transform = transforms.Compose(
            [
                transforms.RandomCrop(data.input_shape[-1], padding=4),
                transforms.RandomHorizontalFlip(),
                transforms.ToDtype(torch.float32, scale=True),
                transforms.Normalize(data.mean, data.std),
            ]
        )

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.transform(self.images.x[index]), self.images.y[index]


def plain_speed(name: str, data: ImageData, recipe: TrainingRecipe, device: torch.device) -> float:
    """Return the images a second of a plain loop with a DataLoader."""
    model = create_model(name, input_shape=data.input_shape, num_classes=data.classes).to(device).train()
    optimizer = build_optimizer(model, recipe)
    loader = DataLoader(
        _Transformed(data), recipe.batch_size, shuffle=True, drop_last=True, num_workers=LOADER_WORKERS
    )
    start = time.perf_counter()
    for _ in range(recipe.epochs):
        for x, y in loader:
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return recipe.epochs * len(loader) * recipe.batch_size / (time.perf_counter() - start)


def _wait(precision: Precision) -> None:
    if precision.device.type == "cuda":
        torch.cuda.synchronize()


def report(options: argparse.Namespace) -> str:
    """Run all sides in turns and return the table as Markdown."""
    data = load_dataset("cifar10", heldout=HELDOUT, train_images=options.images)
    fastest = inference_precision()
    lines = [
        f"{options.images} training images, {HELDOUT} held out, {counted(options.epochs, 'epoch')}, batch "
        f"{options.batch_size}; medians of {options.turns} turns.",
        "",
        "| model | optimizer | precision | loop, images/s | bare step, images/s | loop ÷ bare "
        "| plain loop, float32, images/s | loop ÷ plain |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for name in options.models:
        for optimizer in options.optimizers:
            for dtype in dict.fromkeys((fastest.dtype, torch.float32)):
                precision = Precision(fastest.device, dtype)
                recipe = TrainingRecipe(
                    epochs=options.epochs, batch_size=options.batch_size, optimizer=optimizer
                )
                loops, bares, plains = [], [], []
                for turn in range(options.turns):
                    print(f"{name}, {optimizer}, {dtype}, turn {turn + 1}", file=sys.stderr, flush=True)
                    loops.append(loop_speed(name, data, recipe, precision))
                    bares.append(bare_speed(name, data, recipe, precision))
                    plains.append(plain_speed(name, data, recipe, precision.device))
                to_bare, to_plain = (
                    statistics.median(a / b for a, b in zip(loops, others, strict=True))
                    for others in (bares, plains)
                )
                loop, bare, plain = map(statistics.median, (loops, bares, plains))
                lines.append(
                    f"| {name} | {optimizer} | {str(dtype).removeprefix('torch.')} | {loop:.0f} | {bare:.0f} "
                    f"| {to_bare:.2f} | {plain:.0f} | {to_plain:.2f} |"
                )
    return "\n".join(lines)


def factorised_report(options: argparse.Namespace) -> str:
    """Compare both ways to train factorised layers and return the table as Markdown."""
    data = load_dataset("cifar10", heldout=HELDOUT, train_images=options.images)
    lines = [
        f"A bare step with factorised layers, {inference_precision().dtype}".replace("torch.", "")
        + f", medians of {_FACTORISED_STEPS} steps in turns.",
        "",
        "| model | format, rank | layers contracted | in stages, images/s | as trained, images/s | ratio |",
        "|---|---|---:|---:|---:|---:|",
    ]
    recipe = TrainingRecipe(epochs=1, batch_size=options.batch_size, optimizer=options.optimizers[0])
    for name, (tensor_format, rank) in product(options.models, options.factorised):
        print(f"{name}, {tensor_format}, {rank}", file=sys.stderr, flush=True)
        contracted, count, staged, trained = factorised_speeds(
            name, data, recipe, inference_precision(), tensor_format, rank
        )
        lines.append(
            f"| {name} | {tensor_format}, {rank} | {contracted} of {count} | {staged:.0f} | {trained:.0f} "
            f"| {trained / staged:.2f} |"
        )
    return "\n".join(lines)


def _format_and_rank(text: str) -> tuple[str, int]:
    name, _, rank = text.partition(":")
    if name not in list_formats() or not rank.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no FORMAT:RANK; the formats are {', '.join(list_formats())}"
        )
    return name, int(rank)


PARTS = {
    "loop": ("bench_training", "Training loop", report),
    "factorised": ("bench_training_factorised", "Training factorised layers", factorised_report),
}


def main() -> None:
    """Read the command line, run, print and perhaps save the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", default=["resnet20"])
    parser.add_argument("--optimizers", nargs="+", default=["onnx_adam", "sgd"])
    parser.add_argument("--images", type=int, default=10_240, help="training images (default 10240)")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument(
        "--factorised",
        nargs="*",
        type=_format_and_rank,
        metavar="FORMAT:RANK",
        default=[("cp", 16), ("cp", 32), ("tucker", 12)],
        help="what layers are factorised to (default cp:16 cp:32 tucker:12)",
    )
    parser.add_argument("--part", choices=PARTS, default="loop", help="which table (default loop)")
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced, or CSV file")
    options = parser.parse_args()
    if min(options.images, options.epochs, options.batch_size, options.turns) < 1:
        parser.error("--images, --epochs, --batch-size and --turns must be at least 1")
    section, title, part = PARTS[options.part]
    text = f"`{shown_command(sys.argv)}`\n\n{hardware_line()}\n\n{part(options)}"
    print(text)
    if options.output:
        write_section(options.output, section, title, text)


if __name__ == "__main__":
    main()
