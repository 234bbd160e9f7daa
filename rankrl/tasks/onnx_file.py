"""`model=onnx`: what the tasks do with a network in an ONNX file, which nobody here trained."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from rich.table import Table

from decomposition import list_heuristics
from rankrl.compression import summary
from rankrl.config import options
from rankrl.config.schema import AppConfig
from rankrl.errors import ConfigError
from rankrl.onnx_graph import (
    ImagePreprocessing,
    OnnxCompression,
    OnnxNetwork,
    chosen_formats,
    compress_onnx,
    find_sites,
    network_costs,
    read_inputs,
    split_inputs,
)
from rankrl.report import LayerRow
from rankrl.tasks import steps
from rankrl.tasks.registry import Task
from rankrl.workflow.latency import LatencyOptions
from rankrl.workflow.measure import layer_row
from rankrl.workflow.run_folder import RunFolder, cache_folder

INPUTS = "inputs"
"""The dataset that goes with it: inputs without labels."""
_SELECTOR = "greedy"
_BATCH = 16
_WIDTH = 160


def onnx_task(name: str) -> Task:
    """Return what a task does with a network in an ONNX file.

    Raises:
        ConfigError: It can do nothing with one.
    """
    if name not in _TASKS:
        raise ConfigError(
            f"task={name} has no use for model=onnx, a network in a file that is not trained here; choose "
            f"task={' or task='.join(_TASKS)}"
        )
    return _TASKS[name]


def compress(config: AppConfig, folder: RunFolder) -> None:
    """Write the compressed network as `model.onnx`, with plan, report and metrics."""
    path, inputs = _files(config)
    images = _images(config, inputs)
    timing = LatencyOptions(
        batch=config.export.batch if _given("export.batch") else _BATCH,
        threads=config.export.threads,
        runs=config.export.runs,
        folder=cache_folder() / "latencies",
    )
    chosen = options.candidate_options(config)
    if chosen.channels:
        raise ConfigError("decomposition.channels removes channels of PyTorch networks; leave it out here")
    budget = config.budget
    if all(value is None for value in (budget.params, budget.macs, budget.bytes, budget.latency)):
        raise ConfigError(
            "model=onnx needs a budget: budget.latency=0.5 keeps at most half of the time; budget.params, "
            "budget.macs and budget.bytes likewise"
        )
    formats, selector = _formats(config), _selector(config)
    result = compress_onnx(
        path,
        inputs,
        folder.onnx,
        params=budget.params,
        macs=budget.macs,
        bytes=budget.bytes,
        latency=budget.latency,
        decomposition=formats,
        precisions=chosen.precisions,
        images=images,
        selector=selector,
        timing=timing,
        candidates=chosen.candidates,
        multiple=chosen.multiple,
        weigh_outputs=chosen.weigh_outputs,
        final_options=options.final_fit(config),
        seed=config.seed,
        cache=cache_folder(),
    )
    result.plan.save(folder.plan)
    if budget.latency is not None and 1 / result.latency.ratio > budget.latency:
        folder.miss(
            f"budget.latency={budget.latency} is missed: the finished file keeps "
            f"{1 / result.latency.ratio:.3f} of the original's time. Measure on a quiet machine, or ask for "
            "a little less"
        )
    metrics = {
        "task": config.task,
        "model": path.stem,
        "dataset": inputs.name,
        **({} if images is None else {"preprocessing": asdict(images)}),
        "decomposition": "auto" if formats is None or len(formats) > 1 else config.decomposition.format,
        "selector": selector,
        "seed": config.seed,
        **summary(result),
    }
    console = Console()
    console.print(_outputs(result))
    steps.finish(folder, metrics, seed=config.seed, layers=_rows(result))


def inspect(config: AppConfig, folder: RunFolder) -> None:
    """Print one row a node: shape, cost, and why it stays where it does."""
    del folder
    path, inputs = _files(config)
    network = OnnxNetwork.load(path)
    given = read_inputs(inputs, network, _images(config, inputs))
    split = split_inputs(given, network, seed=config.seed)
    sites = find_sites(network, split.calibration[0])
    totals = network_costs(network, sites)
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
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width
        console.width = _WIDTH
    console.print(table)


_TASKS: dict[str, Task] = {
    name: Task(name, description, run)
    for name, description, run in (
        ("pipeline", "compress the network and write model.onnx", compress),
        ("inspect", "list the nodes, and why some stay as they are", inspect),
    )
}


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
    given = {str(each).lstrip("+~").partition("=")[0] for each in HydraConfig.get().overrides.task}
    return not given.isdisjoint(names)


def _formats(config: AppConfig) -> tuple[str, ...] | None:
    """Return the formats that were asked for; the default is one for PyTorch networks."""
    if not _given("decomposition", "decomposition.format", "decomposition.formats"):
        return None
    names = config.decomposition.formats or [config.decomposition.format]
    if config.decomposition.format not in names and config.decomposition.formats is not None:
        writable = chosen_formats(None)
        return tuple(name for name in names if name in writable) or chosen_formats(tuple(names))
    return chosen_formats(tuple(names))


def _selector(config: AppConfig) -> str:
    name = str(config.selector["name"]) if _given("selector", "selector.name") else _SELECTOR
    if name not in list_heuristics():
        raise ConfigError(
            f"selector={name} scores plans of PyTorch networks; for model=onnx choose from "
            f"{', '.join(list_heuristics())}"
        )
    return name


def _outputs(result: OnnxCompression) -> Table:
    """Return the table of outputs."""
    table = Table(title="Agreement with the original on held-out inputs")
    table.add_column("output", overflow="fold")
    table.add_column("same class", justify="right")
    table.add_column("relative error", justify="right")
    for each in result.outputs:
        table.add_row(each.name, "–" if each.top1 is None else f"{each.top1:.2%}", f"{each.error:.4f}")
    return table


def _rows(result: OnnxCompression) -> list[LayerRow]:
    specs = {site.name: site.spec for site in result.sites if site.spec.params}
    return [
        layer_row(layer, specs[layer.name], specs[layer.name], error=result.errors.get(layer.name))
        for layer in result.plan
        if layer.name in specs
    ]
