"""`model=onnx`: what the tasks do with a network in an ONNX file, which nobody here trained."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from decomposition import CompressionPlan, list_heuristics
from decomposition.fit.fit_options import CHOOSING
from rankrl.cli.config import options
from rankrl.cli.config.schema import AppConfig
from rankrl.cli.tasks import steps
from rankrl.cli.tasks.compressed import method_of
from rankrl.errors import ConfigError, RunStoppedError
from rankrl.onnx.graph import GivenFile, ImagePreprocessing
from rankrl.onnx_compression import (
    Finishing,
    OnnxCompression,
    apply_onnx_plan,
    chosen_formats,
    compress_file,
)
from rankrl.options.datasets import InputsOptions
from rankrl.plan_search.run import search_numbers
from rankrl.report import LayerRow
from rankrl.runs.run_folder import RunFolder, cache_folder
from rankrl.verify.compression import missed_latency, summary
from rankrl.verify.measure import layer_row
from rankrl.wording import counted

INPUTS = "inputs"
"""The dataset that goes with it: inputs without labels."""
_LOOKED_UP = "it becomes a look-up: what it multiplies is a one-hot code"
_LITTLE = 0.5
"""Agreement with the original below which hardly anyone would use a network."""
_WIDTH = 160


def compress(config: AppConfig, folder: RunFolder) -> None:
    """Write the compressed network as `model.onnx`, with plan, report and metrics."""
    path, inputs = _files(config)
    images = _images(config, inputs)
    chosen = options.candidate_options(config)
    if chosen.channels:
        raise ConfigError("decomposition.channels removes channels of PyTorch networks; leave it out here")
    if chosen.blocks:
        raise ConfigError("decomposition.blocks removes blocks of PyTorch networks; leave it out here")
    budget = config.budget
    if all(value is None for value in (budget.params, budget.macs, budget.bytes, budget.latency)):
        raise ConfigError(
            "model=onnx needs a budget: budget.latency=0.5 keeps at most half of the time; budget.params, "
            "budget.macs and budget.bytes likewise"
        )
    selector, selector_options = options.selector(config)
    try:
        result = compress_file(
            path,
            inputs,
            folder.onnx,
            replace(chosen, formats=_formats(config)),
            options.search_goal(config),
            selector,
            selector_options,
            _finishing(config),
            images=images,
            batch_axes=config.dataset.get("batch_axes"),
            options=replace(CHOOSING, iterations=chosen.iterations),
            cache=cache_folder(),
            folder=folder.path,
            on_episode=folder.tracking.episode,
            term=config.search.term,  # type: ignore[arg-type]  # checked there, with a message for users
        )
    except KeyboardInterrupt as error:
        raise RunStoppedError(folder.path) from error
    result.plan.save(folder.plan)
    missed = result.search.missed if result.search is not None else None
    missed = missed or missed_latency(budget.latency, result.latency)
    if missed is not None:
        folder.miss(missed)
    further: dict[str, Any] = {
        "decomposition": config.decomposition.format,
        "selector": selector,
        "budget": config.budget.fractions,
    }
    if result.search is not None and selector not in list_heuristics():
        further["search"] = search_numbers(result.search)
    _report(config, folder, result, images, further)


def apply(config: AppConfig, folder: RunFolder) -> None:
    """Carry out a plan and write the network as `model.onnx`."""
    path, inputs = _files(config)
    images = _images(config, inputs)
    if not config.plan:
        raise ConfigError("task=apply needs plan=RUN/plan.json, the plan of an earlier run or your own")
    plan = CompressionPlan.load(config.plan)
    finishing = _finishing(config)
    result = apply_onnx_plan(
        path,
        inputs,
        folder.onnx,
        plan,
        images=images,
        batch_axes=config.dataset.get("batch_axes"),
        timing=finishing.timing,
        weigh_outputs=finishing.weigh_outputs,
        final_options=finishing.options,
        seed=finishing.seed,
        cache=cache_folder(),
    )
    plan.save(folder.plan)
    _report(config, folder, result, images, method_of(plan))


def inspect(config: AppConfig, folder: RunFolder) -> None:
    """Print one row a node: shape, cost, and why it stays where it does."""
    del folder
    path, inputs = _files(config)
    chosen = config.decomposition
    given = GivenFile.read(
        path,
        inputs,
        images=_images(config, inputs),
        batch_axes=config.dataset.get("batch_axes"),
        skip=chosen.skip,
        only=chosen.only,
        seed=config.seed,
    )
    sites, totals = given.sites, given.totals
    table = Table(title=f"{path.name}: {totals['params']:,} parameters, {totals['macs']:,} MACs")
    table.add_column("node", overflow="fold")  # never cut: the names are what plans need
    table.add_column("operator")
    table.add_column("weight", no_wrap=True)
    for column in ("params", "share", "MACs", "share"):
        table.add_column(column, justify="right")
    table.add_column("stays because")
    for site in sites:
        spec = site.spec
        table.add_row(
            spec.name,
            site.op_type,
            "x".join(map(str, spec.weight_shape)),
            f"{spec.params:,}",
            f"{spec.params / max(1, totals['params']):.1%}",
            f"{spec.macs:,}",
            f"{spec.macs / max(1, totals['macs']):.1%}",
            spec.refusal or "",
        )
    for site in given.looked_up:
        table.add_row(
            site.name, site.op_type, "x".join(map(str, site.spec.weight_shape)), *[""] * 4, _LOOKED_UP
        )
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width
        console.width = _WIDTH
    console.print(table)


def _finishing(config: AppConfig) -> Finishing:
    """Return how a plan is carried out and judged."""
    timing = replace(config.export, folder=cache_folder() / "latencies")
    return Finishing(
        timing=timing,
        weigh_outputs=config.decomposition.weigh_outputs,
        options=options.final_fit(config),
        seed=config.seed,
    )


def _report(
    config: AppConfig,
    folder: RunFolder,
    result: OnnxCompression,
    images: ImagePreprocessing | None,
    further: dict[str, Any],
) -> None:
    """Write the numbers and the report."""
    metrics = {
        "task": config.task,
        "model": Path(config.model["path"]).stem,
        "dataset": Path(config.dataset["path"]).name,
        **({} if images is None else {"preprocessing": asdict(images)}),
        **further,
        "seed": config.seed,
        **summary(result),
        "rewritten": dict(result.rewritten),
        "heldout_inputs": result.heldout,
    }
    agreement = metrics["compressed"]["agreement"]
    if result.collapsed is not None:
        folder.collapse(result.collapsed)
    elif agreement < _LITTLE:
        folder.warn(
            f"the agreement with the original is {agreement:.2f}, of 1, on "
            f"{counted(result.heldout, 'held-out input')}: ask for a larger budget, or give more inputs"
        )
    Console().print(_outputs(result))
    steps.finish(folder, metrics, seed=config.seed, layers=_rows(result))


def _files(config: AppConfig) -> tuple[Path, Path]:
    """Return the paths of the network and of its inputs."""
    name = config.dataset.get("name")
    if name != INPUTS:
        raise ConfigError(
            f"model=onnx takes its inputs from a file, but dataset={name} is chosen; give "
            f"dataset={INPUTS} dataset.path=inputs.npz, one array for each input of the network"
        )
    return Path(config.model["path"]), Path(config.dataset["path"])


def _images(config: AppConfig, inputs: Path) -> ImagePreprocessing | None:
    """Return how images become inputs; None where no image is read.

    Raises:
        ConfigError: An option of images is given without a folder of them.
    """
    values = {name: config.dataset[name] for name in ("size", "resize", "scale", "order", "mean", "std")}
    if inputs.is_dir():
        return ImagePreprocessing(**values)
    defaults = {each.name: each.default for each in fields(InputsOptions)}
    given = [name for name, value in values.items() if value != defaults[name]]
    if given:
        raise ConfigError(
            f"dataset.{given[0]} is for a folder of images; {inputs} is none, and arrays in a file are taken "
            "as they are. Leave it out"
        )
    return None


def _formats(config: AppConfig) -> tuple[str, ...]:
    """Return the formats that nodes choose from: of several those that can be written as plain nodes."""
    names, writable = config.decomposition.choices, chosen_formats(None)
    return tuple(name for name in names if name in writable) or chosen_formats(names)


def _outputs(result: OnnxCompression) -> Table:
    """Return the table of outputs."""
    table = Table(title=f"Agreement with the original on {counted(result.heldout, 'held-out input')}")
    table.add_column("output", overflow="fold")
    table.add_column("same class", justify="right")
    table.add_column("relative error", justify="right")
    for each in result.outputs:
        table.add_row(each.name, "–" if each.top1 is None else f"{each.top1:.2%}", f"{each.error:.4f}")
    return table


def _rows(result: OnnxCompression) -> list[LayerRow]:
    specs = {site.name: site.spec for site in result.sites if site.spec.params}
    before = {site.name: site.spec for site in result.originals}
    rows = [
        layer_row(layer, before[layer.name], specs[layer.name], error=result.errors.get(layer.name))
        for layer in result.plan
        if layer.name in specs
    ]
    return [
        replace(row, reason=f"computes {result.rewritten[row.name]}") if row.name in result.rewritten else row
        for row in rows
    ]
