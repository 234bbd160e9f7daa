"""One tensor format for all layers against a format of its own for each, before fine-tuning.

    RANKRL_DATA=data python scripts/bench_mixed_formats.py --checkpoints cifar10-resnet20.th --rows rows.csv

Every row is greedy's plan for a budget, refitted layer by layer and measured on the test images of CIFAR-10.
`auto` lets every layer take from the candidates of all formats listed. Fits are kept in `--fits` and finished
rows in `--rows`, so that a killed run goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench_decomposition import load_network
from result_rows import ResultRows

from decomposition import (
    Budget,
    Factorise,
    FitLibrary,
    apply_plan,
    contracted,
    count_macs,
    count_parameters,
    get_heuristic,
    inspect_layers,
    list_formats,
    plan_from_choices,
)
from rankrl.data import load_dataset
from rankrl.data.calibration import calibration_images
from rankrl.report.markdown import shown_command, write_section
from rankrl.report.provenance import hardware_line
from rankrl.training import report_accuracy

BUDGETS = {"4x params": ("params", 1 / 4), "8x params": ("params", 1 / 8), "0.5 MACs": ("macs", 0.5)}
AUTO = "auto"


def measure(
    checkpoint: Path, formats: tuple[str, ...], options: argparse.Namespace, rows: ResultRows
) -> None:
    """Add the rows of one network and one set of formats."""
    network = checkpoint.stem.rsplit("-", 1)[-1]
    label = formats[0] if len(formats) == 1 else AUTO
    keys = {name: {"network": network, "formats": label, "budget": name} for name in BUDGETS}
    wanted = [name for name, key in keys.items() if rows.find(key) is None]
    if not wanted:
        return
    model, data = load_network(checkpoint, network), load_dataset("cifar10")
    images = calibration_images(data, options.calibration, seed=0)
    library = FitLibrary.calibrated(
        model, data.input_shape, formats, images.split(256), folder=options.fits and options.fits / network
    )
    print(f"{network}, {label}: fitting the candidates ...", file=sys.stderr, flush=True)
    sites, specs = library.all_candidates(), inspect_layers(model, data.input_shape)
    for name in wanted:
        budget = Budget.of_model(model, sites, data.input_shape, *BUDGETS[name])
        choices = get_heuristic("greedy").choose(library, sites, budget)
        plan = plan_from_choices(sites, choices, specs, data.input_shape, "greedy")
        small = apply_plan(model, plan, images)
        accuracy = report_accuracy(contracted(small), data.test, mean=data.mean, std=data.std)
        formats = [operation.format for operation in plan.chosen(Factorise).values()]
        values = {
            "accuracy": 100 * accuracy,
            "params": count_parameters(small) / count_parameters(model),
            "macs": count_macs(small, data.input_shape) / count_macs(model, data.input_shape),
            "layers": ", ".join(f"{formats.count(each)} {each}" for each in sorted(set(formats))),
        }
        rows.add(keys[name], values)


def table(rows: ResultRows) -> str:
    """Return all rows as a Markdown table, one line for each network, budget and set of formats."""
    lines = [
        "| network | budget | formats | test accuracy, % | parameters kept | MACs kept | layers |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    order = {name: place for place, name in enumerate(BUDGETS)}
    for row in sorted(rows.rows, key=lambda row: (row["network"], order[row["budget"]])):
        lines.append(
            f"| {row['network']} | {row['budget']} | {row['formats']} | {float(row['accuracy']):.1f} | "
            f"{float(row['params']):.3f} | {float(row['macs']):.3f} | {row['layers']} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Read the command line, measure what is missing, print and perhaps save the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--checkpoints",
        type=Path,
        nargs="+",
        required=True,
        help="weights of CIFAR-10 ResNets, cifar10-resnetN.th",
    )
    parser.add_argument(
        "--formats", nargs="+", choices=list_formats(), default=["cp", "tucker", "tensor_ring"]
    )
    parser.add_argument("--calibration", type=int, default=768, help="images (default 768)")
    parser.add_argument("--fits", type=Path, help="folder of fits that later runs reuse")
    parser.add_argument("--rows", type=Path, required=True, help="CSV file of finished rows")
    parser.add_argument("--output", type=Path, help="Markdown file whose section is replaced, or CSV file")
    options = parser.parse_args()
    rows = ResultRows(
        options.rows, ["network", "budget", "formats"], ["accuracy", "params", "macs", "layers"]
    )
    for checkpoint in options.checkpoints:
        for formats in (*((name,) for name in options.formats), tuple(options.formats)):
            measure(checkpoint, formats, options, rows)
    command = shown_command(
        sys.argv,
        shortened={str(path): path.name for path in options.checkpoints},
        dropped=["--rows", "--fits"],
    )
    text = f"`{command}`\n\n{hardware_line()}\n\n{table(rows)}"
    print(text)
    if options.output:
        write_section(options.output, "bench_mixed_formats", "A format for each layer", text)


if __name__ == "__main__":
    main()
