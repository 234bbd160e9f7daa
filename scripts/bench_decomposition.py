"""Fits against tensorly's at equal ranks, and what a network keeps of its accuracy without fine-tuning.

    OMP_NUM_THREADS=1 python scripts/bench_decomposition.py --part fits --output fits.csv
    RANKRL_DATA=data python scripts/bench_decomposition.py --part accuracy --checkpoint cifar10-resnet20.th
    RANKRL_DATA=data python scripts/bench_decomposition.py --part network --checkpoint cifar10-resnet56.th
    python scripts/bench_decomposition.py --part scale --networks convnext_tiny --formats cp

`fits` compares time and error for the convolutions of ResNet-20 and for weights of 64x64x3x3 to
512x512x3x3, in float64 on both sides, fitted to the weights alone since tensorly knows no data. A routine
that computes one solution (SVDs, HOOI) is compared with our algebraic start, an iterative one with a fit.
`accuracy` compresses a ResNet-20 to several budgets and measures the CIFAR-10 test set; with `--rows FILE` a
killed run goes on where it was. `network` times calibration and fit of a whole ResNet at one plan and states
the memory. `scale` states time and memory of calibration, of the fits of all candidates and of applying a
plan for half of the parameters, for torchvision's networks, each in a process of its own. Their weights are
random, with singular values that fall as i^-1/2: what counts here is the size. `stability` compares CP
with and without the term that keeps its terms from cancelling (`FitOptions.stability`).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import tensorly
import torch
from tensorly import decomposition as tensorly_decomposition
from tensorly.tenalg import multi_mode_dot
from torch import nn

from decomposition import (
    Budget,
    CompressionPlan,
    Factorise,
    FitLibrary,
    FitOptions,
    LayerPlan,
    Quantise,
    TensorFormat,
    WeightModes,
    apply_plan,
    collect_moments,
    collect_sensitivities,
    contracted,
    count_parameters,
    fit_weight,
    get_format,
    inspect_layers,
    list_formats,
    make_plan,
    plan_from_choices,
    reestimate_batch_norm,
)
from decomposition.choose.heuristics import get_heuristic
from decomposition.fit.fit_options import CHOOSING
from decomposition.operations.operation import FINAL
from rankrl.data import ImageData, load_dataset
from rankrl.data.calibration import calibration_images
from rankrl.models import create_model, load_checkpoint
from rankrl.report.run_folder import hardware_line, shown_command, write_section
from rankrl.training.accuracy import report_accuracy

ALGEBRAIC = FitOptions(iterations=0)
ITERATED = FitOptions(iterations=300, starts=64)
ITERATED_LARGE = FitOptions(iterations=240)
LARGE = 256  # channels from which a fit gets fewer iterations
SLOW_SECONDS = 20.0  # routines slower than that are run once
TITLES = {
    "fits": "Tensor decompositions and tensorly",
    "accuracy": "Accuracy without fine-tuning",
    "network": "Calibration and fit of a whole network",
    "scale": "Large networks",
    "stability": "Terms of CP that cancel",
}
WHOLE_RANKS = {"tucker": 16, "tensor_ring": 8, "tensor_train": 16, "cp": 48, "spatial_svd": 12}
NETWORKS = ("resnet18", "resnet50", "convnext_tiny", "vit_b_16")
SELECTORS = ("uniform", "greedy")
COLUMNS = ("weights", "weights + BN", "data", "data + BN", "sequential", "sequential + BN")


@dataclass(frozen=True)
class Rival:
    """A routine of tensorly and what it is compared with.

    Attributes:
        format: Our format.
        iterative: Whether it iterates to a minimum; if not, it is compared with our algebraic start.
        run: Decomposes an array (out, in, kernel) at ranks and returns the reconstruction.
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
    """Return the largest single rank that leaves 1/ratio of the parameters and that tensorly accepts.

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
    """Return the last result and the median seconds; slow runs are not repeated."""
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
    """Return a weight (channels, channels, 9) whose channel spectra fall like those of trained layers."""
    generator = torch.Generator().manual_seed(seed)

    def mix() -> torch.Tensor:
        square = torch.randn(channels, channels, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(square).Q * torch.arange(1, channels + 1, dtype=torch.float64) ** -0.5

    core = torch.randn(channels, channels, 9, generator=generator, dtype=torch.float64)
    return torch.einsum("oa,abk,ib->oik", mix(), core, mix()).contiguous()


def load_network(checkpoint: Path, architecture: str = "resnet20") -> nn.Module:
    """Return the trained network in evaluation mode."""
    model = create_model(architecture, input_shape=(3, 32, 32), num_classes=10)
    load_checkpoint(model, checkpoint)
    return model.eval()


def fits_report(options: argparse.Namespace) -> str:
    """Compare all routines on all weights, as two Markdown tables."""
    lines = [
        "| weight | tensorly's routine | ranks | error, ours | error, tensorly | s, ours | s, tensorly |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for channels in options.sizes:
        for name, rival in RIVALS.items():
            _say(f"{channels}x{channels}x3x3, {name} ...")
            result = duel(
                synthetic_weight(channels), rival, options.ratio, options.repeats, options.iterations
            )
            lines.append(
                f"| {channels}x{channels}x3x3 | {name} | {', '.join(map(str, result.ranks))} | "
                f"{result.error:.4f} | {result.rival_error:.4f} | {result.seconds:.3g} | "
                f"{result.rival_seconds:.3g} |"
            )
    if options.checkpoint is None:
        return "\n".join(lines)
    lines += ["", "ResNet-20, error of ours / of tensorly's routine:", ""]
    lines += [f"| layer | {' | '.join(RIVALS)} |", f"|---|{'---:|' * len(RIVALS)}"]
    modules = load_network(options.checkpoint).named_modules()
    totals = {name: [0.0, 0.0] for name in RIVALS}
    for layer, module in modules:
        if not isinstance(module, nn.Conv2d):
            continue
        _say(f"{layer} ...")
        weight = module.weight.detach().double().flatten(2)
        cells = []
        for name, rival in RIVALS.items():
            result = duel(weight, rival, options.ratio, options.repeats, options.iterations)
            totals[name][0] += result.seconds
            totals[name][1] += result.rival_seconds
            cells.append(f"{result.error:.4f} / {result.rival_error:.4f}")
        lines.append(f"| {layer} | {' | '.join(cells)} |")
    seconds = [f"{ours:.3g} / {theirs:.3g}" for ours, theirs in totals.values()]
    return "\n".join([*lines, f"| seconds, all layers | {' | '.join(seconds)} |"])


def accuracies(model: nn.Module, plan: CompressionPlan, images: torch.Tensor, data: ImageData) -> list[float]:
    """Return the test accuracy of a plan for each entry of `COLUMNS`, in percent."""
    fitted = (
        apply_plan(model, plan),
        apply_plan(model, plan, images, sequential=False),
        apply_plan(model, plan, images),
    )
    percents = []
    normal = calibration_images(data, len(images), seed=0, augmented=True)
    for compressed in fitted:
        reestimated = copy.deepcopy(compressed)
        reestimate_batch_norm(reestimated, normal.split(256))
        for network in (compressed, reestimated):
            # The same function, faster to evaluate here.
            percents.append(
                100 * report_accuracy(contracted(network), data.test, mean=data.mean, std=data.std)
            )
    return percents


def accuracy_report(options: argparse.Namespace) -> str:
    """Measure every format at every budget with uniform and greedy ranks, as a Markdown table."""
    model = load_network(options.checkpoint)
    data = load_dataset("cifar10")
    images = calibration_images(data, options.calibration, seed=0)
    all_specs = inspect_layers(model, data.input_shape)
    specs = [spec for spec in all_specs if spec.refusal is None]
    batched = images.split(256)
    moments = collect_moments(model, specs, batched)
    sensitivities = collect_sensitivities(model, specs, batched)
    total = count_parameters(model)
    fixed = total - sum(spec.params for spec in specs)
    dense = 100 * report_accuracy(model, data.test, mean=data.mean, std=data.std)
    lines = [
        f"Test accuracy in %, dense {dense:.2f} %; {options.calibration} unlabelled training images.",
        "",
        f"| format | parameters ÷ | ranks | {' | '.join(COLUMNS)} |",
        f"|---|---:|---|{'---:|' * len(COLUMNS)}",
    ]
    rows = _finished_rows(options.rows)
    for name in options.formats:
        keys = [(name, ratio, selector) for ratio in options.ratios for selector in SELECTORS]
        if all(key in rows for key in keys):
            lines += [rows[key] for key in keys]
            continue
        _say(f"{name}: fitting the candidates ...")
        library = FitLibrary(model, specs, name, moments=moments, sensitivities=sensitivities)
        sites = library.all_candidates()
        for ratio in options.ratios:
            budget = Budget(1 / ratio, "params", total, fixed)
            for selector in SELECTORS:
                if (name, ratio, selector) in rows:
                    lines.append(rows[name, ratio, selector])
                    continue
                _say(f"{name}, {ratio:g}x, {selector} ranks ...")
                choices = get_heuristic(selector).choose(library, sites, budget)
                plan = plan_from_choices(sites, choices, all_specs, data.input_shape, selector)
                spent = fixed + sum(int(site.params[j]) for site, j in zip(sites, choices, strict=True))
                cells = " | ".join(f"{value:.1f}" for value in accuracies(model, plan, images, data))
                _say(cells)
                lines.append(f"| {name} | {total / spent:.2f} | {selector} | {cells} |")
                if options.rows is not None:
                    with options.rows.open("a", encoding="utf-8") as file:
                        file.write(json.dumps([name, ratio, selector, lines[-1]]) + "\n")
    return "\n".join(lines)


def stability_report(options: argparse.Namespace) -> str:
    """Measure CP with terms of any size and with terms kept from cancelling, as a Markdown table."""
    model = load_network(options.checkpoint)
    data = load_dataset("cifar10")
    lines = [
        f"Test accuracy in % of greedy's plan after the sequential refit to {options.calibration} unlabelled "
        f"training images, {options.seeds} draws of them, mean and range; in integers every layer is rounded "
        "to 8 bits.",
        "",
        "| parameters ÷ | stability | float32 | 8-bit integers |",
        "|---:|---:|---:|---:|",
    ]
    errors_of: dict[tuple[float, float], list[tuple[float, float]]] = {}
    for seed, stability in product(range(options.seeds), options.stability):
        images = calibration_images(data, options.calibration, seed=seed)
        library = FitLibrary.calibrated(
            model,
            data.input_shape,
            "cp",
            images.split(256),
            options=replace(CHOOSING, stability=stability),
        )
        sites = library.all_candidates()
        for ratio in options.ratios:
            budget = Budget.of_model(model, sites, data.input_shape, "params", 1 / ratio)
            choices = get_heuristic("greedy").choose(library, sites, budget)
            specs = inspect_layers(model, data.input_shape)
            plan = plan_from_choices(sites, choices, specs, data.input_shape, "greedy")
            integers = replace(
                plan,
                layers=tuple(
                    each
                    if spec.refusal is not None
                    else LayerPlan(each.name, (*each.operations, Quantise()), None)
                    for each, spec in zip(plan.layers, specs, strict=True)
                ),
            )
            cells = tuple(
                100
                * report_accuracy(
                    apply_plan(model, each, images, options=replace(FINAL, stability=stability)),
                    data.test,
                    mean=data.mean,
                    std=data.std,
                )
                for each in (plan, integers)
            )
            _say(f"{ratio:g}x, stability {stability:g}, seed {seed}: {cells[0]:.2f}, {cells[1]:.2f}")
            errors_of.setdefault((ratio, stability), []).append((cells[0], cells[1]))
    for (ratio, stability), pairs in sorted(errors_of.items()):
        columns = (
            f"{np.mean(each):.1f} ({min(each):.1f} to {max(each):.1f})" for each in zip(*pairs, strict=True)
        )
        lines.append(f"| {ratio:g} | {stability:g} | {' | '.join(columns)} |")
    return "\n".join(lines)


def network_report(options: argparse.Namespace) -> str:
    """Time the compression of a whole network by a given rank, as a Markdown table."""
    architecture = options.checkpoint.stem.rsplit("-", 1)[-1]
    model = load_network(options.checkpoint, architecture)
    data = load_dataset("cifar10")
    images = calibration_images(data, options.calibration, seed=0)
    before = peak_memory()
    lines = [
        f"{architecture}, {options.calibration} images; peak memory of the process before: {before:.2f} GiB.",
        "",
        "| format | rank | layers | s, sequential | s, to the dense inputs | peak memory, GiB |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in options.formats:
        plan = make_plan(model, data.input_shape, name, ranks=WHOLE_RANKS[name])
        count = len(plan.chosen(Factorise))
        seconds = []
        for sequential in (True, False):
            _say(f"{name}, {'sequential' if sequential else 'to the dense inputs'} ...")
            start = time.perf_counter()
            apply_plan(model, plan, images, sequential=sequential)
            seconds.append(time.perf_counter() - start)
        lines.append(
            f"| {name} | {WHOLE_RANKS[name]} | {count} | {seconds[0]:.1f} | {seconds[1]:.1f} | "
            f"{peak_memory():.2f} |"
        )
    return "\n".join(lines)


def spectral_network(name: str, size: int) -> nn.Module:
    """Return a network of torchvision, random, the singular values of its weights falling as i^-1/2."""
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


def scale_row(name: str, format_name: str, size: int, count: int, workers: int) -> str:
    """Time all that a network goes through, as a row of a Markdown table."""
    torch.set_num_threads(1)
    model = spectral_network(name, size)
    shape = (3, size, size)
    images = nn.functional.avg_pool2d(torch.randn(count, *shape), 3, stride=1, padding=1)
    clock = _Clock()
    library = FitLibrary.calibrated(model, shape, format_name, images.split(64))
    cells = [clock.lap()]
    sites = library.all_candidates(progress=_say, workers=workers if workers > 1 else None)
    cells.append(clock.lap())
    budget = Budget.of_model(model, sites, shape, "params", 0.5)
    choices = get_heuristic("greedy").choose(library, sites, budget)
    plan = plan_from_choices(sites, choices, inspect_layers(model, shape), shape, "greedy")
    clock.lap()
    apply_plan(model, plan, images)
    cells.append(clock.lap())
    params = count_parameters(model) / 1e6
    cells.append(f"{1024 * (peak_memory() + workers * peak_memory(resource.RUSAGE_CHILDREN)):.0f}")
    return f"| {name} | {format_name} | {params:.1f} M | {' | '.join(cells)} |"


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


def scale_report(options: argparse.Namespace) -> str:
    """Time whole networks of torchvision, as a Markdown table."""
    lines = [
        f"{options.calibration} inputs of 3x{options.size}x{options.size}; the fits in {options.workers} "
        "processes, the rest in one, one thread each; seconds of the processor, on the wall in brackets; "
        "peak memory of all processes together.",
        "",
        "| network | format | parameters | calibration, s | all candidates, s | applying half, s | MiB |",
        f"|---|---|{'---:|' * 5}",
    ]
    for name in options.networks:
        for format_name in options.formats:
            _say(f"{name}, {format_name} ...")
            # A process of its own, whose peak of memory is its own.
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                row = pool.submit(
                    scale_row, name, format_name, options.size, options.calibration, options.workers
                )
                lines.append(row.result())
            _say(lines[-1])
    return "\n".join(lines)


def peak_memory(who: int = resource.RUSAGE_SELF) -> float:
    """Return the largest resident size of this process, or of one that it started, so far, in GiB."""
    return resource.getrusage(who).ru_maxrss / 2**20


def _finished_rows(path: Path | None) -> dict[tuple[str, float, str], str]:
    """Return the rows of an earlier run by format, ratio and selector."""
    if path is None or not path.exists():
        return {}
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(name, ratio, selector): row for name, ratio, selector, row in entries}


def write_part(path: Path, part: str, text: str) -> None:
    """Write the section of a part; see `rankrl.report.run_folder.write_section`."""
    marker = "bench_decomposition" if part == "fits" else f"bench_decomposition_{part}"
    write_section(path, marker, TITLES[part], text)


def main() -> None:
    """Read the command line, run one part, print and perhaps save its tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--part", choices=TITLES, default="fits", help="which part to run (default fits)")
    parser.add_argument("--checkpoint", type=Path, help="weights of a CIFAR-10 ResNet-20")
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced, or CSV file")
    parser.add_argument("--sizes", type=int, nargs="*", default=[64, 128, 256, 512], help="fits: channels")
    parser.add_argument("--ratio", type=float, default=6.0, help="fits: parameters ÷ (default 6)")
    parser.add_argument("--repeats", type=int, default=3, help="fits: runs per median (default 3)")
    parser.add_argument(
        "--iterations", type=int, default=100, help="fits: tensorly's iterations (default 100, its own)"
    )
    parser.add_argument(
        "--formats",
        nargs="+",
        choices=list_formats(),
        default=list_formats(),
        help="accuracy, scale: formats",
    )
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=[2, 3, 4, 6], help="accuracy, stability: parameters ÷"
    )
    parser.add_argument("--rows", type=Path, help="accuracy: file of finished rows, to go on after a kill")
    parser.add_argument("--calibration", type=int, default=768, help="all but fits: images (default 768)")
    parser.add_argument("--networks", nargs="+", default=NETWORKS, help="scale: networks of torchvision")
    parser.add_argument("--size", type=int, default=64, help="scale: height and width (default 64)")
    parser.add_argument("--workers", type=int, default=2, help="scale: processes (default 2)")
    parser.add_argument("--stability", type=float, nargs="+", default=[0, 0.03], help="stability: values")
    parser.add_argument("--seeds", type=int, default=3, help="stability: draws of images (default 3)")
    options = parser.parse_args()
    if options.part not in ("fits", "scale") and options.checkpoint is None:
        parser.error(f"--part {options.part} needs --checkpoint")
    if min(options.repeats, options.iterations, options.calibration, options.seeds) < 1:
        parser.error("--repeats, --iterations, --calibration and --seeds must be at least 1")
    reports = {
        "fits": fits_report,
        "accuracy": accuracy_report,
        "network": network_report,
        "scale": scale_report,
        "stability": stability_report,
    }
    table = reports[options.part](options)
    short = {} if options.checkpoint is None else {str(options.checkpoint): options.checkpoint.name}
    command = shown_command(sys.argv, shortened=short, dropped=["--rows"])
    text = f"`{command}`\n\n{hardware_line('tensorly')}\n\n{table}"
    print(text)
    if options.output:
        write_part(options.output, options.part, text)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
