"""Networks that nobody here wrote, each from the plan to the ONNX file with eight calibration images.

    OMP_NUM_THREADS=1 python scripts/check_networks.py --rows networks.csv --output table.csv
    python scripts/check_networks.py --rows networks.csv --networks resnet18 transformer_encoder
    python scripts/check_networks.py --odd --output scripts/results/check_odd_networks.csv

Each family of torchvision's classifiers at its smallest member, some of timm's networks where timm is
installed, and a classifier with an `nn.TransformerEncoder`; or, with `--odd`, networks as people have
them (wrapped, in half precision, keeping features on themselves): random weights with batch-norm statistics
of real passes, a plan by the uniform heuristic, `apply_plan`, `save_compressed`, `load_compressed` into a new
network, `export_onnx`, `verify_onnx` on images that were not calibrated on. Each runs in a process of its
own; with `--rows` a killed run goes on where it was. The aim is right or refused, not accuracy: fits take few
iterations and the images are noise.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench_frame import ResultRows, command_line, markdown, publish, say
from torch import nn
from torch.utils._pytree import tree_leaves
from torchvision import models

from decomposition import (
    Budget,
    CompressionPlan,
    DecompositionError,
    FitLibrary,
    FitOptions,
    apply_plan,
    count_parameters,
    get_heuristic,
    inspect_layers,
    load_compressed,
    plain_weights,
    plan_from_choices,
    reestimate_batch_norm,
    save_compressed,
)
from decomposition.rewrites import rewrites_of
from rankrl.errors import ExportError
from rankrl.models import create_model
from rankrl.onnx.export import export_onnx, verify_onnx


def small() -> nn.Module:
    """Make a ResNet-20 for 10 classes."""
    network: nn.Module = create_model("resnet20", input_shape=(3, 32, 32), num_classes=10)
    return network


class Star(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(*inputs)
        return outputs


class KeepsFeatures(Star):
    """Keep the features of its last pass in a list, and in a dict that a hook fills."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.features: list[torch.Tensor] = []
        self.seen: dict[str, torch.Tensor] = {}
        inner.register_forward_hook(lambda module, inputs, output: self.seen.update(last=output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        outputs: torch.Tensor = self.inner(x)
        self.features = [outputs]
        return outputs


class Normalising(Star):
    """Normalises the images that it is given in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Compute class scores (N, 10) of images (N, 3, 32, 32)."""
        outputs: torch.Tensor = self.inner(x.sub_(0.1).div_(1.2))
        return outputs


class Detailed(Star):
    """Returns a size, a name and None besides its scores."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:  # type: ignore[override]
        """Compute class scores (N, 10) and more."""
        return {"scores": self.inner(x), "size": x.shape[-2:], "name": "net", "mask": None}


class UNet(nn.Module):
    """Two levels, skip connections by concatenation, transposed convolutions on the way up."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first, self.down = _block(3, width), _block(width, 2 * width, stride=2)
        self.bottom = _block(2 * width, 4 * width, stride=2)
        self.up = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.middle = _block(4 * width, 2 * width)
        self.last_up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last, self.head = _block(2 * width, width), nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute a map (N, 2, H, W) of images (N, 3, H, W)."""
        first = self.first(x)
        down = self.down(first)
        middle = self.middle(torch.cat([self.up(self.bottom(down)), down], 1))
        outputs: torch.Tensor = self.head(self.last(torch.cat([self.last_up(middle), first], 1)))
        return outputs


def _block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    layers = nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(4, outputs), nn.ReLU()
    return nn.Sequential(*layers)


def weight_normed() -> nn.Module:
    """Make convolutions under the old `torch.nn.utils.weight_norm`, after a pass with gradients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        normed = [
            nn.utils.weight_norm(nn.Conv2d(n, m, 3, padding=1)) for n, m in ((3, 32), (32, 48), (48, 32))
        ]
    layers = [each for conv in normed for each in (conv, nn.ReLU())]
    network = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    network(torch.zeros(1, 3, 32, 32))
    return network


def frozen() -> nn.Module:
    """Make a ResNet-20 whose first stage is frozen and whose last has a hook."""
    network = small()
    network.get_submodule("layer1").requires_grad_(False)
    network.get_submodule("layer3.0.conv1").register_forward_pre_hook(lambda module, inputs: None)
    return network


ODD: dict[str, Callable[[], nn.Module]] = {
    "float16": lambda: small().half(),
    "bfloat16": lambda: small().bfloat16(),
    "float64": lambda: small().double(),
    "data_parallel": lambda: nn.DataParallel(small()),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(small()),
    "compiled": lambda: torch.compile(small(), backend="eager"),  # type: ignore[return-value,dict-item]
    "star_arguments": lambda: Star(small()),
    "keeps_features": lambda: KeepsFeatures(small()),
    "normalises_in_place": lambda: Normalising(small()),
    "more_than_tensors": lambda: Detailed(small()),
    "unet": UNet,
    "weight_norm": weight_normed,
    "frozen": frozen,
    "segmentation": lambda: models.segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None
    ),
}
"""Networks by their names; all take images of 32x32 pixels or more."""


CALIBRATION = 8
TOLERANCE = 1e-4
OPTIONS = FitOptions(iterations=20)
_CANDIDATES = 8


@dataclass(frozen=True)
class Network:
    build: Callable[[], nn.Module]
    size: int = 64
    tensor_format: str = "cp"
    kept: float = 0.6
    sequential: bool = True


_USUAL = Network(nn.Identity)


class TransformerClassifier(nn.Module):
    """Patches of an image through an `nn.TransformerEncoder`."""

    def __init__(self, features: int = 96, layers: int = 3, classes: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, features, 8, 8)
        layer = nn.TransformerEncoderLayer(features, 4, 4 * features, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(features, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute class scores (N, classes) of images (N, 3, H, W)."""
        logits: torch.Tensor = self.head(self.encoder(self.patches(x).flatten(2).mT).mean(1))
        return logits


def _torchvision(name: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: models.get_model(name, weights=None, **options)


def _timm(name: str, **options: object) -> Callable[[], nn.Module]:
    return lambda: importlib.import_module("timm").create_model(name, pretrained=False, **options)


NETWORKS: dict[str, Network] = {
    "transformer_encoder": Network(TransformerClassifier, 32, "tucker"),
    "alexnet": Network(_torchvision("alexnet"), 64, "tucker"),
    "convnext_tiny": Network(_torchvision("convnext_tiny"), 64, "tucker"),
    "densenet121": Network(_torchvision("densenet121")),
    "efficientnet_b0": Network(_torchvision("efficientnet_b0"), 64, "tucker"),
    "efficientnet_v2_s": Network(_torchvision("efficientnet_v2_s")),
    "googlenet": Network(_torchvision("googlenet", init_weights=True)),
    "inception_v3": Network(_torchvision("inception_v3", init_weights=True), 139),
    "maxvit_t": Network(_torchvision("maxvit_t"), 224, "tucker"),
    "mnasnet0_5": Network(_torchvision("mnasnet0_5"), 64, "tucker"),
    "mobilenet_v2": Network(_torchvision("mobilenet_v2"), 64, "tensor_train"),
    "mobilenet_v3_small": Network(_torchvision("mobilenet_v3_small"), 64, "tucker"),
    "regnet_x_400mf": Network(_torchvision("regnet_x_400mf"), 64, "tensor_ring"),
    "regnet_y_400mf": Network(_torchvision("regnet_y_400mf"), 64, "tucker"),
    "resnet18": Network(_torchvision("resnet18")),
    "resnext50_32x4d": Network(_torchvision("resnext50_32x4d"), 64, "tucker"),
    "shufflenet_v2_x0_5": Network(_torchvision("shufflenet_v2_x0_5"), 64, "tucker"),
    "squeezenet1_1": Network(_torchvision("squeezenet1_1")),
    "swin_t": Network(_torchvision("swin_t"), 64, "tucker"),
    "swin_v2_t": Network(_torchvision("swin_v2_t"), 64, "tucker", sequential=False),
    "vgg11": Network(_torchvision("vgg11"), 64, "tucker"),
    "vit_b_16": Network(_torchvision("vit_b_16", image_size=64), 64, "tucker"),
    "wide_resnet50_2": Network(_torchvision("wide_resnet50_2"), 64, "tucker"),
    "timm/resnet10t": Network(_timm("resnet10t")),
    "timm/mobilenetv3_small_050": Network(_timm("mobilenetv3_small_050"), 64, "tucker", kept=0.75),
    "timm/convnext_atto": Network(_timm("convnext_atto"), 64, "tucker"),
    "timm/vit_tiny_patch16_224": Network(_timm("vit_tiny_patch16_224", img_size=64), 64, "tucker"),
}
ODD_NETWORKS = {f"odd/{name}": Network(build, 32, "tucker") for name, build in ODD.items()}
NETWORKS |= ODD_NETWORKS


@dataclass(frozen=True)
class Outcome:
    """Hold a network's outcome: costs, largest differences of its outputs, or why it was refused."""

    params: int
    kept: float = float("nan")
    seconds: float = float("nan")
    peak_mib: float = float("nan")
    loaded: float = float("nan")  # between the saved and the loaded network
    onnx: float = float("nan")  # between file and network, relative to the largest output
    refusal: str = ""


VALUES = tuple(Outcome.__dataclass_fields__)


def smooth_images(count: int, size: int, seed: int) -> torch.Tensor:
    """Make noise (count, 3, size, size) that is smooth and of a colour and contrast of its own each."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, 7, 7, generator=generator)
    contrast = 0.3 + torch.rand(count, 1, 1, 1, generator=generator)
    fine = 0.2 * torch.randn(count, 3, size, size, generator=generator)
    colour = 0.5 * torch.randn(count, 3, 1, 1, generator=generator)
    return contrast * (F.interpolate(coarse, size=size, mode="bilinear") + fine) + colour


def uniform_plan(model: nn.Module, network_entry: Network) -> CompressionPlan:
    """Make the plan of the uniform heuristic, which looks at costs alone and so needs no fits."""
    shape = (3, network_entry.size, network_entry.size)
    library = FitLibrary.calibrated(model, shape, network_entry.tensor_format, None)
    sites = [library.unfitted(name, limit=_CANDIDATES) for name in library.specs]
    budget = Budget.of_model(model, sites, shape, "params", network_entry.kept)
    choices = get_heuristic("uniform").choose(library, sites, budget)
    layers = inspect_layers(model, shape)
    return plan_from_choices(sites, choices, layers, shape, "uniform", preparation=rewrites_of(model))


def check(name: str, folder: Path) -> Outcome:
    network_entry = NETWORKS[name]
    torch.manual_seed(0)
    model = plain_weights(network_entry.build()).eval()
    for module in model.modules():  # torchvision's ViT begins with a last layer of zeros, which shows nothing
        if isinstance(module, nn.Linear) and not module.weight.any():
            module.reset_parameters()
    if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        reestimate_batch_norm(model, smooth_images(32, network_entry.size, seed=1).split(16))
    params, start = count_parameters(model), time.perf_counter()
    try:
        plan = uniform_plan(model, network_entry)
        small = apply_plan(
            model,
            plan,
            smooth_images(CALIBRATION, network_entry.size, seed=2),
            options=OPTIONS,
            sequential=network_entry.sequential,
        )
        save_compressed(small, plan, folder / "small.safetensors")
        loaded, _ = load_compressed(network_entry.build().eval(), folder / "small.safetensors")
        images = smooth_images(CALIBRATION, network_entry.size, seed=3).to(next(model.parameters()).dtype)
        with torch.no_grad():
            expected, answers = (_tensors(network(images.clone())) for network in (small, loaded))
        export_onnx(small, folder / "small.onnx", (3, network_entry.size, network_entry.size))
        # The difference itself is the result, so none is refused here.
        difference = verify_onnx(small, folder / "small.onnx", images, tolerance=float("inf"))
    except (DecompositionError, ExportError) as error:
        return Outcome(params, refusal=str(error))
    return Outcome(
        params,
        kept=count_parameters(small) / params,
        seconds=time.perf_counter() - start,
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        loaded=max(float((one - other).abs().max()) for one, other in zip(expected, answers, strict=True)),
        onnx=difference / max(1.0, *(float(each.abs().max()) for each in expected)),
    )


def _tensors(outputs: object) -> list[torch.Tensor]:
    return [each for each in tree_leaves(outputs) if isinstance(each, torch.Tensor)]


def check_apart(name: str, limit: float) -> Outcome:
    """Check a network in a process of its own, for at most `limit` seconds."""
    command = [sys.executable, __file__, "--one", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return Outcome(0, refusal=f"not finished after {limit / 60:.0f} minutes")
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return Outcome(0, refusal=f"FAILED: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return Outcome(**json.loads(done.stdout.splitlines()[-1]))


def table(rows: list[dict[str, str]]) -> str:
    lines = []
    for row in rows:
        network = NETWORKS[row["network"]]
        start = (row["network"], network.size, network.tensor_format)
        if row["refusal"]:
            lines.append((*start, row["refusal"].replace("|", "/"), *[""] * 5))
            continue
        params, kept, seconds, peak, loaded, onnx = (float(row[name]) for name in VALUES[:-1])
        shown = (f"{params:,.0f}", f"{kept:.2f}", f"{seconds:.0f}", f"{peak:,.0f}")
        lines.append((*start, *shown, f"{loaded:.0g}", f"{onnx:.1e}"))
    head = (
        "network",
        "input",
        "format",
        "parameters",
        "kept",
        "s",
        "peak MiB",
        "loaded − saved",
        "ONNX ÷ largest",
    )
    return markdown(head, lines)


def report(rows: list[dict[str, str]]) -> str:
    checked = {row["network"]: NETWORKS[row["network"]] for row in rows}
    others = [
        f"{name} keeps {network.kept:.0%}" for name, network in checked.items() if network.kept != _USUAL.kept
    ]
    others += [
        f"{name} is fitted layer by layer on its own"
        for name, network in checked.items()
        if not network.sequential
    ]
    exceptions = f" ({'; '.join(others)})" if others else ""
    intro = (
        f"Random weights, {CALIBRATION} calibration images, {_USUAL.kept:.0%} of the parameters by the "
        f"uniform heuristic, {OPTIONS.iterations} iterations a fit, layers refitted in sequence{exceptions}. "
        f"Compared with PyTorch on {CALIBRATION} other images; at most {TOLERANCE:.0e} of the largest output "
        "is accepted."
    )
    return f"{intro}\n\n{table(rows)}"


def main() -> None:
    """Check all networks, or those that were named, and print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--networks", nargs="+", choices=sorted(NETWORKS), help="all others when omitted")
    parser.add_argument("--odd", action="store_true", help="wrapped networks, and those of other types")
    parser.add_argument("--rows", type=Path, help="CSV file of finished networks, which a later run reuses")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds for each network")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.one:
            print(json.dumps(asdict(check(options.one, Path(folder)))))
            return
        path = options.rows or Path(folder) / "networks.csv"
        rows = ResultRows(path, ["network"], VALUES)
        others = [name for name in NETWORKS if name not in ODD_NETWORKS]
        for name in options.networks or (ODD_NETWORKS if options.odd else others):
            if name.startswith("timm/") and find_spec("timm") is None:
                say(f"{name}: left out, timm is not installed")
                continue
            if rows.find({"network": name}) is None:
                say(f"{name} ...")
                rows.add({"network": name}, asdict(check_apart(name, options.limit)))
        section, title = (
            ("check_odd_networks", "Networks as people have them")
            if options.odd
            else ("check_networks", "Networks of others")
        )
        publish(report(rows.rows), options.output, section=section, title=title, dropped=["--rows"])


if __name__ == "__main__":
    main()
