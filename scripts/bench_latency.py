"""Budgets in time: what greedy's plan keeps of the dense network's latency once exported, and its accuracy.

    RANKRL_DATA=DIR python scripts/bench_latency.py --checkpoints DIR [--models resnet20 resnet9:width=32 ...]

For each network the first row is the dense one in 8-bit integers by onnxruntime alone, the second a plan in
float32 alone, within a budget of its own (--float-latency). Then the candidates of the formats (`cp+tucker`:
every layer chooses) are timed in onnxruntime in each precision, greedy chooses within each budget, the plan
is applied, fine-tuned for --epochs if that is wanted, and exported; the file is timed along with the dense
network's in turns. Accuracies are the files' own on the test set, before and after. Networks take the
checkpoint DATASET-MODEL.th or .safetensors; torchvision's see the same images at 224 x 224 with random
weights, which shows the time and no accuracy. --multiples compares ranks that leave none of the processor's
lanes empty with ranks of any size.

With --folders the rows are finished runs of `rankrl`, such as those of `scripts/results.py --grid
scripts/latency.yaml`, which trains them and can be interrupted: all files of a network are timed in turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from result_rows import epochs_of
from torch import nn

from decomposition import CompressionPlan, DecompositionError, FitLibrary, apply_plan
from rankrl.data import ImageData, Images, TestImages, load_dataset
from rankrl.data.calibration import calibration_images
from rankrl.errors import RankrlError
from rankrl.models import create_model, list_models, load_checkpoint
from rankrl.networks.module import FileModule, image_network
from rankrl.networks.network import CandidateOptions
from rankrl.onnx.export import quantise_onnx
from rankrl.onnx.runtimes import DEFAULT_RUNTIME
from rankrl.options.decomposition import DecompositionOptions, default_precisions
from rankrl.options.search import BudgetOptions, SearchOptions
from rankrl.options.timing import ExportOptions
from rankrl.plan_search.scores.evaluators import EvaluatorOptions
from rankrl.plan_search.scores.scoring import ImageScoring
from rankrl.plan_search.selectors.random_plans import spend_at_random
from rankrl.plan_search.session import SearchGoal, SearchSession
from rankrl.report.run_folder import hardware_line, read_metrics, shown_command, write_section
from rankrl.runs.run_folder import cache_folder
from rankrl.timing import fast_multiple
from rankrl.timing.latency import TimedTurns, time_in_turns
from rankrl.training import TrainingRecipe
from rankrl.training.networks import run_training
from rankrl.verify.file_export import export_dense, int8_numbers
from rankrl.verify.measure import ImageInputs, cost_ratios, network_numbers, range_batches

HEAD = [
    "| network | chosen from | asked | time | of the integers' | ms | before | after | in the file | epochs "
    "| agreement | parameters | smaller |",
    "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
]


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: Its folder.
    """

    folder: Path

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """Its measurements.

        Raises:
            SystemExit: If it has not finished.
        """
        path = self.folder / "metrics.json"
        if not path.exists():
            raise SystemExit(f"{self.folder} is no finished run: it has no metrics.json. Resume it first")
        metrics = read_metrics(self.folder)
        if "onnx" not in metrics:
            raise SystemExit(f"{self.folder} has written no ONNX file that could be timed")
        if metrics["dense_int8"] is None:
            raise SystemExit(f"{self.folder} did not measure the dense network in integers (export.int8)")
        return metrics

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The options it was run with."""
        path = self.folder / "state" / "configuration.json"
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["config"]
        return config

    @property
    def network(self) -> tuple[str, str, str]:
        """Name, checkpoint and data of the dense network, which runs may share."""
        return self.metrics["model"], str(self.metrics["checkpoint"]), self.metrics["dataset"]

    @property
    def export(self) -> ExportOptions:
        """How its file was written and timed."""
        onnx = self.metrics["onnx"]
        return ExportOptions(batch=onnx["batch"], threads=onnx["threads"], preprocess=onnx["preprocess"])

    @property
    def choices(self) -> str:
        """The candidates that the plan was chosen from, for the table."""
        decomposition, budget = self.settings["decomposition"], self.settings["budget"]
        formats = decomposition["formats"] or [decomposition["format"]]
        kinds = (
            "+".join(formats)
            + "+channels" * bool(decomposition["channels"])
            + "+blocks" * decomposition["blocks"]
        )
        usual = default_precisions(BudgetOptions(**budget))
        return f"{kinds}, {'+'.join(decomposition['precisions'] or usual)}"


def run_rows(folders: Sequence[Path], *, runs: int, repeats: int) -> list[str]:
    """Return the lines of the table.

    Args:
        folders: Folders of finished runs.
        runs: Forward passes of each file a comparison.
        repeats: Comparisons, each with sessions of its own; the middle one by the ratio is shown.
    """
    by_network: dict[tuple[str, str, str], list[Run]] = {}
    for folder in folders:
        run = Run(folder)
        by_network.setdefault(run.network, []).append(run)
    lines = list(HEAD)
    for same in by_network.values():
        lines += _network_rows(same, runs, repeats)
    return lines


def _network_rows(runs: Sequence[Run], passes: int, repeats: int) -> list[str]:
    first = runs[0]
    dense, options = first.folder / "state" / "dense.onnx", first.export
    with tempfile.TemporaryDirectory() as scratch:
        integers = Path(scratch) / "dense-int8.onnx"
        data = load_dataset(first.metrics["dataset"], seed=0)
        quantise_onnx(dense, integers, range_batches(data, options))
        files = [dense, integers, *(run.folder / "model.onnx" for run in runs)]
        turns = [_timed(files, options, passes) for _ in range(repeats)]
        rival_bytes = integers.stat().st_size
    medians = np.array([[latency.median_ms for latency in each.latencies] for each in turns])
    to_dense = np.median(medians / medians[:, :1], axis=0)
    to_integers = np.median(medians / medians[:, 1:2], axis=0)
    spread = medians[:, 2:] / medians[:, :1]
    milliseconds = np.median(medians, axis=0)
    accuracy, dense_bytes = first.metrics["baseline"]["accuracy"], dense.stat().st_size
    rival = first.metrics["dense_int8"]["accuracy"]
    name = first.metrics["model"]
    lines = [
        f"| {name} | dense | | 1 | {to_integers[0]:.2f} | {milliseconds[0]:.1f} | | | {accuracy:.2%} "
        "| | | | |",
        f"| {name} | dense, int8 | | {to_dense[1]:.3f} | 1 | {milliseconds[1]:.1f} | | | {rival:.2%} | | | "
        f"| {dense_bytes / rival_bytes:.1f}x |",
    ]
    for position, run in enumerate(runs):
        metrics, low, high = run.metrics, spread[:, position].min(), spread[:, position].max()
        epochs = epochs_of(metrics)
        after = f"{metrics['finetuned']['accuracy']:.2%}" if epochs else ""
        agreement = metrics["onnx"]["agreement"]
        at = position + 2
        lines.append(
            f"| {name} | {run.choices} | {run.settings['budget']['latency'] or ''} "
            f"| {to_dense[at]:.3f} ({low:.3f} to {high:.3f}) | {to_integers[at]:.2f} "
            f"| {milliseconds[at]:.1f} | {metrics['compressed']['accuracy']:.2%} | {after} "
            f"| {metrics['onnx']['accuracy']:.2%} | {epochs} "
            f"| {'' if agreement is None else f'{agreement:.1%}'} | {metrics['ratios']['params']:.2f}x fewer "
            f"| {dense_bytes / metrics['onnx']['file_bytes']:.1f}x |"
        )
    return lines


def _timed(files: Sequence[Path], options: ExportOptions, passes: int) -> TimedTurns:
    pairs = [(DEFAULT_RUNTIME, file) for file in files]
    return time_in_turns(pairs, batch=options.batch, threads=options.threads, runs=passes)


LARGE = 224
_SHARES = (0.35, 0.65)
FEW_IMAGES = 128


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one row chooses from, and within which budget.

    Attributes:
        formats: Names of tensor formats, joined by `+`.
        precisions: Names of precisions, joined by `+`.
        multiple: Of what the ranks are multiples.
        channels: Fractions of the channels between layers that may be kept.
        blocks: Whether whole residual blocks may go.
        latency: Fraction of the dense time.
    """

    formats: str
    precisions: str
    multiple: int
    channels: tuple[float, ...]
    blocks: bool
    latency: float


def main(arguments: list[str] | None = None) -> None:
    """Measure every combination and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoints", type=Path, help="folder of cifar10-MODEL.th; untrained without")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument(
        "--models", nargs="+", default=["resnet20", "resnet56", "resnet18"], help="NAME[:OPTION=NUMBER]"
    )
    parser.add_argument("--formats", nargs="+", default=["cp+tucker"])
    parser.add_argument("--precisions", nargs="+", default=["float32+int8"])
    parser.add_argument("--multiples", nargs="+", type=int, help="of ranks; what suits the machine without")
    parser.add_argument(
        "--channels", nargs="*", type=float, default=[], help="a row more each, with these fractions kept"
    )
    parser.add_argument("--blocks", action="store_true", help="a row more each, from which blocks may go")
    parser.add_argument("--latency", nargs="*", type=float, default=[0.35, 0.28], help="of the dense time")
    parser.add_argument("--float-latency", nargs="*", type=float, default=[0.6], help="of float32 alone")
    parser.add_argument("--predictions", type=int, default=0, help="random plans to hold the sums against")
    parser.add_argument("--epochs", type=int, default=0, help="of fine-tuning")
    parser.add_argument("--lr", type=float, default=5e-4, help="of fine-tuning")
    parser.add_argument("--batch", type=int, default=64, help="images of a timed batch, 1 at 224 x 224")
    parser.add_argument("--threads", type=int, default=1, help="of onnxruntime")
    parser.add_argument("--runs", type=int, default=30, help="timed passes")
    parser.add_argument("--candidates", type=int, default=16, help="ranks of a layer at most")
    parser.add_argument("--iterations", type=int, default=60, help="L-BFGS iterations of a candidate's fit")
    parser.add_argument("--images", type=int, default=768, help="calibration images")
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced, or CSV file")
    parser.add_argument("--folders", type=Path, nargs="+", help="time these finished runs, and nothing else")
    parser.add_argument("--repeats", type=int, default=5, help="comparisons of --folders")
    asked = parser.parse_args(arguments)
    if asked.folders:
        lines = run_rows(asked.folders, runs=asked.runs, repeats=asked.repeats)
    else:
        lines = searched_rows(asked)
    if asked.predictions:
        lines += [
            "",
            "Sums of layers' times against whole files, random plans at "
            f"{_SHARES[0]} to {_SHARES[1]} of the dense time:",
            "",
            "| network | plans | mean error | median | largest |",
            "|---|---:|---:|---:|---:|",
            *(predictions_row(name, *network_and_data(name, asked), asked) for name in asked.models),
        ]
    text = "\n".join(lines)
    print(text)
    if asked.output is not None:
        shortened = {str(asked.checkpoints): "CHECKPOINTS"}
        shortened |= {str(folder): f"RUNS/{folder.name}" for folder in asked.folders or ()}
        section = f"`{shown_command(sys.argv, shortened=shortened)}`\n\n{hardware_line()}\n\n{text}"
        write_section(asked.output, "bench_latency", "Budgets in time", section)


def searched_rows(asked: argparse.Namespace) -> list[str]:
    """Search, apply, fine-tune and export for every cell, and return the table's lines."""
    lines = [
        "| network | format | precision | ranks | asked | measured | ms dense | ms | parameters | MACs "
        "| accuracy dense | accuracy | fine-tuned | agreement | minutes |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for name in asked.models:
        model, data = network_and_data(name, asked)
        lines.append(integer_row(name, model, data, asked))
        print(lines[-1], flush=True)
        multiples = asked.multiples or [fast_multiple()]
        removals = [(), tuple(asked.channels)] if asked.channels else [()]
        blocks = [False, True] if asked.blocks else [False]
        cells = [
            *product(asked.formats, ["float32"], multiples, [()], [False], asked.float_latency),
            *product(asked.formats, asked.precisions, multiples, removals, blocks, asked.latency),
        ]
        for cell in cells:
            lines.append(row(name, model, data, Cell(*cell), asked))
            print(lines[-1], flush=True)
    return lines


def network_and_data(name: str, asked: argparse.Namespace) -> tuple[nn.Module, ImageData]:
    """Return a network and images of its size."""
    data = load_dataset(asked.dataset, seed=0)
    torch.manual_seed(0)
    name, *pairs = name.split(":")
    options = {key: int(value) for key, value in (pair.split("=") for pair in pairs)}
    if name in list_models():
        model = create_model(name, input_shape=data.input_shape, num_classes=data.classes, **options)
        if asked.checkpoints is not None:
            paths = sorted(asked.checkpoints.glob(f"{asked.dataset}-{name}.*"))
            load_checkpoint(model, paths[0] if paths else asked.checkpoints / f"{asked.dataset}-{name}.th")
        return model.eval(), data
    data = dataclasses.replace(
        data,
        train=enlarged(data.train),
        heldout=enlarged(data.heldout),
        test=TestImages(enlarged(data.test.for_report())),
    )
    model = create_model("torchvision", input_shape=data.input_shape, num_classes=data.classes, name=name)
    return model.eval(), data


def enlarged(images: Images) -> Images:
    """Return the first few images at 224 x 224 pixels."""
    few = images.first(FEW_IMAGES)
    pixels = F.interpolate(few.x.float(), size=LARGE, mode="bilinear", antialias=True)
    return dataclasses.replace(few, x=pixels.round().to(few.x.dtype))


def integer_row(name: str, model: nn.Module, data: ImageData, asked: argparse.Namespace) -> str:
    """Return the row of the dense network in 8-bit integers."""
    start = time.perf_counter()
    export = ExportOptions(**_timing(data, asked))
    with tempfile.TemporaryDirectory() as scratch:
        inputs, folder = ImageInputs(data, export), Path(scratch)
        int8 = int8_numbers(export_dense(model, inputs, folder), inputs, folder)
    if int8 is None:
        return f"| {name} | dense | int8 | | | onnxruntime cannot | | | | | | | | | |"
    accuracies = (network_numbers(model, data)["accuracy"], int8["accuracy"])
    dense, own = (_percent(each, asked, data) for each in accuracies)
    minutes = (time.perf_counter() - start) / 60
    ratio = 1 / int8["latency_ratio"]
    return f"| {name} | dense | int8 | | | {ratio:.3f} | | | | | {dense} | {own} | | | {minutes:.1f} |"


def _timing(data: ImageData, asked: argparse.Namespace) -> dict[str, int]:
    batch = 1 if _is_large(data) else asked.batch
    return {"batch": batch, "threads": asked.threads, "runs": asked.runs}


def row(
    name: str,
    model: nn.Module,
    data: ImageData,
    cell: Cell,
    asked: argparse.Namespace,
) -> str:
    """Return the table's row of one network, choice of candidates and budget."""
    start = time.perf_counter()
    ranks = "any" if cell.multiple == 1 else f"multiples of {cell.multiple}"
    kinds = cell.formats + "+channels" * bool(cell.channels) + "+blocks" * cell.blocks
    head = f"| {name} | {kinds} | {cell.precisions} | {ranks} | {cell.latency} "
    with tempfile.TemporaryDirectory() as scratch:
        session = _session(model, data, cell, asked, Path(scratch))
        try:
            with session:
                plan = session.search("greedy", {}, seed=0, folder=Path(scratch) / "search").plan
        except (DecompositionError, RankrlError) as error:
            return f"{head}| {error} | | | | | | | | | |"
        searched = session.network
        network = searched.applied(plan, session.library)

        def exported() -> tuple[dict, float]:
            file = searched.write(network, Path(scratch) / "model.onnx", {})
            return dict(file.numbers), file.latency.ratio

        numbers, ratio = exported()
        first, tuned = numbers["accuracy"], ""
        if asked.epochs:
            recipe = TrainingRecipe(epochs=asked.epochs, lr=asked.lr, distillation=0.9, restore_best=False)
            state = Path(scratch) / "state.safetensors"
            run_training("fine-tune", network, data, recipe, state_file=state, teacher=model)
            numbers, ratio = exported()
            tuned = _percent(numbers["accuracy"], asked, data)
    before, after = network_numbers(model, data), network_numbers(network, data)
    ratios = cost_ratios(before, after)
    minutes = (time.perf_counter() - start) / 60
    agreement = "" if numbers["agreement"] is None else f"{numbers['agreement']:.2%}"
    return (
        f"{head}| {1 / ratio:.3f} | {numbers['baseline_latency_ms']:.2f} | {numbers['latency_ms']:.2f} "
        f"| {ratios['params']:.2f}x fewer | {ratios['macs']:.2f}x fewer "
        f"| {_percent(before['accuracy'], asked, data)} | {_percent(first, asked, data)} | {tuned} "
        f"| {agreement} | {minutes:.1f} |"
    )


def predictions_row(name: str, model: nn.Module, data: ImageData, asked: argparse.Namespace) -> str:
    """Return how far the sums of layers' times are off for random plans, which are exported and timed."""
    multiple = asked.multiples[0] if asked.multiples else fast_multiple()
    cell = Cell(asked.formats[0], asked.precisions[-1], multiple, (), False, 1.0)
    with (
        tempfile.TemporaryDirectory() as scratch,
        _session(model, data, cell, asked, Path(scratch)) as session,
    ):
        sites, budget, timed = session.problem.sites, session.problem.budget, session.latency
        assert budget is not None
        assert timed is not None
        generator, off = np.random.default_rng(0), []
        for share in np.linspace(*_SHARES, asked.predictions):
            choices = spend_at_random(sites, dataclasses.replace(budget, fraction=float(share)), generator)
            expected = budget.spent(sites, choices) / budget.total
            off.append(abs(timed.measured(session.problem.plan(choices, "random")).share / expected - 1))
    return f"| {name} | {asked.predictions} | {np.mean(off):.1%} | {np.median(off):.1%} | {max(off):.1%} |"


class Unfitted(FileModule):
    """A network of random weights: they are worth no fit to data, and time does not depend on them."""

    def applied(self, plan: CompressionPlan, _library: FitLibrary | None = None, /) -> nn.Module:
        """Return the compressed network."""
        return apply_plan(self.model, plan)


def _session(
    model: nn.Module,
    data: ImageData,
    cell: Cell,
    asked: argparse.Namespace,
    scratch: Path,
) -> SearchSession:
    """Return the session of a search within a budget in time."""
    images = calibration_images(data, min(asked.images, len(data.train)), seed=0)
    candidates = CandidateOptions(
        tuple(cell.formats.split("+")),
        precisions=tuple(cell.precisions.split("+")),
        candidates=asked.candidates,
        multiple=cell.multiple,
        iterations=asked.iterations,
        channels=cell.channels,
        blocks=cell.blocks,
    )
    cache = cache_folder()
    timing = ExportOptions(**_timing(data, asked), folder=cache / "latencies")
    scoring = ImageScoring(model, data, EvaluatorOptions(augmented=True), 1000)
    network = image_network(model, data, images, scoring, DecompositionOptions(), timing, scratch)
    if _is_large(data):
        network = Unfitted(**{each.name: getattr(network, each.name) for each in dataclasses.fields(network)})
    return SearchSession(
        network,
        network.library(candidates, cache=cache / "fits", seed=0),
        SearchGoal(BudgetOptions(latency=cell.latency), SearchOptions(episodes=1), timing),
        candidates=candidates.candidates,
    )


def _is_large(data: ImageData) -> bool:
    return data.input_shape[1] == LARGE


def _percent(accuracy: float, asked: argparse.Namespace, data: ImageData) -> str:
    trained = asked.checkpoints is not None and not _is_large(data)
    return f"{accuracy:.2%}" if trained else "–"


if __name__ == "__main__":
    main()
