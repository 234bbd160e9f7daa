"""What each part of `finetune=full` is worth: its rate, and all of it but one part, after equal epochs.

    RANKRL_DATA=data python scripts/bench_finetuning.py --checkpoint dense.safetensors --rows rows.csv

The network is decomposed once, by greedy's plan, and fine-tuned in every way from there. Rates are chosen by
the held-out images, so the checkpoint has to be one that never saw them: `rankrl task=train` writes it.
Finished rows are kept in `--rows`, so that a killed run goes on with the next one.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean

from result_rows import ResultRows
from torch import nn

from decomposition import apply_plan, load_compressed, plan_by_heuristic, save_compressed
from rankrl import reuse_memory
from rankrl.data import ImageData, load_dataset
from rankrl.data.calibration import calibration_images
from rankrl.models import checkpoint_heldout, create_model, load_checkpoint
from rankrl.report.markdown import shown_command, write_section
from rankrl.report.provenance import hardware_line
from rankrl.training import TrainingRecipe, report_accuracy, train

FULL = TrainingRecipe(
    lr=1e-3,
    product_decay=1e-4,
    ema_decay=0.999,
    distillation=0.9,
    restore_best=False,
)
VALUES = ("heldout", "dense", "before", "test")
_NESTEROV = {"momentum": 0.9, "nesterov": True}


@dataclass(frozen=True)
class Variant:
    """A recipe and its name in the table.

    Attributes:
        name: Name of its row.
        recipe: How the compressed network is trained.
    """

    name: str
    recipe: TrainingRecipe


VARIANTS = (
    Variant("all of it, rate 1e-3", FULL),
    Variant("all of it, rate 3e-4", replace(FULL, lr=3e-4)),
    Variant("all of it, rate 3e-3", replace(FULL, lr=3e-3)),
    Variant("without decay of the product", replace(FULL, product_decay=0.0)),
    Variant("without the moving average", replace(FULL, ema_decay=None)),
    Variant("without distillation", replace(FULL, distillation=0.0)),
    Variant("the short recipe: rate 1e-4", TrainingRecipe(lr=1e-4, distillation=0.9, restore_best=False)),
    Variant("SGD, rate 0.005", replace(FULL, lr=0.005, optimizer="sgd", optimizer_options=_NESTEROV)),
    Variant("SGD, rate 0.02", replace(FULL, lr=0.02, optimizer="sgd", optimizer_options=_NESTEROV)),
    Variant("OnnxAdagrad, rate 0.003", replace(FULL, lr=0.003, optimizer="onnx_adagrad")),
    Variant("OnnxAdagrad, rate 0.01", replace(FULL, lr=0.01, optimizer="onnx_adagrad")),
)


def decomposed(dense: nn.Module, data: ImageData, options: argparse.Namespace) -> nn.Module:
    """Return the network that every row begins with; it is kept next to the rows."""
    path = options.rows.with_suffix(".safetensors")
    if not path.exists():
        images = calibration_images(data, options.calibration, seed=0)
        plan = plan_by_heuristic(
            dense, data.input_shape, options.format, "greedy", options.fraction, calibration=images
        )
        save_compressed(apply_plan(dense, plan, images), plan, path, dense=dense)
    network, _ = load_compressed(dense, path)
    return network


def measure(options: argparse.Namespace, rows: ResultRows) -> None:
    """Measure what is missing in the rows.

    Raises:
        SystemExit: If the checkpoint may have been trained on the held-out images.
    """
    data = load_dataset(options.dataset, seed=0)
    if checkpoint_heldout(options.checkpoint) != data.heldout.digest():
        raise SystemExit(
            f"{options.checkpoint} may have been trained on the held-out images, by which rates are chosen; "
            f"train one with rankrl task=train dataset={options.dataset} seed=0"
        )
    dense = create_model(options.model, input_shape=data.input_shape, num_classes=data.classes)
    load_checkpoint(dense, options.checkpoint)
    dense.eval()
    small = replace(data, train=data.train.first(options.images))
    for seed, variant in product(options.seeds, VARIANTS):
        key = {"variant": variant.name, "epochs": options.epochs, "images": options.images, "seed": seed}
        if (options.variants and not any(each in variant.name for each in options.variants)) or rows.find(
            key
        ):
            continue
        start = decomposed(dense, data, options)
        seeded = replace(variant, recipe=replace(variant.recipe, seed=seed))
        network = copy.deepcopy(start)
        teacher = dense if seeded.recipe.distillation else None
        result = train(network, small, replace(seeded.recipe, epochs=options.epochs), teacher=teacher)
        accuracies = [
            100 * report_accuracy(each, data.test, mean=data.mean, std=data.std)
            for each in (dense, start, network)
        ]
        names = ("dense", "before", "test")
        values = dict(zip(names, accuracies, strict=True))
        rows.add(key, {"heldout": 100 * result.accuracy, **values})
        print(
            f"{variant.name}, seed {seed}: {100 * result.accuracy:.2f} % held out",
            file=sys.stderr,
            flush=True,
        )


def table(rows: ResultRows) -> str:
    """Return the rows as a Markdown table, in the order of the variants: means over the seeds."""
    lines = [
        "| recipe | epochs | images | seeds | held out, % | test, %: dense | before | after | range |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    kinds = {(row["variant"], row["epochs"], row["images"]): [] for row in rows.rows}
    for row in rows.rows:
        kinds[row["variant"], row["epochs"], row["images"]].append(row)
    names = [variant.name for variant in VARIANTS]
    for (name, epochs, images), same in sorted(kinds.items(), key=lambda item: names.index(item[0][0])):
        means = [f"{mean(float(row[column]) for row in same):.2f}" for column in VALUES]
        tests = [float(row["test"]) for row in same]
        spread = f"{min(tests):.2f} to {max(tests):.2f}" if len(tests) > 1 else ""
        lines.append(f"| {' | '.join([name, epochs, images, str(len(same)), *means, spread])} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, print the table and perhaps save it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="dense network, trained by rankrl")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--format", default="cp")
    parser.add_argument("--fraction", type=float, default=0.25, help="of the parameters (default 1/4)")
    parser.add_argument("--calibration", type=int, default=768, help="images to fit on (default 768)")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--images", type=int, default=20_000, help="of an epoch (default 20,000)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of batches and crops (default 0)")
    parser.add_argument("--variants", nargs="+", metavar="TEXT", help="only those whose names contain one")
    parser.add_argument("--rows", type=Path, required=True, help="CSV file of finished rows")
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced, or CSV file")
    options = parser.parse_args(arguments)
    rows = ResultRows(options.rows, ("variant", "epochs", "images", "seed"), VALUES)
    measure(options, rows)
    command = shown_command(
        ["scripts/bench_finetuning.py", *(sys.argv[1:] if arguments is None else arguments)],
        shortened={str(options.checkpoint): options.checkpoint.name, str(options.rows): "rows.csv"},
    )
    text = f"`{command}`\n\n{hardware_line()}\n\n{table(rows)}"
    print(text)
    if options.output:
        write_section(options.output, "bench_finetuning", "Fine-tuning at length", text)


if __name__ == "__main__":
    reuse_memory()
    main()
