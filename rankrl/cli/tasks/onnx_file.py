"""`model=onnx`: what the tasks do with a network in an ONNX file, which nobody here trained."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
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
    TIMED_BATCH,
    Finishing,
    OnnxCompression,
    apply_onnx_plan,
    chosen_formats,
    compress_file,
)
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.run import search_numbers
from rankrl.report import LayerRow
from rankrl.runs.run_folder import RunFolder, cache_folder
from rankrl.verify.compression import missed_latency, summary
from rankrl.verify.measure import layer_row
from rankrl.wording import counted

INPUTS = "inputs"
"""The dataset that goes with it: inputs without labels."""
_LOOKED_UP = "it becomes a look-up: what it multiplies is a one-hot code"
_SELECTOR = "greedy"
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
    formats = _formats(config)
    selector, selector_options = _selector(config)
    term = _term(config)
    try:
        result = compress_file(
            path,
            inputs,
            folder.onnx,
            replace(chosen, formats=chosen_formats(formats)),
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
            **term,
        )
    except KeyboardInterrupt as error:
        raise RunStoppedError(folder.path) from error
    result.plan.save(folder.plan)
    missed = result.search.missed if result.search is not None else None
    missed = missed or missed_latency(budget.latency, result.latency)
    if missed is not None:
        folder.miss(missed)
    format_name = "auto" if formats is None or len(formats) > 1 else config.decomposition.format
    further: dict[str, Any] = {"decomposition": format_name, "selector": selector, "budget": _budget(config)}
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
    timing = LatencyOptions(
        batch=config.export.batch if _given("export.batch") else TIMED_BATCH,
        threads=config.export.threads,
        runs=config.export.runs,
        folder=cache_folder() / "latencies",
        reduce_range=config.export.reduce_range,
    )
    return Finishing(
        timing=timing,
        weigh_outputs=config.decomposition.weigh_outputs,
        options=options.final_fit(config),
        seed=config.seed,
    )


def _budget(config: AppConfig) -> dict[str, float]:
    """Return the fractions that may be kept, by their measures."""
    return {name: value for name, value in asdict(config.budget).items() if value is not None}


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
        ConfigError: An option of images is given without a folder of them, or one that means nothing here.
    """
    of_images = ("size", "resize", "scale", "order", "mean", "std")
    useless = [name for name in ("heldout", "train_images", "padding", "flip") if _given(f"dataset.{name}")]
    if useless:
        raise ConfigError(f"dataset.{useless[0]} means nothing for dataset={INPUTS}; leave it out")
    if inputs.is_dir():
        return ImagePreprocessing(**{name: config.dataset[name] for name in of_images})
    given = [name for name in of_images if _given(f"dataset.{name}")]
    if given:
        raise ConfigError(
            f"dataset.{given[0]} is for a folder of images; {inputs} is none, and arrays in a file are taken "
            "as they are. Leave it out"
        )
    return None


def _given(*names: str) -> bool:
    """Tell whether the command line sets one of these options or chooses in one of these groups."""
    return not {each.partition("=")[0] for each in _overrides()}.isdisjoint(names)


def _overrides() -> list[str]:
    """Return what the command line sets and chooses, as it says it."""
    return [str(each).lstrip("+~") for each in HydraConfig.get().overrides.task]


def _formats(config: AppConfig) -> tuple[str, ...] | None:
    """Return the formats that were asked for; the default is one for PyTorch networks."""
    if not _given("decomposition", "decomposition.format", "decomposition.formats"):
        return None
    names = config.decomposition.formats or [config.decomposition.format]
    if config.decomposition.format not in names and config.decomposition.formats is not None:
        writable = chosen_formats(None)
        return tuple(name for name in names if name in writable) or chosen_formats(tuple(names))
    return chosen_formats(tuple(names))


def _selector(config: AppConfig) -> tuple[str, dict[str, Any]]:
    """Return the selector's name and its options; without one given, greedy.

    Raises:
        ConfigError: An option of searches is given to a rule, which needs none, or the selector's own are
            wrong.
    """
    chosen = any(each.partition("=")[0].partition(".")[0] == "selector" for each in _overrides())
    name, given = options.selector(config) if chosen else (_SELECTOR, {})
    if name in list_heuristics():
        sections = ("search", "reward")
        idle = [each for each in _overrides() if each.partition("=")[0].partition(".")[0] in sections]
        if idle:
            raise ConfigError(
                f"{idle[0]} has no effect: selector={name} is a rule, which scores no plans; leave it out, "
                "or choose a selector that does, such as selector=bayes"
            )
    return name, given


def _term(config: AppConfig) -> dict[str, Any]:
    """Return what plans are scored by, where that is given: the default is one for labelled images."""
    return {"term": config.search.term} if _given("search.term") else {}


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
