"""What each part of rounding to integers is worth: all of them, and all but one.

    RANKRL_DATA=data python scripts/bench_rounding.py --checkpoint cifar10-resnet20.th --rows rows.csv

Every row is a plan of CP factors and integers, refitted and rounded on unlabelled training images and
measured on the test images of CIFAR-10, without fine-tuning, for several draws of the images. Finished rows
are kept in `--rows`, so that a killed run goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from bench_decomposition import load_network
from result_rows import ResultRows
from torch import nn

from decomposition import (
    CompressionPlan,
    FitLibrary,
    LayerPlan,
    Quantise,
    apply_plan,
    calibrate_ranges,
    fingerprint,
    inspect_layers,
    plan_by_heuristic,
)
from decomposition.fit import rounding as rounded_stages
from decomposition.network.rounding import rounded_weight
from decomposition.network.surgery import replace_module
from decomposition.operations import quantise
from rankrl.data import load_dataset
from rankrl.data.calibration import calibration_images
from rankrl.report.run_folder import hardware_line, shown_command, write_section
from rankrl.training import report_accuracy

ALL, AT_THE_END = "nothing", "the refit: rounded at the end, as a quantiser does"
NEAREST = "every weight to its nearest integer"
PARTS = {
    NEAREST: (
        (quantise, rounded_stages),
        "compensated_weight",
        lambda weight, moments, bits: rounded_weight(weight, bits),
    ),
    "the last stage not solved for anew": ((quantise,), "make_up", lambda layer, problem, bits: None),
    "channels between stages not equalised": ((quantise,), "equalise", lambda layer, metric: None),
    "ranks chosen without regard to noise": ((FitLibrary,), "_noise", lambda self, name, operation: 0.0),
}
"""What is replaced by what, in the variants without one part."""


@dataclass(frozen=True)
class Setting:
    """A kind of plan.

    Attributes:
        name: Its name in the table.
        measure: What greedy's budget counts; empty for dense layers that are all rounded alike.
        fraction: Fraction to keep.
        precisions: What layers choose from.
        variants: What is left out, in the order of the table.
    """

    name: str
    measure: str
    fraction: float
    precisions: tuple[str, ...]
    variants: tuple[str, ...]


SETTINGS = (
    Setting("dense, 4-bit weights", "", 1.0, ("int4_weights",), (ALL, NEAREST, AT_THE_END)),
    Setting(
        "1/12 of the bytes",
        "bytes",
        1 / 12,
        ("float32", "int8_weights", "int4_weights"),
        (ALL, *list(PARTS)[:2], AT_THE_END),
    ),
    Setting("1/4 of the parameters, in int8", "params", 1 / 4, ("int8",), (ALL, *PARTS, AT_THE_END)),
)


def plan_of(
    setting: Setting, model: nn.Module, shape: Sequence[int], images: torch.Tensor, fits: Path | None
) -> CompressionPlan:
    """Return greedy's plan, or that of the dense layers rounded alike."""
    if setting.measure:
        return plan_by_heuristic(
            model,
            shape,
            ["cp"],
            "greedy",
            setting.fraction,
            measure=setting.measure,
            calibration=images,
            precisions=setting.precisions,
            folder=fits,
        )
    specs = inspect_layers(model, shape)
    rounding = quantise.PRECISIONS[setting.precisions[0]]
    layers = tuple(LayerPlan(spec.name, rounding if spec.refusal is None else ()) for spec in specs)
    return CompressionPlan(layers, fingerprint(specs), tuple(shape))


def rounded_at_the_end(model: nn.Module, plan: CompressionPlan, images: torch.Tensor) -> nn.Module:
    """Return the network factorised and refitted in floating point, then rounded as a quantiser does."""
    layers = tuple(
        replace(layer, operations=tuple(o for o in layer.operations if not isinstance(o, Quantise)))
        for layer in plan.layers
    )
    network = apply_plan(model, replace(plan, layers=layers), images)
    specs = {spec.name: spec for spec in inspect_layers(model, plan.input_shape)}
    for name, operation in plan.chosen(Quantise).items():
        module = network.get_submodule(name)
        replace_module(network, module, operation.structure(module, specs[name]))
    calibrate_ranges(network, images.split(256))
    return network


@contextmanager
def without(variant: str) -> Iterator[None]:
    """Leave a part out, within the block."""
    if variant not in PARTS:
        yield
        return
    owners, name, instead = PARTS[variant]
    with ExitStack() as stack:
        for owner in owners:
            stack.enter_context(mock.patch.object(owner, name, instead))
        yield


def measure(options: argparse.Namespace, rows: ResultRows) -> None:
    """Measure what is missing in the rows."""
    model, data = load_network(options.checkpoint), load_dataset("cifar10")
    for seed, setting in product(range(options.seeds), SETTINGS):
        images = calibration_images(data, options.calibration, seed=seed)
        fits = options.fits and options.fits / str(seed)
        for variant in setting.variants:
            key = {"setting": setting.name, "without": variant, "seed": seed}
            if rows.find(key) is not None:
                continue
            with without(variant):
                plan = plan_of(setting, model, data.input_shape, images, fits)
                if variant == AT_THE_END:
                    network = rounded_at_the_end(model, plan, images)
                else:
                    network = apply_plan(model, plan, images)
            accuracy = report_accuracy(network, data.test, mean=data.mean, std=data.std)
            rows.add(key, {"accuracy": 100 * accuracy})
            print(
                f"{setting.name}, {variant}, draw {seed}: {100 * accuracy:.2f}", file=sys.stderr, flush=True
            )


def table(rows: ResultRows) -> str:
    """Return the rows as a Markdown table: mean and range over the draws."""
    lines = ["| plan | without | test accuracy, % |", "|---|---|---:|"]
    for setting in SETTINGS:
        for variant in setting.variants:
            matching = [
                float(row["accuracy"])
                for row in rows.rows
                if (row["setting"], row["without"]) == (setting.name, variant)
            ]
            if matching:
                shown = f"{np.mean(matching):.2f} ({min(matching):.2f} to {max(matching):.2f})"
                lines.append(f"| {setting.name} | {variant} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line, measure what is missing, print and perhaps save the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--checkpoint", type=Path, required=True, help="weights of a CIFAR-10 ResNet-20")
    parser.add_argument("--calibration", type=int, default=768, help="images (default 768)")
    parser.add_argument("--seeds", type=int, default=3, help="draws of the images (default 3)")
    parser.add_argument("--fits", type=Path, help="folder of fits that later runs reuse")
    parser.add_argument("--rows", type=Path, required=True, help="CSV file of finished rows")
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced, or CSV file")
    options = parser.parse_args()
    rows = ResultRows(options.rows, ["setting", "without", "seed"], ["accuracy"])
    measure(options, rows)
    command = shown_command(
        sys.argv,
        shortened={str(options.checkpoint): options.checkpoint.name},
        dropped=["--rows", "--fits"],
    )
    text = f"`{command}`\n\n{hardware_line()}\n\n{table(rows)}"
    print(text)
    if options.output:
        write_section(options.output, "bench_rounding", "Rounding to integers", text)


if __name__ == "__main__":
    main()
