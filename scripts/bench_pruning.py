"""Every pruner at the same share of the multiply-accumulates, against Torch-Pruning's.

    RANKRL_DATA=DIR python scripts/bench_pruning.py --checkpoints DIR [--models resnet20 resnet56]

Each pruner takes the published CIFAR-10 checkpoint down to --macs of its multiply-accumulates. All see
equally many epochs: what learns (masks, and the sparse training of Torch-Pruning's group-norm pruner) does so
for --mask-epochs and is fine-tuned for --finetune-epochs, what only computes is fine-tuned for both, with the
same recipe and the dense network as teacher. Torch-Pruning needs 1x1 convolutions as shortcuts (option B),
because the widths of the checkpoints' zero padding (option A) are constants to it: it gets the same network
with shortcuts that compute the zero padding exactly at the start, and so do the pruners of --option-b, for
comparison. Masks keep what they have learned, or go back to the dense weights and solve for those that stay
(--rewound). The target is the same number of
multiply-accumulates for both forms. The latency is that of the ONNX file in onnxruntime on one thread, 64
images a batch, timed in turns with the dense network's. Every result is written to a CSV file at once, and
the same command goes on where it was stopped; a Markdown table is printed at the end.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from bench_frame import ResultRows, markdown, zoo_network
from torch import nn

from decomposition import count_macs, count_parameters, reestimate_batch_norm
from decomposition.progress import progress_bar
from pruning import get_pruner, list_pruners
from rankrl.data import batches, load_dataset
from rankrl.data.sample import calibration_images
from rankrl.device import channel_block, inference_precision, select_device
from rankrl.models.zoo import BasicBlock, ZeroPadShortcut
from rankrl.onnx.export import export_onnx
from rankrl.pruners.options import pruning_options
from rankrl.pruners.prune import prune_network
from rankrl.timing import compare_latency
from rankrl.training import TrainingRecipe, report_accuracy, train

SPARSE_LR, REGULARISATION, PRUNING_STEPS = 0.01, 5e-4, 400
MULTIPLE = 8
SETTINGS = ("dataset", "images", "macs", "mask_epochs", "finetune_epochs", "lr", "seed")
VALUES = ("params", "kept_params", "kept_macs", "latency", "dense", "pruned", "finetuned", "seconds")
Prune = Callable[[nn.Module], nn.Module]


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = select_device()
        data = load_dataset(arguments.dataset, seed=arguments.seed)
        if arguments.images is not None:
            order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
            data = dataclasses.replace(data, train=data.train.subset(order[: arguments.images]))
        self.data = data
        self.calibration = calibration_images(data, min(768, len(data.train)), seed=arguments.seed)
        self.settings = {name: getattr(arguments, name) for name in SETTINGS} | {"images": len(data.train)}
        self.rows = ResultRows(arguments.output, ("model", "shortcut", "pruner", *SETTINGS), VALUES)

    def run(self) -> None:
        """Measure what is missing and print all rows of these settings."""
        for model in self.arguments.models:
            dense = self._dense(model)
            target = self.arguments.macs * count_macs(dense, self.data.input_shape)
            for name in self.arguments.pruners:
                self._measure(model, "A", name, dense, self._own(name, target))
            for name in self.arguments.rewound:
                self._measure(model, "A", f"{name}, rewound", dense, self._own(name, target, rewind=True))
            for name in self.arguments.multiples:
                label = f"{name}, multiples of {MULTIPLE}"
                self._measure(model, "A", label, dense, self._own(name, target, multiple=MULTIPLE))
            if not self.arguments.option_b and self.arguments.skip_torch_pruning:
                continue
            projected = with_projections(dense, self.calibration)
            for name in self.arguments.option_b:
                self._measure(model, "B", name, projected, self._own(name, target))
            if not self.arguments.skip_torch_pruning:
                for name, sparse in (("Torch-Pruning magnitude", False), ("Torch-Pruning group norm", True)):
                    self._measure(model, "B", name, projected, self._rival(target, sparse=sparse))
        self._print()

    def _dense(self, model: str) -> nn.Module:
        folder, name = self.arguments.checkpoints, f"{self.arguments.dataset}-{model}.th"
        return zoo_network(model, self.data, folder and folder / name)

    def _measure(self, model: str, shortcut: str, name: str, dense: nn.Module, prune: Prune) -> None:
        key = {"model": model, "shortcut": shortcut, "pruner": name, **self.settings}
        if self.rows.find(key) is not None:
            return
        started = time.perf_counter()
        network = prune(dense).cpu().eval()
        pruned = self._accuracy(network)
        learned = name == "Torch-Pruning group norm" or _is_mask(name.removesuffix(", rewound"))
        epochs = self.arguments.finetune_epochs + (0 if learned else self.arguments.mask_epochs)
        self._finetune(network, dense, epochs)
        original = self._dense(model)
        shape = self.data.input_shape
        values = {
            "params": count_parameters(network),
            "kept_params": round(count_parameters(network) / count_parameters(original), 4),
            "kept_macs": round(count_macs(network, shape) / count_macs(original, shape), 4),
            "latency": round(self._latency(original, network), 3),
            "dense": self._accuracy(dense),
            "pruned": pruned,
            "finetuned": self._accuracy(network),
            "seconds": round(time.perf_counter() - started),
        }
        self.rows.add(key, values)
        print(f"{model} {shortcut} {name}: {values['finetuned']:.2%}", flush=True)

    def _own(self, name: str, target: float, *, rewind: bool = False, multiple: int = 1) -> Prune:
        """Make one of our pruners, to a number of multiply-accumulates."""

        def prune(dense: nn.Module) -> nn.Module:
            own: dict[str, object] = {}
            if multiple > 1:
                own = {"multiple": multiple}
            if _is_mask(name):
                own = {"epochs": self.arguments.mask_epochs, "rewind": rewind}
            kept = target / count_macs(dense, self.data.input_shape)
            options = pruning_options(name, own, params=None, macs=kept, seed=self.arguments.seed)
            return prune_network(dense, self.data, options, self.calibration).network

        return prune

    def _rival(self, target: float, *, sparse: bool) -> Prune:
        """Make a pruner of Torch-Pruning, to a number of multiply-accumulates."""
        import torch_pruning

        def prune(dense: nn.Module) -> nn.Module:
            network = copy.deepcopy(dense).to(self.device)
            images = self.calibration[:2].to(self.device)
            common = {
                "global_pruning": sparse,
                "pruning_ratio": 1.0,
                "iterative_steps": PRUNING_STEPS,
                "ignored_layers": [network.linear],
            }
            pruner: torch_pruning.BasePruner
            if sparse:
                importance = torch_pruning.importance.GroupMagnitudeImportance(normalizer="max")
                pruner = torch_pruning.GroupNormPruner(
                    network, images, importance, reg=REGULARISATION, **common
                )
                self._train_sparsely(network, pruner)
            else:
                importance = torch_pruning.importance.MagnitudeImportance(p=1)
                pruner = torch_pruning.BasePruner(network, images, importance, **common)
            for _ in range(PRUNING_STEPS):
                if count_macs(network, self.data.input_shape) <= target:
                    break
                pruner.step()
            count, seed = len(self.calibration), self.arguments.seed
            normal = calibration_images(self.data, count, seed=seed, augmented=True)
            reestimate_batch_norm(network, normal.to(self.device).split(256))
            return network

        return prune

    def _train_sparsely(self, network: nn.Module, pruner: object) -> None:
        """Train with Torch-Pruning's group regularisation, as its CIFAR example does."""
        arguments, data = self.arguments, self.data
        optimizer = torch.optim.SGD(network.parameters(), lr=SPARSE_LR, momentum=0.9)
        generator = torch.Generator().manual_seed(arguments.seed)
        precision = inference_precision(self.device)
        size = min(128, len(data.train))
        with progress_bar("sparse training", total=arguments.mask_epochs * (len(data.train) // size)) as bar:
            for _ in range(arguments.mask_epochs):
                network.train()
                pruner.update_regularizer()  # type: ignore[attr-defined]
                for x, y in batches(
                    data.train,
                    size,
                    mean=data.mean,
                    std=data.std,
                    device=self.device,
                    augmentation=data.augmentation,
                    generator=generator,
                    shuffle=True,
                    drop_last=True,
                ):
                    with precision.autocast():
                        loss = F.cross_entropy(network(x), y)
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    pruner.regularize(network)  # type: ignore[attr-defined]
                    optimizer.step()
                    bar.advance()
        network.eval()

    def _finetune(self, network: nn.Module, teacher: nn.Module, epochs: int) -> None:
        recipe = TrainingRecipe(
            epochs=epochs,
            lr=self.arguments.lr,
            optimizer="sgd",
            optimizer_options={"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
            distillation=0.9,
            seed=self.arguments.seed,
        )
        teacher = copy.deepcopy(teacher)
        with progress_bar("fine-tune", total=epochs * max(1, len(self.data.train) // 128)) as bar:
            train(
                network,
                self.data,
                recipe,
                teacher=teacher,
                on_step=lambda progress: bar.update(progress.step, best=progress.best_accuracy),
            )
        network.cpu()

    def _accuracy(self, network: nn.Module) -> float:
        tested = copy.deepcopy(network).to(self.device)
        return report_accuracy(tested, self.data.test, mean=self.data.mean, std=self.data.std)

    def _latency(self, dense: nn.Module, network: nn.Module) -> float:
        """Time a network's ONNX file on one thread, as a share of the dense network's."""
        with TemporaryDirectory() as folder:
            files = [Path(folder) / f"{name}.onnx" for name in ("dense", "network")]
            for file, each in zip(files, (dense, network), strict=True):
                export_onnx(each, file, self.data.input_shape, channel_block=channel_block())
            compared = compare_latency(*files)
        return 1 / compared.ratio

    def _print(self) -> None:
        wanted = {column: str(value) for column, value in self.settings.items()}
        settings = self.settings
        print(
            f"\n{settings['dataset']}, {settings['images']} training images, "
            f"{settings['macs']:.0%} of the MACs, "
            f"{settings['mask_epochs']} + {settings['finetune_epochs']} epochs, seed {settings['seed']}, "
            f"{self.device.type}\n"
        )
        lines = []
        for row in self.rows.rows:
            if all(row[column] == wanted[column] for column in SETTINGS):
                names = ("kept_macs", "kept_params", "latency")
                dense, pruned, tuned = (float(row[name]) for name in ("dense", "pruned", "finetuned"))
                lines.append(
                    (
                        *(row[name] for name in ("model", "shortcut", "pruner")),
                        *(f"{float(row[name]):.1%}" for name in names),
                        *(f"{each:.2%}" for each in (dense, pruned, tuned)),
                        f"{100 * (tuned - dense):+.2f}",
                    )
                )
        head = ("model", "shortcuts", "pruner", "MACs kept", "parameters kept", "latency", "dense", "pruned")
        print(markdown((*head, "fine-tuned", "change"), lines, left=range(3)))


def with_projections(network: nn.Module, calibration: torch.Tensor) -> nn.Module:
    """Copy an option-A ResNet so that its shortcuts are 1x1 convolutions that compute the same.

    Each picks the channels that the padding kept. The batch norm behind it has the statistics that the
    shortcut really sees and undoes itself, so that training mode starts from the same function too.
    """
    projected = copy.deepcopy(network)
    statistics = _shortcut_statistics(projected, calibration)
    for name, block in list(projected.named_modules()):
        if isinstance(block, BasicBlock) and isinstance(block.shortcut, ZeroPadShortcut):
            pad = block.shortcut
            width = block.conv1.in_channels
            convolution = nn.Conv2d(width, block.conv2.out_channels, 1, stride=pad.stride, bias=False)
            norm = nn.BatchNorm2d(block.conv2.out_channels)
            mean, variance = statistics[name]
            with torch.no_grad():
                convolution.weight.zero_()
                convolution.weight[pad.before : pad.before + width, :, 0, 0] = torch.eye(width)
                norm.running_mean.copy_(mean)
                norm.running_var.copy_(variance)
                norm.weight.copy_((variance + norm.eps).sqrt())
                norm.bias.copy_(mean)
            block.shortcut = nn.Sequential(convolution, norm)
    return projected.eval()


def _shortcut_statistics(
    network: nn.Module, calibration: torch.Tensor
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Measure mean and variance of every channel that a zero-padding shortcut hands on, by block."""
    moments: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    handles = []
    for name, block in network.named_modules():
        if isinstance(block, BasicBlock) and isinstance(block.shortcut, ZeroPadShortcut):

            def watch(module: nn.Module, inputs: object, output: torch.Tensor, name: str = name) -> None:
                moments[name] = output.mean((0, 2, 3)), output.var((0, 2, 3))

            handles.append(block.shortcut.register_forward_hook(watch))
    with torch.no_grad():
        network.eval()(calibration)
    for handle in handles:
        handle.remove()
    return moments


def _is_mask(name: str) -> bool:
    return name in {pruner.name for pruner in list_pruners()} and get_pruner(name).is_mask


def main(arguments: list[str] | None = None) -> None:
    """Measure what is missing and print the table."""
    names = [pruner.name for pruner in list_pruners()]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", type=Path, help="folder of DATASET-MODEL.th; untrained without")
    parser.add_argument("--models", nargs="+", default=["resnet20", "resnet56"])
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--pruners", nargs="*", default=names, choices=names, help="on the network as it is")
    masks = [name for name in names if _is_mask(name)]
    parser.add_argument(
        "--rewound", nargs="*", default=masks, choices=masks, help="masks that go back to the dense weights"
    )
    parser.add_argument(
        "--multiples",
        nargs="*",
        default=["reconstruction"],
        choices=[name for name in names if name not in masks and get_pruner(name).unit == "channels"],
        help=f"criteria that keep channels in multiples of {MULTIPLE}",
    )
    parser.add_argument(
        "--option-b", nargs="*", default=["group_lasso", "magnitude", "reconstruction"], choices=names
    )
    parser.add_argument("--skip-torch-pruning", action="store_true")
    parser.add_argument("--macs", type=float, default=0.5, help="share to keep")
    parser.add_argument("--mask-epochs", type=int, default=20)
    parser.add_argument("--finetune-epochs", type=int, default=40)
    parser.add_argument("--lr", type=float, default=0.02, help="learning rate of fine-tuning (SGD, cosine)")
    parser.add_argument("--images", type=int, help="training images; all if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("scripts/results/bench_pruning.csv"))
    Bench(parser.parse_args(arguments)).run()


if __name__ == "__main__":
    main()
