"""How accuracy falls as weights are removed: learned masks, simple criteria and small networks from scratch.

    RANKRL_DATA=DIR python scripts/pruning_curves.py --dataset cifar10 [--epochs 10 --images 10000 ...]

A network (conv4, or the longer and wider conv6 on CIFAR-100) is trained, then pruned to several shares of
its weights and fine-tuned. `reconstruction` solves for the weights that stay, other criteria only cut. All
curves see equally many epochs: masks learn for --mask-epochs and are fine-tuned for --finetune-epochs,
criteria are fine-tuned for both, the small networks (the widths that group LASSO chose) are trained for all
three, and so are the dense networks of the band. Every point is written to a CSV file when it is done; the
same command goes on where it was stopped and draws the plot at the end. --epochs, --images and so on shorten
the schedule; the plot says so.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import hashlib
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from bench_frame import ResultRows
from matplotlib.figure import Figure
from torch import Tensor, nn

from decomposition import CompressionPlan, build_structure, count_parameters
from decomposition.progress import progress_bar
from pruning import untrained_copy
from rankrl.data import ImageData, batches, load_dataset
from rankrl.data.sample import calibration_images
from rankrl.device import inference_precision, select_device
from rankrl.errors import counted
from rankrl.files import atomic_path
from rankrl.models import create_model, load_checkpoint, save_checkpoint
from rankrl.pruners.options import pruning_options
from rankrl.pruners.prune import prune_network
from rankrl.report.figures import percent_axis
from rankrl.training import report_accuracy

LEARNED = ("group_lasso", "hard_concrete")
CRITERIA = ("first_k", "magnitude", "reconstruction")
LABELS = {
    "group_lasso": "group LASSO",
    "hard_concrete": "hard-concrete L0",
    "first_k": "first k",
    "magnitude": "L1 magnitude",
    "reconstruction": "reconstruction",
    "from_scratch": "small from scratch",
}
SETTINGS = (
    "dataset",
    "network",
    "images",
    "epochs",
    "mask_epochs",
    "finetune_epochs",
    "batch_size",
    "lr",
    "l1",
    "l2",
)
VALUES = ("removed", "params", "accuracy", "seconds")
LEAST_REMOVED, MOST_REMOVED = 0.2, 0.95


class Conv6(nn.Module):
    """Three pairs of 3x3 convolutions (64, 128 and 256 wide), dropout 0.5, and two dense layers.

    Conv-6 of Frankle & Carbin 2019, figure 2, with a dense layer twice as wide.
    """

    def __init__(self, input_shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        channels, height, width = input_shape
        layers: list[nn.Module] = []
        for wide in (64, 128, 256):
            layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.ReLU()]
            layers += [nn.Conv2d(wide, wide, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
            channels = wide
        self.features = nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.5))
        self.head = nn.Sequential(
            nn.Linear(256 * (height // 8) * (width // 8), 512), nn.ReLU(), nn.Linear(512, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, C, H, W) to class scores (N, classes)."""
        return self.head(self.features(x))


class Curves:
    """Measure the points of one dataset and network, once, and keep them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = select_device()
        data = load_dataset(arguments.dataset, seed=0)
        if arguments.images is not None:
            order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
            data = dataclasses.replace(data, train=data.train.subset(order[: arguments.images]))
        self.calibration = calibration_images(data, min(512, len(data.train)), seed=0)
        self.data = dataclasses.replace(
            data, train=data.train.to(self.device), heldout=data.heldout.to(self.device)
        )
        self.settings = {name: getattr(arguments, name) for name in SETTINGS} | {"images": len(data.train)}
        text = repr(sorted(self.settings.items())).encode()
        self.state = arguments.output_folder / "pruning_curves_state" / hashlib.sha256(text).hexdigest()[:12]
        self.state.mkdir(parents=True, exist_ok=True)
        name = f"pruning_curves_{arguments.dataset}"
        self.picture = arguments.pictures / f"{name}.png"
        key = (*SETTINGS, "method", "target", "seed")
        self.rows = ResultRows(arguments.output_folder / f"{name}.csv", key, VALUES)

    def run(self) -> None:
        arguments = self.arguments
        longer = arguments.mask_epochs + arguments.finetune_epochs
        for seed in range(arguments.seed, arguments.seed + arguments.dense_seeds):
            if self._missing("dense", 0.0, seed):
                started = time.perf_counter()
                self._measured("dense", 0.0, seed, self._dense(seed), started)
            if self._missing("dense_longer", 0.0, seed):
                started, network = time.perf_counter(), self._dense(seed)
                self._fit("dense, longer", network, longer, seed + 1)
                self._measured("dense_longer", 0.0, seed, network, started)
        for removed in np.linspace(LEAST_REMOVED, MOST_REMOVED, arguments.points).round(3).tolist():
            for method in (*LEARNED, *CRITERIA, "from_scratch"):
                if self._missing(method, removed, arguments.seed):
                    started = time.perf_counter()
                    network = self._point(method, removed, arguments.seed)
                    self._measured(method, removed, arguments.seed, network, started)
        self._draw()

    def _point(self, method: str, removed: float, seed: int) -> nn.Module:
        arguments = self.arguments
        longer = arguments.mask_epochs + arguments.finetune_epochs
        plan_file = self.state / f"group_lasso-{removed}-seed{seed}.json"
        if method == "from_scratch":
            widths = build_structure(self._network(seed), CompressionPlan.load(plan_file))
            network = untrained_copy(widths, seed + 1)
            self._initialise(network, seed + 1)
            self._fit(f"{method} {removed:.0%}", network, arguments.epochs + longer, seed)
            return network
        own = {}
        if method in LEARNED:
            own = {
                "epochs": arguments.mask_epochs,
                "batch_size": arguments.batch_size,
                "lr": arguments.lr,
                "rewind": False,
            }
        options = pruning_options(method, own, params=1 - removed, macs=None, seed=seed)
        options = dataclasses.replace(
            options,
            training=dataclasses.replace(options.training, l1=arguments.l1, l2=arguments.l2),
            steps=dataclasses.replace(options.steps, augment=False),
        )
        # The simple criteria as they are known: nothing makes up for what they remove.
        options = dataclasses.replace(options, sequential=method == "reconstruction")
        dense = self._dense(seed)
        pruned = prune_network(dense, self.data, options, self.calibration)
        if method == "group_lasso":
            pruned.plan.save(plan_file)
        epochs = arguments.finetune_epochs if method in LEARNED else longer
        self._fit(f"{method} {removed:.0%}", pruned.network, epochs, seed + 1)
        return pruned.network

    def _network(self, seed: int) -> nn.Module:
        shape, classes = self.data.input_shape, self.data.classes
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if self.arguments.network == "conv4":
                return create_model("conv4", input_shape=shape, num_classes=classes)
            network = Conv6(shape, classes)
            self._initialise(network, seed)
            return network

    def _initialise(self, network: nn.Module, seed: int) -> None:
        """Give conv6 the initial variance of He et al. 2015.

        With torch's smaller one the loss hardly changes at first, and the L1 penalty, whose gradient Adam
        makes as large as any, takes all weights to zero.
        """
        if self.arguments.network == "conv4":
            return
        generator = torch.Generator().manual_seed(seed)
        for parameter in network.parameters():
            if parameter.ndim > 1:
                nn.init.kaiming_normal_(parameter, nonlinearity="relu", generator=generator)
            else:
                nn.init.zeros_(parameter)

    def _dense(self, seed: int) -> nn.Module:
        """Train the dense network of a seed, on the CPU."""
        network, path = self._network(seed), self.state / f"dense-seed{seed}.safetensors"
        if path.exists():
            load_checkpoint(network, path)
        else:
            self._fit("dense", network, self.arguments.epochs, seed)
            save_checkpoint(network, path)
        return network.eval()

    def _fit(self, title: str, network: nn.Module, epochs: int, seed: int) -> None:
        """Train in place: Adam at a constant rate, L1 and L2 on all matrices and kernels, no augmentation."""
        arguments, precision = self.arguments, inference_precision(self.device)
        network.to(self.device).to(memory_format=torch.channels_last).train()
        weights = [parameter for parameter in network.parameters() if parameter.ndim > 1]
        optimizer = torch.optim.Adam(network.parameters(), lr=arguments.lr, fused=True)
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        size = min(arguments.batch_size, len(self.data.train))
        with progress_bar(title, total=epochs * (len(self.data.train) // size)) as bar:
            for _ in range(epochs):
                for x, y in _epoch(self.data, size, generator):
                    with precision.autocast():
                        loss = F.cross_entropy(network(x), y)
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    _add_penalty_gradients(weights, arguments.l1, arguments.l2)
                    optimizer.step()
                    bar.advance()
        network.cpu().to(memory_format=torch.contiguous_format).eval()

    def _missing(self, method: str, target: float, seed: int) -> bool:
        return self.rows.find(self._key(method, target, seed)) is None

    def _key(self, method: str, target: float, seed: int) -> dict[str, object]:
        return {**self.settings, "method": method, "target": target, "seed": seed}

    def _measured(self, method: str, target: float, seed: int, network: nn.Module, started: float) -> None:
        params, whole = count_parameters(network), count_parameters(self._network(seed))
        tested = copy.deepcopy(network).to(self.device)
        accuracy = report_accuracy(tested, self.data.test, mean=self.data.mean, std=self.data.std)
        values = {"removed": round(1 - params / whole, 4), "params": params, "accuracy": accuracy}
        seconds = round(time.perf_counter() - started, 1)
        self.rows.add(self._key(method, target, seed), {**values, "seconds": seconds})
        print(
            f"{method}: {values['removed']:.1%} removed, {accuracy:.2%} on the test set, {seconds} s",
            flush=True,
        )

    def _draw(self) -> None:
        wanted = {column: str(value) for column, value in self.settings.items()}
        rows = [row for row in self.rows.rows if all(row[column] == wanted[column] for column in SETTINGS)]
        figure = Figure(figsize=(8, 5), layout="constrained")
        axes = figure.add_subplot()
        for method, label in LABELS.items():
            own = sorted(
                (float(row["removed"]), float(row["accuracy"])) for row in rows if row["method"] == method
            )
            axes.plot(*zip(*own, strict=True), "o-", markersize=4, label=label)
        dense = [float(row["accuracy"]) for row in rows if row["method"] == "dense_longer"]
        seeds = counted(len(dense), "seed")
        axes.axhspan(min(dense), max(dense), color="0.88", zorder=0, label=f"dense network, {seeds}")
        axes.axhline(float(np.mean(dense)), color="0.6", linewidth=1, zorder=1)
        for which in ("x", "y"):
            percent_axis(axes, which=which, bins=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel("share of the weights removed")
        axes.set_ylabel("test accuracy after fine-tuning")
        settings = self.settings
        axes.set_title(
            f"{settings['network']} on {settings['dataset']}, "
            f"{counted(settings['images'], 'training image')}, {counted(settings['epochs'], 'epoch')}; "
            f"then masks {settings['mask_epochs']} and "
            f"fine-tuning {counted(settings['finetune_epochs'], 'epoch')}",
            fontsize=9,
            loc="left",
        )
        axes.grid(color="0.9")
        axes.legend(frameon=False)
        with atomic_path(self.picture) as temporary:
            figure.savefig(temporary, dpi=160)
        print(f"{self.rows.path} and {self.picture}")


@torch.no_grad()
def _add_penalty_gradients(weights: Sequence[Tensor], l1: float, l2: float) -> None:
    """Add the gradient of `l1 * sum |w| + l2 * sum w^2`, without a pass of autograd over all weights."""
    for weight in weights:
        if weight.grad is not None:
            weight.grad.add_(weight.sign(), alpha=l1).add_(weight, alpha=2 * l2)


def _epoch(data: ImageData, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    return batches(
        data.train, size, mean=data.mean, std=data.std, generator=generator, shuffle=True, drop_last=True
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="cifar10", choices=("cifar10", "cifar100", "mnist", "digits"))
    parser.add_argument("--network", choices=("conv4", "conv6"), help="conv6 on CIFAR-100, else conv4")
    parser.add_argument("--epochs", type=int, default=30, help="of the dense network")
    parser.add_argument("--mask-epochs", type=int, default=15, help="in which masks learn")
    parser.add_argument("--finetune-epochs", type=int, default=30, help="after the masks are fixed")
    parser.add_argument("--images", type=int, help="training images; all if not given")
    parser.add_argument("--points", type=int, default=5, help="of each curve")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dense-seeds", type=int, default=3, help="dense networks behind the band")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.0015, help="learning rate of Adam, in all phases")
    parser.add_argument("--l1", type=float, default=0.00005)
    parser.add_argument("--l2", type=float, default=0.00025)
    parser.add_argument("--output-folder", type=Path, default=Path("scripts/results"))
    parser.add_argument("--pictures", type=Path, default=Path("docs/images"))
    options = parser.parse_args(arguments)
    options.network = options.network or ("conv6" if options.dataset == "cifar100" else "conv4")
    Curves(options).run()


if __name__ == "__main__":
    main()
