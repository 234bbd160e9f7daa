"""Fits against tensorly's at equal ranks, and what a network keeps of its accuracy without fine-tuning.

    OMP_NUM_THREADS=1 python scripts/bench_decomposition.py --part fits --output fits.csv
    RANKRL_DATA=data python scripts/bench_decomposition.py --part accuracy --checkpoint cifar10-resnet20.th
    python scripts/bench_decomposition.py --part scale --networks convnext_tiny --formats cp

`fits` compares time and error for weights of 64x64x3x3 to 512x512x3x3, in float64 on both sides, fitted to
the weights alone since tensorly knows no data. A routine that computes one solution (SVDs, HOOI) is compared
with our algebraic start, an iterative one with a fit. `accuracy` compresses a ResNet-20 to several budgets by
greedy's ranks and measures the CIFAR-10 test set; with `--rows FILE` a killed run goes on where it was.
`scale` states time and memory of calibration, of the fits of all candidates and of applying a plan for half
of the parameters, for torchvision's networks, each in a process of its own. Their weights are random, with
singular values that fall as i^-1/2: what counts here is the size.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import tensorly
import torch
from bench_frame import ResultRows, command_line, markdown, publish, say, zoo_network
from tensorly import decomposition as tensorly_decomposition
from tensorly.tenalg import multi_mode_dot
from torch import nn

from decomposition import (
    Budget,
    CompressionPlan,
    FitLibrary,
    FitOptions,
    TensorFormat,
    WeightModes,
    apply_plan,
    contracted,
    count_parameters,
    fit_weight,
    get_format,
    inspect_layers,
    list_formats,
    plan_from_choices,
)
from decomposition.choose.heuristics import get_heuristic
from rankrl.data import ImageData, load_dataset
from rankrl.data.sample import calibration_images
from rankrl.training import report_accuracy

ALGEBRAIC = FitOptions(iterations=0)
ITERATED = FitOptions(iterations=300, starts=64)
ITERATED_LARGE = FitOptions(iterations=240)
LARGE = 256  # channels from which a fit gets fewer iterations
SLOW_SECONDS = 20.0  # routines slower than that are run once
NETWORKS = ("resnet18", "resnet50", "convnext_tiny", "vit_b_16")
FITTED = ("weights", "data", "sequential")


@dataclass(frozen=True)
class Rival:
    """A routine of tensorly: from an array (out, in, kernel), ranks and iterations to the reconstruction.

    One that does not iterate to a minimum is compared with our algebraic start.
    """

    format: str
    iterative: bool
    run: Callable[[np.ndarray, tuple[int, ...], int], np.ndarray]


def _tensor_ring(weight: np.ndarray, ranks: tuple[int, ...], _: int) -> np.ndarray:
    return tensorly.tr_to_tensor(tensorly_decomposition.tensor_ring(weight, [*ranks, ranks[0]]))


def _tensor_ring_als(weight: np.ndarray, ranks: tuple[int, ...], iterations: int) -> np.ndarray:
    rank = [*ranks, ranks[0]]
    return tensorly.tr_to_tensor(
        tensorly_decomposition.tensor_ring_als(weight, rank, n_iter_max=iterations, random_state=0)
    )


def _tensor_train(weight: np.ndarray, ranks: tuple[int, ...], _: int) -> np.ndarray:
    return tensorly.tt_to_tensor(tensorly_decomposition.tensor_train(weight, [1, *ranks, 1]))


def _partial_tucker(weight: np.ndarray, ranks: tuple[int, ...], iterations: int) -> np.ndarray:
    (core, factors), _ = tensorly_decomposition.partial_tucker(
        weight, rank=list(ranks), modes=[0, 1], n_iter_max=iterations
    )
    return multi_mode_dot(core, factors, modes=[0, 1])


def _parafac(weight: np.ndarray, ranks: tuple[int, ...], iterations: int) -> np.ndarray:
    return tensorly.cp_to_tensor(
        tensorly_decomposition.parafac(weight, ranks[0], n_iter_max=iterations, init="svd", random_state=0)
    )


RIVALS = {
    "tensor_train": Rival("tensor_train", False, _tensor_train),
    "tensor_ring": Rival("tensor_ring", False, _tensor_ring),
    "partial_tucker": Rival("tucker", False, _partial_tucker),
    "tensor_ring_als": Rival("tensor_ring", True, _tensor_ring_als),
    "parafac": Rival("cp", True, _parafac),
}


@dataclass(frozen=True)
class Duel:
    """Relative errors and median seconds of both sides at the same ranks."""

    ranks: tuple[int, ...]
    error: float
    rival_error: float
    seconds: float
    rival_seconds: float


def common_ranks(tensor_format: TensorFormat, modes: WeightModes, ratio: float) -> tuple[int, ...]:
    """Find the largest single rank that leaves 1/ratio of the parameters and that tensorly accepts.

    tensorly's tensor_ring refuses first bonds whose product exceeds the first mode.
    """
    ranks = tensor_format.expand(modes, 1)
    for rank in range(2, tensor_format.max_rank(modes) + 1):
        wider = tensor_format.expand(modes, rank)
        too_wide = tensor_format.name == "tensor_ring" and wider[0] * wider[1] > modes.out_channels
        if tensor_format.params(modes, wider) * ratio > modes.elements or too_wide:
            break
        ranks = wider
    return ranks


def timed(run: Callable[[], np.ndarray | torch.Tensor], repeats: int) -> tuple[np.ndarray, float]:
    """Measure median seconds, and return the last result, too; slow runs are not repeated."""
    seconds: list[float] = []
    while len(seconds) < repeats and not (seconds and seconds[0] > SLOW_SECONDS):
        start = time.perf_counter()
        result = run()
        seconds.append(time.perf_counter() - start)
    return np.asarray(result), statistics.median(seconds)


def duel(weight: torch.Tensor, rival: Rival, ratio: float, repeats: int, iterations: int) -> Duel:
    """Run one routine of tensorly and our fit on a weight (out, in, kernel), float64."""
    modes = WeightModes((weight.shape[0],), (weight.shape[1],), weight.shape[2])
    tensor_format = get_format(rival.format)
    ranks = common_ranks(tensor_format, modes, ratio)
    options = ALGEBRAIC
    if rival.iterative:
        options = ITERATED if max(weight.shape) < LARGE else ITERATED_LARGE
    array = weight.numpy()

    def ours() -> torch.Tensor:
        fit = fit_weight(tensor_format, weight, modes, ranks, options=options)
        return tensor_format.reconstruct(fit.cores, modes)

    def error(reconstruction: np.ndarray) -> float:
        return float(np.linalg.norm(array - reconstruction) / np.linalg.norm(array))

    ours_fitted, seconds = timed(ours, repeats)
    with tensorly.backend_context("numpy"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # parafac warns of its SVD start on kernels smaller than the rank
        theirs, rival_seconds = timed(lambda: rival.run(array, ranks, iterations), repeats)
    return Duel(ranks, error(ours_fitted), error(theirs), seconds, rival_seconds)


def synthetic_weight(channels: int, seed: int = 0) -> torch.Tensor:
    """Make a weight (channels, channels, 9) whose channel spectra fall like those of trained layers."""
    generator = torch.Generator().manual_seed(seed)

    def mix() -> torch.Tensor:
        square = torch.randn(channels, channels, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(square).Q * torch.arange(1, channels + 1, dtype=torch.float64) ** -0.5

    core = torch.randn(channels, channels, 9, generator=generator, dtype=torch.float64)
    return torch.einsum("oa,abk,ib->oik", mix(), core, mix()).contiguous()


def fits_report(options: argparse.Namespace) -> str:
    """Compare all routines on all weights, as a Markdown table."""
    rows = []
    for channels, (name, rival) in product(options.sizes, RIVALS.items()):
        weight = f"{channels}x{channels}x3x3"
        say(f"{weight}, {name} ...")
        result = duel(synthetic_weight(channels), rival, options.ratio, options.repeats, options.iterations)
        errors = f"{result.error:.4f}", f"{result.rival_error:.4f}"
        seconds = f"{result.seconds:.3g}", f"{result.rival_seconds:.3g}"
        rows.append((weight, name, ", ".join(map(str, result.ranks)), *errors, *seconds))
    sides = [f"{what}, {side}" for what in ("error", "s") for side in ("ours", "tensorly")]
    return markdown(("weight", "tensorly's routine", "ranks", *sides), rows, left=range(3))


def accuracies(
    model: nn.Module, plan: CompressionPlan, images: torch.Tensor, data: ImageData
) -> dict[str, str]:
    """Measure the test accuracy of a plan by what it is fitted to, in percent."""
    networks = (
        apply_plan(model, plan),
        apply_plan(model, plan, images, sequential=False),
        apply_plan(model, plan, images),
    )
    # Contracted, they compute the same function, faster to evaluate here.
    found = (report_accuracy(contracted(each), data.test, mean=data.mean, std=data.std) for each in networks)
    return {name: f"{100 * accuracy:.1f}" for name, accuracy in zip(FITTED, found, strict=True)}


def accuracy_report(options: argparse.Namespace) -> str:
    """Measure every format at every budget with greedy's ranks, as a Markdown table."""
    data = load_dataset("cifar10")
    model = zoo_network("resnet20", data, options.checkpoint)
    images = calibration_images(data, options.calibration, seed=0)
    layers = inspect_layers(model, data.input_shape)
    with tempfile.TemporaryDirectory() as folder:
        rows = ResultRows(options.rows or Path(folder) / "rows.csv", ("format", "ratio"), ("kept", *FITTED))
    for name in options.formats:
        missing = [each for each in options.ratios if rows.find({"format": name, "ratio": each}) is None]
        if not missing:
            continue
        say(f"{name}: fitting the candidates ...")
        library = FitLibrary.calibrated(model, data.input_shape, name, images.split(256))
        sites = library.all_candidates()
        for ratio in missing:
            say(f"{name}, {ratio:g}x ...")
            budget = Budget.of_model(model, sites, data.input_shape, "params", 1 / ratio)
            choices = get_heuristic("greedy").choose(library, sites, budget)
            plan = plan_from_choices(sites, choices, layers, data.input_shape, "greedy")
            kept = f"{budget.total / budget.spent(sites, choices):.2f}"
            found = accuracies(model, plan, images, data)
            rows.add({"format": name, "ratio": ratio}, {"kept": kept, **found})
    dense = 100 * report_accuracy(model, data.test, mean=data.mean, std=data.std)
    shown = [[row[column] for column in ("format", "kept", *FITTED)] for row in rows.rows]
    return (
        f"Test accuracy in %, dense {dense:.2f} %; {options.calibration} unlabelled training images.\n\n"
        f"{markdown(('format', 'parameters ÷', *FITTED), shown)}"
    )


def spectral_network(name: str, size: int) -> nn.Module:
    """Make a network of torchvision, random, the singular values of its weights falling as i^-1/2."""
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.get_model(name, **({"image_size": size} if name.startswith("vit") else {}))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim < 2:
                continue
            left, values, right = torch.linalg.svd(weight.flatten(1), full_matrices=False)
            falling = torch.arange(1, len(values) + 1, dtype=values.dtype).rsqrt()
            falling *= values.norm() / falling.norm()
            weight.copy_(((left * falling) @ right).reshape(weight.shape))
    return model.eval()


def scale_row(name: str, format_name: str, size: int, count: int, workers: int) -> tuple[str, ...]:
    """Time all that a network goes through, as a row of the table."""
    torch.set_num_threads(1)
    model = spectral_network(name, size)
    shape = (3, size, size)
    images = nn.functional.avg_pool2d(torch.randn(count, *shape), 3, stride=1, padding=1)
    clock = _Clock()
    library = FitLibrary.calibrated(model, shape, format_name, images.split(64))
    cells = [clock.lap()]
    sites = library.all_candidates(progress=say, workers=workers if workers > 1 else None)
    cells.append(clock.lap())
    budget = Budget.of_model(model, sites, shape, "params", 0.5)
    choices = get_heuristic("greedy").choose(library, sites, budget)
    plan = plan_from_choices(sites, choices, inspect_layers(model, shape), shape, "greedy")
    clock.lap()
    apply_plan(model, plan, images)
    cells.append(clock.lap())
    peak = _peak_mib(resource.RUSAGE_SELF) + workers * _peak_mib(resource.RUSAGE_CHILDREN)
    return name, format_name, f"{count_parameters(model) / 1e6:.1f} M", *cells, f"{peak:.0f}"


class _Clock:
    """Processor time, that of finished processes of its own included, and time on the wall since a lap."""

    def __init__(self) -> None:
        self._process, self._wall = self._now()

    @staticmethod
    def _now() -> tuple[float, float]:
        spent = os.times()
        return spent.user + spent.system + spent.children_user + spent.children_system, time.perf_counter()

    def lap(self) -> str:
        process, wall = self._now()
        text = f"{process - self._process:.0f} ({wall - self._wall:.0f})"
        self._process, self._wall = process, wall
        return text


def _peak_mib(who: int) -> float:
    """Read the largest resident size of this process, or of one that it started, so far."""
    return resource.getrusage(who).ru_maxrss / 1024


def scale_report(options: argparse.Namespace) -> str:
    """Time whole networks of torchvision, as a Markdown table."""
    rows = []
    for name, format_name in product(options.networks, options.formats):
        say(f"{name}, {format_name} ...")
        # A process of its own, whose peak of memory is its own.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            asked = options.size, options.calibration, options.workers
            rows.append(pool.submit(scale_row, name, format_name, *asked).result())
        say(" | ".join(rows[-1]))
    head = (
        "network",
        "format",
        "parameters",
        "calibration, s",
        "all candidates, s",
        "applying half, s",
        "MiB",
    )
    return (
        f"{options.calibration} inputs of 3x{options.size}x{options.size}; the fits in {options.workers} "
        "processes, the rest in one, one thread each; seconds of the processor, on the wall in brackets; "
        f"peak memory of all processes together.\n\n{markdown(head, rows, left=range(2))}"
    )


REPORTS = {
    "fits": ("Tensor decompositions and tensorly", fits_report),
    "accuracy": ("Accuracy without fine-tuning", accuracy_report),
    "scale": ("Large networks", scale_report),
}


def main() -> None:
    """Run one part, print and perhaps save its table."""
    parser = command_line(__doc__)
    parser.add_argument("--part", choices=REPORTS, default="fits", help="which part to run (default fits)")
    parser.add_argument("--checkpoint", type=Path, help="accuracy: weights of a CIFAR-10 ResNet-20")
    parser.add_argument("--sizes", type=int, nargs="*", default=[64, 128, 256, 512], help="fits: channels")
    parser.add_argument("--ratio", type=float, default=6.0, help="fits: parameters ÷ (default 6)")
    parser.add_argument("--repeats", type=int, default=3, help="fits: runs per median (default 3)")
    parser.add_argument(
        "--iterations", type=int, default=100, help="fits: tensorly's iterations (default 100, its own)"
    )
    parser.add_argument(
        "--formats", nargs="+", choices=list_formats(), default=list_formats(), help="accuracy, scale"
    )
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=[2, 3, 4, 6], help="accuracy: parameters ÷"
    )
    parser.add_argument("--rows", type=Path, help="accuracy: CSV file of finished rows")
    parser.add_argument("--calibration", type=int, default=768, help="accuracy, scale: images (default 768)")
    parser.add_argument("--networks", nargs="+", default=NETWORKS, help="scale: networks of torchvision")
    parser.add_argument("--size", type=int, default=64, help="scale: height and width (default 64)")
    parser.add_argument("--workers", type=int, default=2, help="scale: processes (default 2)")
    options = parser.parse_args()
    if options.part == "accuracy" and options.checkpoint is None:
        parser.error("--part accuracy needs --checkpoint")
    if min(options.repeats, options.iterations, options.calibration) < 1:
        parser.error("--repeats, --iterations and --calibration must be at least 1")
    title, report = REPORTS[options.part]
    short: dict[Path | None, str] = {options.checkpoint: getattr(options.checkpoint, "name", "")}
    publish(
        report(options),
        options.output,
        section=f"bench_decomposition_{options.part}",
        title=title,
        packages=["tensorly"],
        shortened=short,
        dropped=["--rows"],
    )


if __name__ == "__main__":
    main()
