"""List layers, write reports of runs, and write kits."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from decomposition import CandidateSet, CompressionPlan, Factorise, LayerSpec, get_format, inspect_layers
from decomposition.network.layers import skipping
from decomposition.progress import Deadline, progress_bar
from rankrl import compression
from rankrl.bench.task import answering_tasks
from rankrl.cli.tasks.compression import add_notes, command, print_end
from rankrl.cli.tasks.task_run import TaskRun
from rankrl.errors import ConfigError, ExportError, counted
from rankrl.file_compression import FileSource
from rankrl.kits.kit import FinishedFile, WrittenKit, write_verify_kit
from rankrl.onnx.export import quantise_onnx
from rankrl.onnx.runtimes import check_runtimes
from rankrl.plan_search.compare import (
    FinalTest,
    compare_selectors,
    compared_row,
    compared_searches,
    search_all,
)
from rankrl.plan_search.selectors import selector_class
from rankrl.report import collect_setup, write_sweep_report
from rankrl.report.comparison import (
    MEASURES,
    SHORT,
    ComparisonRow,
    by_selector,
    mean_over_tasks,
    means_table,
    seeds_note,
    spread,
    write_comparison,
)
from rankrl.report.run_folder import read_metrics
from rankrl.report.run_tables import Table, rival_note
from rankrl.request import Request, opened_session
from rankrl.runs.run_folder import RunFolder
from rankrl.training.networks import model_title
from rankrl.verify.file_export import export_dense
from rankrl.verify.measure import (
    ImageInputs,
    file_batches,
    network_numbers,
    range_batches,
    with_preprocessing,
)

log = logging.getLogger(__name__)

_LOOKED_UP = "it becomes a look-up: what it multiplies is a one-hot code"
_FITTED_RANKS = 3  # of each layer, as examples
_WIDTH = 160  # characters of a line in a file or a pipe
_COSTS = ("weight", "params", "share", "MACs", "share")


def inspect(run: TaskRun) -> None:
    """Print one row for each layer: shape, cost, and feasible ranks or the reason that it stays.

    `inspect.errors` adds relative output errors on training images.
    """
    if run.in_file:
        _show_nodes(_source(run), run.request())
        return
    candidates = run.request().timed_candidates()
    specs = skipping(inspect_layers(run.network, run.data.input_shape), candidates.skip, candidates.only)
    fitted = _fitted(run, specs) if run.config.inspect.errors else None
    params, macs = sum(spec.params for spec in specs), sum(spec.macs for spec in specs)

    def cells(spec: LayerSpec) -> list[str]:
        ranks = "" if spec.refusal else _ranks(spec, candidates.formats, tensorised=candidates.tensorised)
        examples = "" if fitted is None or spec.refusal else _examples(fitted[spec.name])
        return [*_cost_cells(spec, params, macs), ranks, spec.refusal or examples]

    title = f"{model_title(run.config.model, run.network)} as {run.config.decomposition.format}"
    why = "stays as it is because" if fitted is None else "rank: params, error"
    rows = [[spec.name, *cells(spec)] for spec in specs]
    _print(Table("", ["layer", *_COSTS, "ranks", why], rows, text_columns=(0, 1, 7), title=title))
    if fitted is None:
        Console().print("inspect.errors=true fits every layer at a few ranks and shows what they lose.")


def _show_nodes(source: FileSource, request: Request) -> None:
    """Print one row for each node of an ONNX file."""
    given = source.read(request)
    params, macs = given.totals["params"], given.totals["macs"]
    rows = [
        [site.spec.name, site.op_type, *_cost_cells(site.spec, params, macs), site.spec.refusal or ""]
        for site in given.sites
    ]
    rows += [
        [site.name, site.op_type, "x".join(map(str, site.spec.weight_shape)), *[""] * 4, _LOOKED_UP]
        for site in given.looked_up
    ]
    title = f"{source.path.name}: {params:,} parameters, {macs:,} MACs"
    columns = ["node", "operator", *_COSTS, "stays because"]
    _print(Table("", columns, rows, text_columns=(0, 1, 2, 7), title=title))


def _print(table: Table) -> None:
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no width; rich would assume 80
        console.width = _WIDTH
    console.print(table)


def _source(run: TaskRun) -> FileSource:
    path, inputs, read = run.file()
    return FileSource(path, inputs, **read)


def _cost_cells(spec: LayerSpec, params: int, macs: int) -> list[str]:
    """Return a layer's shape and costs, with its shares of the whole network's."""
    costs = ((spec.params, params), (spec.macs, macs))
    shares = [(f"{cost:,}", f"{cost / max(total, 1):.1%}") for cost, total in costs]
    return ["x".join(map(str, spec.weight_shape)), *shares[0], *shares[1]]


def _fitted(run: TaskRun, specs: Sequence[LayerSpec]) -> Mapping[str, CandidateSet]:
    """Return a few fitted candidates of every layer that can be decomposed."""
    request, known = run.request(), run.searched_network(run.network)
    library = known.library(request.timed_candidates(), cache=request.fits, seed=request.seed)
    sites = {}
    with progress_bar("fit layers", len(library.specs)) as bar:
        for spec in specs:
            if spec.refusal is None:
                sites[spec.name] = library.candidates(spec.name, limit=_FITTED_RANKS)
                bar.advance()
    return sites


def _ranks(spec: LayerSpec, formats: Sequence[str], *, tensorised: bool) -> str:
    """Format the feasible ranks, for each format if there are several."""
    known = [(name, get_format(name)) for name in formats]
    most = {name: each.max_rank(each.modes(spec, tensorised=tensorised)) for name, each in known}
    return "\n".join(f"{name if len(most) > 1 else ''} 1-{rank}".strip() for name, rank in most.items())


def _examples(site: CandidateSet) -> str:
    shown = [
        f"{operation.format + ' ' if site.mixed else ''}{max(operation.ranks)}: "
        f"{candidate.cost.params:,}, {candidate.error:.1%}"
        for candidate in site.candidates
        for operation in candidate.operations
        if isinstance(operation, Factorise)
    ]
    return "; ".join(shown) or "no rank makes it smaller"


def compare(run: TaskRun) -> None:
    """Search with every selector and seed, and write one table, page and set of metrics."""
    config, folder = run.config, run.folder
    rows, metrics = (_compared if config.bench is None else _compared_on_tables)(run)
    means = mean_over_tasks(rows)
    metrics["search"] |= {
        "episodes": sum(row.episodes for row in rows),
        "evaluations": sum(row.evaluations for row in rows),
        "seconds": sum(row.seconds for row in rows),
        "best_reward": max(row.best_reward for row in means),
    }
    metrics["compare"] = {
        selector: {
            "runs": len(runs),
            **{name: asdict(found) for name in MEASURES if (found := spread(runs, name)) is not None},
        }
        for selector, runs in by_selector(means).items()
    }
    add_notes(metrics, folder)
    setup = collect_setup(command(), config.seed)
    if config.bench is not None:
        setup["Seed"] = ", ".join(map(str, config.compare.seeds))
    page = write_comparison(folder.path, rows, metrics, setup, latex=config.compare.latex)
    folder.finish(metrics)
    numbers = seeds_note(means)
    notes = [f"{note}." for note in (numbers and f"Numbers: {numbers}", rival_note(metrics)) if note]
    print_end(metrics, page, [means_table(means, " ".join(notes), SHORT)])


def _compared(run: TaskRun) -> tuple[list[ComparisonRow], dict[str, Any]]:
    """Search on a network, and fine-tune the plans with one recipe.

    Every search keeps its state in `searches/NAME-SEED`; `plan.json` is the plan with the best reward.
    """
    applied, folder = run.config.compare.apply, run.folder
    run.check(finetuning=applied and run.config.finetune.epochs > 0)
    entered = compared_searches(run.compared_selectors(), run.config.compare.seeds)
    if not run.checkpoint:  # else no training is saved, and the search checks before it fits
        run.check_budget()
    recipe, data = run.tuning_recipe(heldout_is_new=run.heldout_is_new), run.data
    teacher = run.teacher if applied else None
    network = run.searched_network(run.dense)
    source = run.dense if teacher is None else teacher.network
    final = FinalTest(data, source, recipe, folder.state / "plans") if applied else None
    request = replace(run.request(), deadline=Deadline(math.inf))  # each search has its own
    with opened_session(network, request.timed_candidates(), request) as session:
        best, rows = compare_selectors(session, entered, folder.searches, final)
    with_preprocessing(best.plan, data.preprocessing).save(folder.plan)
    return rows, {
        **run.head(run.searched),
        "selector": ",".join(run.config.compare.selectors),
        "baseline": network_numbers(run.dense, data),
        "search": {key: name for key, name in best.objective.items() if key != "action"},
        "dense_int8": network.dense_int8() if applied else None,
    }


def _compared_on_tables(run: TaskRun) -> tuple[list[ComparisonRow], dict[str, Any]]:
    """Search RankBench's tables; every search keeps its state and plan in `searches/TASK/NAME-SEED`."""
    config, folder, entries = run.config, run.folder, run.compared_selectors()
    without = [each for each in entries if not selector_class(each.selector).needs_weights]
    left_out = ", ".join(each.text for each in entries if each not in without)
    if entries and not without:
        raise ConfigError(
            f"no table has the weights that {left_out} look at; name others in compare.selectors"
        )
    if left_out:
        folder.warn(f"left out, as they look at weights, which tables lack: {left_out}")
    entered = compared_searches(without, config.compare.seeds)
    tasks = answering_tasks([config.bench] if isinstance(config.bench, str) else config.bench or ())
    rows = []
    for task in tasks:
        log.info("compare: %s", task.name)
        own = folder.searches / task.name.replace(" ", "_")
        results = search_all(task.problem, config.search, partial(task.searched, config.search), entered, own)
        rows += [
            compared_row(compared, result, regret=task.regret(result.key), task=task.name)
            for compared, result in results.items()
        ]
    return rows, {
        "task": config.task,
        "model": tasks[0].name if len(tasks) == 1 else counted(len(tasks), "task"),
        "dataset": "RankBench",
        "bench": [task.name for task in tasks],
        "selector": ",".join(each.text for each in without),
        "search": {},
    }


def report(run: TaskRun) -> None:
    """Write `report.html` and `runs.csv` into the folder of the runs."""
    if not run.config.runs:
        raise ConfigError("task=report needs runs=FOLDER, the folder of a sweep or of several runs")
    page = write_sweep_report(run.config.runs)
    Console().print(f"report: {page}", soft_wrap=True)


def timing_kit(run: TaskRun) -> None:
    """Write the kit of a network."""
    asked = run.verb_arguments()
    shared = {name: asked[name] for name in ("decomposition", "timing", "cache", "seed")}
    network, inputs, told = run.given()
    show(compression.timing_kit(network, inputs, run.folder.kit, **shared, **told))


def show(kit: WrittenKit, then: str = "Then search with timing.table=times.json") -> None:
    """Print the path of a kit and the next steps."""
    Console().print(
        f"kit: {counted(kit.files, 'file')}, {kit.bytes / 1e6:.1f} MB in {kit.folder}. Copy it to the device "
        f"and run `python measure.py` there, or open index.html in its browser (docs/devices.md). {then}",
        soft_wrap=True,
    )


def verify_kit(run: TaskRun) -> None:
    """Write the kit of the finished runs below `runs`, with the original in float32 and in integers."""
    check_runtimes(run.config.export)
    finished, scores = finished_files(run.config.runs)
    timing, folder = replace(run.export, pad_channels=False), run.folder
    told: dict[str, Any] = {}
    ranges: Any
    feed: Any
    if run.in_file:
        titles, source = ("original", "original in int8"), _source(run)
        file = source.read(run.request())
        path, ranges, feed = source.path, file.split.calibration, file.feed(timing.batch)
        told["cut"] = file.split.axes.parts
    else:
        titles, data = ("dense", "dense int8"), run.data
        path = export_dense(run.dense, ImageInputs(data, timing), folder.state)
        ranges, told["reduce_range"] = range_batches(data, timing), timing.reduce_range
        images, _ = next(file_batches(data.heldout.first(timing.batch), timing.batch, data, timing))
        feed = images.numpy()
    files, in_integers = [FinishedFile(titles[0], path, scores["dense"])], folder.state / "int8.onnx"
    try:
        quantise_onnx(path, in_integers, ranges, **told)
        files.append(FinishedFile(titles[1], in_integers, scores["dense int8"]))
    except ExportError as error:
        log.warning("the %s network in 8-bit integers is left out: %s", titles[0], error)
    show(write_verify_kit([*files, *finished], feed, folder.kit, timing), then="")


def finished_files(runs: str | Path | None) -> tuple[list[FinishedFile], dict[str, float | None]]:
    """Return the files of finished runs, and the scores of the dense network in float32 and in integers."""
    above = Path(runs or "")
    paths = [path for path in sorted(above.rglob("model.onnx")) if RunFolder(path.parent).finished]
    if not runs or not paths:
        raise ConfigError(
            f"give runs=FOLDER with task=verify_kit, a finished run or some; runs={runs} "
            "holds no model.onnx with its metrics.json"
        )
    files, dense, dense_int8 = [], None, None
    for path in paths:
        metrics = read_metrics(path.parent)
        title = path.parent.relative_to(above).as_posix()
        title = above.name if title == "." else title
        plan = RunFolder(path.parent).plan
        score = _score(metrics.get("compressed"), metrics.get("finetuned"))
        files.append(FinishedFile(title, path, score, CompressionPlan.load(plan) if plan.exists() else None))
        dense = _score(metrics.get("baseline")) if dense is None else dense
        dense_int8 = (metrics.get("dense_int8") or {}).get("accuracy") if dense_int8 is None else dense_int8
    return files, {"dense": dense, "dense int8": dense_int8}


def _score(*stages: Mapping[str, Any] | None) -> float | None:
    """Return the score of the last stage of a run that has one."""
    known = {name: value for each in stages for name, value in (each or {}).items() if value is not None}
    return known.get("accuracy", known.get("score"))
