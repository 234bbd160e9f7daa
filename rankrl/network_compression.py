"""`rankrl.compress`: from a module and some inputs to a smaller network, its file and a report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from decomposition import (
    count_macs,
    count_parameters,
    plain_attention,
    plain_transposed,
    plain_weights,
    save_compressed,
)
from decomposition.calibration.calibration_set import CalibrationInputs
from decomposition.network.inputs import input_shape_of, mapped, split
from decomposition.network.surgery import copied
from decomposition.network.wrappers import unwrapped
from decomposition.operations.base import FLOAT_BYTES
from rankrl.argument_types import checked_arguments
from rankrl.data.calibration import CALIBRATION_BATCH
from rankrl.data.sample import Sample, read_samples
from rankrl.device import model_device
from rankrl.errors import ConfigError
from rankrl.files import storage_errors, write_json
from rankrl.float32 import as_float32, back_in, in_float32, own_types
from rankrl.networks.candidates import CandidateOptions
from rankrl.onnx.export import export_onnx, verify_onnx
from rankrl.onnx.export.verification import BATCH_SIZES
from rankrl.options.budget import BudgetOptions
from rankrl.options.search import Cluster, SearchOptions
from rankrl.options.timing import LatencyOptions
from rankrl.plan_search.goal import SearchGoal
from rankrl.plan_search.module_session import session_on_inputs
from rankrl.plan_search.run import SearchResult, search_numbers
from rankrl.plan_search.scores.score_evaluator import Score, scored
from rankrl.plan_search.selectors import check_selector
from rankrl.progress import Progress, progress_bar
from rankrl.report import collect_setup, write_report
from rankrl.runs.call_record import call_record
from rankrl.runs.run_folder import SAME_CALL, RunFolder, check_writable
from rankrl.runs.run_lock import alone_in_folder
from rankrl.timing import fast_multiple
from rankrl.training import EpochRow, Loss, TrainingProgress, TrainingRecipe, check_loss, train_on
from rankrl.training.general import steps_of_an_epoch
from rankrl.verify.agreement import agreement_score
from rankrl.verify.compression import Compression, missed_latency, summary
from rankrl.verify.file_export import export_file
from rankrl.verify.measure import layer_rows
from rankrl.verify.own_inputs import HeldoutScore, OwnInputs
from rankrl.verify.rewritten import check_rewritten

log = logging.getLogger(__name__)

HELDOUT = 0.2
"""The share of the inputs that plans are scored on and results compared on; nothing is fitted to them."""

FineTuning = int | TrainingRecipe | Callable[[nn.Module], Any]
"""Epochs, a recipe, or a function that trains the network it is given, in training mode, in place (or returns
another)."""


@dataclass(frozen=True)
class NetworkCompression(Compression):
    """A compressed network and what is known of it.

    Attributes:
        model: The network: an ordinary module on the original's device, in evaluation mode.
        dense: The network that the plan was made for: the original, rewritten where `compress` says so.
            `decomposition.load_compressed(original, folder / "model.safetensors")` loads `model`.
        folder: Holds `plan.json`, `model.safetensors`, `model.onnx`, `metrics.json`, `episodes.csv` and
            `report.html`.
        search: The record of the search.
        compressed_score: The score before fine-tuning.
        epochs: The epochs of fine-tuning by a recipe.
        test: Score of the original (`baseline`) and of the compressed network (`compressed`) on the test
            inputs, if there are any.
        missed: What to tell a reader if the budget in time is missed, else None.
    """

    model: nn.Module
    dense: nn.Module
    folder: Path
    search: SearchResult
    compressed_score: float
    epochs: tuple[EpochRow, ...] = ()
    test: Mapping[str, float] | None = None
    missed: str | None = None


@checked_arguments(without=("model", "data", "heldout", "test", "finetune"))
@storage_errors()
@alone_in_folder
def compress(
    model: nn.Module,
    data: CalibrationInputs,
    folder: str | Path,
    *,
    params: float | None = None,
    macs: float | None = None,
    bytes: float | None = None,
    latency: float | None = None,
    score: Score | None = None,
    finetune: FineTuning | None = None,
    loss: Loss | None = None,
    heldout: float | CalibrationInputs = HELDOUT,
    test: CalibrationInputs | None = None,
    decomposition: str | Sequence[str] = "tucker",
    precisions: Sequence[str] = ("float32",),
    channels: Sequence[float] = (),
    blocks: bool = False,
    skip: Sequence[str] = (),
    only: Sequence[str] = (),
    selector: str = "greedy",
    selector_options: Mapping[str, Any] | None = None,
    episodes: int = 100,
    finalists: int = 1,
    candidates: int = 16,
    multiple: int | None = None,
    weigh_outputs: bool = True,
    timing: LatencyOptions | None = None,
    seed: int = 0,
    cache: str | Path | None = None,
    workers: int | None = None,
    cluster: Cluster = "local",
    worker_cpus: int = 1,
    worker_gpus: float = 0.0,
    progress: Progress = None,
) -> NetworkCompression:
    """Compress a network: choose what becomes of every layer, rewrite, fine-tune, export, verify and report.

    Args:
        model: The trained network, any module, on any device; it is left untouched. `nn.MultiheadAttention`
            inside gets linear layers for its projections (`decomposition.plain_attention`), transposed
            convolutions get 1x1 convolutions for their products (`decomposition.plain_transposed`), and
            weights computed at every call become parameters (`decomposition.plain_weights`).
        data: Inputs to fit to, a few hundred to some thousands, read into memory: one batch (a tensor, a
            tuple of tensors that the forward takes in order, or a dict of those it takes by name), batches of
            such, such as a data loader, or a dataset. Inputs may come in pairs with labels, or in a dict that
            holds `labels` or `targets` too: a tensor, or a nesting of tensors for a `loss` that takes it.
        folder: Where the network, its plan, its ONNX file, the numbers and the report are written. The same
            call again goes on with the search in it, also after it was killed, to the same plan; another
            network, budget or selector is refused. No two calls may work in it at once.
        params: Fraction of the parameters to keep at most, in (0, 1].
        macs: Fraction of the multiply-accumulates to keep at most.
        bytes: Fraction of the parameters' bytes to keep at most.
        latency: Fraction of the dense network's time in onnxruntime to keep at most. Give one of the four, or
            two to be kept at once.
        score: Function from a network to a number, higher is better; it must not read test data. When
            omitted, the accuracy on the held-out inputs if they have labels of classes (from 0; -100 for
            inputs without one), else the agreement of the outputs with the dense network's there.
        finetune: Epochs or a `TrainingRecipe` for our own training, or a function that trains the network
            which it is given, in place or returning another of the same parameters; None leaves it as it was
            fitted. Our training minimises `loss` on the labels, cross-entropy without `loss`; without labels
            it lets the network imitate the dense one. The epoch with the best score is kept.
        loss: From the network's outputs and the labels of a batch to a scalar.
        heldout: Share of `data` that plans are scored on and nothing is fitted to, or other inputs for that.
        test: Inputs like `data` that choose nothing: they are scored once, at the end, for the report.
        decomposition: Name of the tensor format, or names of several that every layer chooses from.
        precisions: What every layer may compute with or be stored in: `float32`, `int8`, `int8_weights`,
            `int4_weights`. `int8` becomes `int7` where weights have to have 7 bits (`LatencyOptions`).
        channels: Fractions of the channels between two layers that may be kept; empty keeps all.
        blocks: Whether whole residual blocks may be removed.
        skip: Layers that stay as they are: names of layers or of modules that hold some, or patterns of names
            (`layer1`, `*.downsample.*`).
        only: Layers that alone may change, named likewise; empty for all.
        selector: Name of what chooses: `greedy` needs no search; `ddpg`, `bayes_ddpg`, `tpe` and others do.
        selector_options: Its options.
        episodes: Plans to score at most.
        finalists: How many of the best plans are applied, refit and all, and scored again.
        candidates: Candidate ranks a layer and format at most.
        multiple: They are multiples of it; with a budget in time what suits the processor when omitted.
        weigh_outputs: Count channels and layers by what the network's output makes of them; it must be
            differentiable for that.
        timing: How time is measured.
        seed: Seed of everything random.
        cache: Where fits and times are kept for later calls; None keeps times in `folder`, for this call.
        workers: As for `rankrl.search`, like the following.
        cluster: Where the workers are.
        worker_cpus: Processor cores of each.
        worker_gpus: GPUs of each on a Ray cluster.
        progress: Where progress goes: None draws bars on a terminal, False shows nothing; a function is
            called with the stage, the number of its steps that are done and of all.

    Returns:
        The compressed network and what is known of it.

    Raises:
        ConfigError: No budget or more than two are given, an option is unknown, out of range or contradicts
            another, or the folder holds the results of another call.
        DataError: There are too few inputs, labels for some of them alone or out of range, or the network's
            own outputs are not finite.
        DecompositionError: No layer can be decomposed, no plan reaches the budget, or the inputs cannot be
            used.
        ExportError: The network cannot be exported, or its file computes something else.
        NonFiniteError: A score or a loss is NaN or infinite.
        KeyboardInterrupt: The search was interrupted; the same call goes on with it.
        StorageError: The folder cannot be written, another call works in it (`FolderInUseError`), or the
            disk is full.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"compress takes a torch.nn.Module, got a {type(model).__name__}")
    model = unwrapped(model)
    recipe = _checked_recipe(finetune, loss)
    run, kept = RunFolder(Path(folder)), None if cache is None else Path(cache)
    timing = (LatencyOptions() if timing is None else timing).kept_in(kept, run.state)
    limits = SearchOptions(
        finalists=finalists,
        episodes=episodes,
        workers=workers,
        cluster=cluster,
        worker_cpus=worker_cpus,
        worker_gpus=worker_gpus,
    )
    goal = SearchGoal(BudgetOptions(params, macs, bytes, latency), limits, timing)
    if goal.needs_budget:
        raise ConfigError("give a budget: params=0.4 keeps at most 40 % of the parameters, latency= likewise")
    formats = (decomposition,) if isinstance(decomposition, str) else tuple(decomposition)
    chosen = CandidateOptions(
        formats,
        precisions=tuple(precisions),
        reduce_range=timing.reduce_range,
        candidates=candidates,
        multiple=1 if multiple is None else multiple,
        weigh_outputs=weigh_outputs,
        channels=tuple(channels),
        blocks=blocks,
        skip=tuple(skip),
        only=tuple(only),
    )
    check_selector(selector, selector_options or {}, goal.setting(chosen))
    check_writable(run.path, "folder")
    record = call_record(model, chosen, goal, selector, selector_options or {}, seed=seed)
    run.check(record, advice=SAME_CALL)
    if multiple is None and latency is not None:
        chosen = replace(chosen, multiple=fast_multiple(timing.folder))
    dense = plain_transposed(plain_attention(plain_weights(model))).eval()
    fitted, held, tested = read_samples(
        data,
        heldout,
        test,
        dense,
        seed,
        skip=chosen.skip,
        only=chosen.only,
        score_reads_classes=score is None,
        loss_reads_classes=recipe is not None and loss is None,
    )
    if recipe is not None:
        check_loss(fitted.labels, loss)
    check_rewritten(model, dense, held.inputs)
    measure = HeldoutScore(dense, held)
    judge: Score = measure if score is None else score
    run.prepare()
    run.claim(record, (), resume=True)
    shape = input_shape_of(fitted.inputs)
    baseline = export_onnx(
        dense, run.state / "dense.onnx", shape, channel_block=timing.channel_block, progress=False
    ).path
    verify_onnx(dense, baseline, split(held.inputs, max(BATCH_SIZES))[0])
    device = model_device(dense)
    batches = [mapped(lambda x: x.to(device), each) for each in split(fitted.inputs, CALIBRATION_BATCH)]
    session = session_on_inputs(
        dense,
        batches,
        judge,
        chosen,
        goal,
        cache=None if kept is None else kept / "fits",
        seed=seed,
        progress=progress,
    )
    with session:
        found = session.search(
            selector,
            selector_options or {},
            seed=seed,
            folder=run.path,
            anew_for_other_scores=True,
            on_set_aside=run.remove_results,
        )
    if found.stopped_by == "interrupt":
        raise KeyboardInterrupt(f"the search was stopped; the same call goes on with it in {run.path}")
    compressed = session.applied(found.plan)
    rows = layer_rows(found.plan, dense, compressed)
    tuned: nn.Module = compressed
    epochs: Sequence[EpochRow] = ()
    if finetune is not None:
        tuned, epochs = _tuned(copied(compressed), dense, finetune, recipe, fitted, judge, loss, progress)
    run.remove_results()  # of the same call before: never files of two beside each other
    found.plan.save(run.plan)
    save_compressed(tuned, found.plan, run.model, dense=dense)

    inputs = OwnInputs(dense, fitted, held, timing.batch)
    section, times = export_file(
        tuned,
        baseline,
        inputs,
        run.onnx,
        opset=None,
        channel_block=timing.channel_block,
        reduce_range=timing.reduce_range,
        timing=timing.timing,
        metadata={"plan": found.plan.to_json()},
        scratch=run.state,
    )
    missed = found.missed or missed_latency(latency, times)
    networks = dict.fromkeys((compressed, tuned))
    score_of = {each: scored(judge, each, "the compressed network") for each in networks}
    before = {"params": count_parameters(dense), "macs": count_macs(dense, shape)}
    after = {"params": count_parameters(tuned), "macs": count_macs(tuned, shape)}
    result = NetworkCompression(
        path=run.onnx,
        plan=found.plan,
        before={**before, "bytes": FLOAT_BYTES * before["params"], "file_bytes": baseline.stat().st_size},
        after={
            **after,
            "bytes": session.problem.cost(found.chosen.key).bytes,
            "file_bytes": run.onnx.stat().st_size,
        },
        outputs=tuple(inputs.agreement(baseline, run.onnx)),
        score=score_of[tuned],
        baseline_score=scored(judge, dense, "the dense network"),
        verified=section["max_abs_difference"],
        errors={row.name: row.error for row in rows if row.error},
        latency=times,
        model=tuned.eval(),
        dense=dense,
        folder=run.path,
        search=found,
        compressed_score=score_of[compressed],
        epochs=tuple(epochs),
        test=None if tested is None else _tested(dense, tuned, tested),
        missed=missed,
        collapsed=measure.collapsed(tuned),
    )
    metrics: dict[str, Any] = {
        "task": "compress",
        "model": type(model).__name__,
        "decomposition": formats[0] if len(formats) == 1 else "auto",
        "selector": selector,
        "seed": seed,
        **_numbers(result, section),
    }
    if tuned is not compressed:
        metrics["compressed"]["agreement"] = agreement_score(measure.agreement(compressed))
    setup = collect_setup(["rankrl.compress"], seed)
    write_report(run.path, metrics=metrics, layers=rows, epochs=epochs, setup=setup)
    write_json(run.metrics, metrics)
    if missed is not None:
        log.warning(missed)
    if result.collapsed is not None:
        log.error(result.collapsed)
    return result


def _checked_recipe(finetune: FineTuning | None, loss: Loss | None) -> TrainingRecipe | None:
    """Return how to fine-tune, or None where a function does, or nobody.

    Raises:
        ConfigError: It is none of what it may be.
    """
    if isinstance(finetune, TrainingRecipe):
        return finetune
    if isinstance(finetune, int) and not isinstance(finetune, bool):
        return TrainingRecipe(epochs=finetune)
    if finetune is not None and not callable(finetune):
        raise ConfigError(
            f"finetune is a {type(finetune).__name__}; give a number of epochs, a rankrl.TrainingRecipe, or "
            "a function that trains the network that it is given"
        )
    if loss is not None:
        raise ConfigError(
            "loss= is for our own training; give finetune= a number of epochs or a recipe"
            + (", or leave loss= to your function" if callable(finetune) else "")
        )
    return None


def _tuned(
    network: nn.Module,
    dense: nn.Module,
    finetune: FineTuning,
    recipe: TrainingRecipe | None,
    fitted: Sample,
    judge: Score,
    loss: Loss | None,
    progress: Progress,
) -> tuple[nn.Module, Sequence[EpochRow]]:
    """Return the fine-tuned network, and the epochs of our own training."""
    types = own_types(network)
    if loss is None:
        fitted = fitted.labelled()
    if recipe is None:
        assert callable(finetune)
        returned = finetune(network.train())
        tuned = returned if isinstance(returned, nn.Module) else network
        # A Trainer of Lightning's leaves it on the CPU, and may leave it in another type.
        return back_in(tuned.to(model_device(dense)), types).eval(), ()
    steps = recipe.epochs * steps_of_an_epoch(len(fitted), recipe.batch_size)
    with progress_bar("fine-tune", total=steps, progress=progress) as bar:

        def show(state: TrainingProgress) -> None:
            bar.update(state.step, best=state.best_accuracy)

        # Steps of a small rate are lost in types of few digits.
        trained = in_float32(network, keep_double=True)
        result = train_on(
            trained,
            as_float32(fitted.inputs, keep_double=True),
            fitted.labels,
            recipe,
            score=judge if types == own_types(trained) else lambda each: judge(back_in(copied(each), types)),
            loss=loss,
            teacher=in_float32(dense, keep_double=True),
            on_step=show,
        )
    return back_in(trained, types), result.history


def _tested(dense: nn.Module, network: nn.Module, test: Sample) -> dict[str, float]:
    """Return how good both networks are on the test inputs: accuracy, or agreement with the dense one."""
    measure = HeldoutScore(dense, test, "test")
    return {"baseline": measure(dense), "compressed": measure(network)}


def _numbers(result: NetworkCompression, onnx: Mapping[str, Any]) -> dict[str, Any]:
    """Return what metrics.json says of a compressed network; `agreement` is that of the last one."""
    numbers = summary(result)
    last = numbers["compressed"]
    tuned = {"score": last["score"], "agreement": last["agreement"]}
    numbers["compressed"] = {**last, "score": result.compressed_score}
    numbers["finetuned"] = tuned
    if result.test is not None:
        numbers["baseline"]["accuracy"] = result.test["baseline"]
        tuned["accuracy"] = result.test["compressed"]
    numbers["onnx"] = {**numbers["onnx"], **onnx}
    numbers["search"] = search_numbers(result.search)
    numbers["epochs"] = [asdict(row) for row in result.epochs]
    numbers["warnings"] = [text for text in (result.missed, result.collapsed) if text is not None]
    return numbers
