"""Compress a PyTorch module, on a user's inputs or a data set's images, as a request asks."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from decomposition import (
    CompressionPlan,
    Inputs,
    plain_attention,
    plain_transposed,
    plain_weights,
    save_compressed,
)
from decomposition.cache import Cache
from decomposition.calibration.calibration_set import CalibrationInputs, checked_batches
from decomposition.network.inputs import input_shape_of, mapped, split
from decomposition.network.surgery import copied, unwrapped
from rankrl.data import ImageData
from rankrl.data.sample import CALIBRATION_BATCH, Sample, calibration_images, read_samples
from rankrl.device import model_device
from rankrl.errors import counted
from rankrl.kits.kit import WrittenKit
from rankrl.models.classifiers import check_classifier, network_digest
from rankrl.networks.module import FileModule, ModuleNetwork, ScoredModule, calibrating_images
from rankrl.options.search import BudgetOptions
from rankrl.options.timing import ExportOptions
from rankrl.plan_search.run import ChosenPlan, SearchResult, search_numbers
from rankrl.plan_search.scores.evaluators import EvaluatorOptions, Score
from rankrl.plan_search.scores.scoring import FunctionScoring, ImageScoring
from rankrl.plan_search.session import SearchSession, check_reachable
from rankrl.report.run_tables import HELDOUT_ACCURACY
from rankrl.request import Request, opened_session, write_kit
from rankrl.result import (
    MeasuredModule,
    Measurement,
    ModuleCompression,
    evaluate_compressed,
    finish,
    measurement,
    run_numbers,
    shallow,
    write_call,
)
from rankrl.runs.run_folder import SAME_CALL, RunFolder, check_writable
from rankrl.training import EpochRow, TrainingRecipe, TrainingResult, check_loss
from rankrl.training.loop import check_outputs
from rankrl.training.networks import FineTuner, Teacher, heldout_accuracy, run_training
from rankrl.verify.agreement import agreement_score
from rankrl.verify.fidelity import check_rewritten
from rankrl.verify.measure import (
    HeldoutScore,
    ImageInputs,
    OwnInputs,
    OwnMeasure,
    TestAccuracy,
    with_preprocessing,
)

log = logging.getLogger(__name__)


Tune = Callable[[nn.Module], tuple[nn.Module, Sequence[EpochRow]]]
"""Fine-tunes a network; returns it, or another, and the epochs."""


def compress_module(
    model: nn.Module,
    data: CalibrationInputs | ImageData,
    run: RunFolder,
    request: Request,
    tuner: FineTuner,
    *,
    claimed: bool = False,
    **told: Any,
) -> MeasuredModule:
    """Compress a PyTorch module; see `rankrl.compress`, `read_samples` for what is `told` of own inputs.

    Whoever claimed the run's folder writes the metrics, too.
    """
    model = unwrapped(model)
    request = request.timed_in(request.cache, run.state)
    request.check()
    record = {} if claimed else request.record(network_digest(model))
    if not claimed:
        check_writable(run.path, "target")
        if not request.overwrite:
            run.check(record, advice=SAME_CALL)
    if isinstance(data, ImageData):
        request = request.refitting()
        network, tune, further = _on_images(model, data, run, request, tuner)
    else:
        network, tune, further = _on_inputs(model, data, run, request, tuner, **told)
    if not claimed:
        run.begin(record)
    if not network.without_file:
        _ = network.baseline  # a network that cannot be exported is refused before anything takes time
    check_reachable(network, request.timed_candidates(), request.goal)
    search = choose_plan(network, request, run, claimed=claimed)
    compressed, tuned = network.applied(search.plan), None
    epochs: Sequence[EpochRow] = ()
    if tune is not None:
        tuned, epochs = tune(copied(compressed))
    if not claimed:
        run.remove_results()  # of an earlier same call, so that files of two calls never mix
        search.plan.save(run.plan)
    result = finish_module(
        network, search.plan, compressed, run, request.goal.budget, tuned=tuned, search=search
    )
    result, own = replace(result, epochs=tuple(epochs)), network.measure
    if isinstance(own, OwnMeasure) and own.unseen is not None and own.unseen.what == "test":
        scores = {"baseline": own.unseen(network.model), "compressed": own.unseen(result.model)}
        result = replace(result, test=scores)
    if not claimed:
        assert isinstance(result, ModuleCompression)
        numbers = run_numbers(result) | further
        if run.notes.trainings:
            numbers["trainings"] = run.notes.trainings
        if tuned is not None and isinstance(own, OwnMeasure):
            numbers["compressed"]["agreement"] = agreement_score(own.heldout.agreement(compressed))
        write_call(run, result, request, type(model).__name__, numbers)
    return result


def choose_plan(network: FileModule, request: Request, run: RunFolder, *, claimed: bool = True) -> ChosenPlan:
    """Search for a plan, recorded and tracked in a run's folder; it notes how images are made."""
    told: dict[str, Any] = {"on_episode": run.tracking.episode, "on_update": run.tracking.update}
    if not claimed:
        told |= {"anew_for_other_scores": True, "on_set_aside": run.remove_results}
    with opened_session(network, request.timed_candidates(), request) as session:
        search = session.choose(request.search_call(run.path, **told))
    if isinstance(search, SearchResult) and search.stopped_by == "interrupt":
        raise KeyboardInterrupt(f"the search was stopped; the same call goes on with it in {run.path}")
    if network.preprocessing is not None:
        search = replace(search, plan=with_preprocessing(search.plan, network.preprocessing))
    if claimed:
        search.plan.save(run.plan)
    return search


def finish_module(
    network: FileModule,
    plan: CompressionPlan,
    compressed: nn.Module,
    run: RunFolder,
    budget: BudgetOptions,
    *,
    tuned: nn.Module | None = None,
    search: ChosenPlan | None = None,
) -> MeasuredModule:
    """Write a compressed module as .safetensors and, unless that is left out, as a file, and measure it."""
    last = compressed if tuned is None else tuned
    save_compressed(last, plan, run.model, dense=network.model)
    module: dict[str, Any] = {"model": last.eval(), "dense": network.model, "folder": run.path}
    if network.without_file:
        measured = measurement(network, plan, compressed, tuned)
        known = evaluate_compressed(network, plan, compressed, measured, tuned=tuned, budget=budget)
        return MeasuredModule(**shallow(known), search=search, **module)

    def notes(plan: CompressionPlan, measured: Measurement) -> dict[str, str]:
        if not run.notes.about:
            return {"plan": plan.to_json()}
        found = {} if search is None else search_numbers(search)
        last = {"search": found.pop("search")} if "search" in found else {}
        return file_metadata(plan, {**run.notes.about, **found, **measured.stages(), **last})

    file = finish(network, plan, compressed, run.onnx, tuned=tuned, search=search, budget=budget, notes=notes)
    return ModuleCompression(**shallow(file), **module)


def file_metadata(plan: CompressionPlan, metrics: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of an ONNX file: plan and metrics, besides graph and preprocessing.

    The search's duration is left out, so that the file of a resumed run equals that of an uninterrupted one.
    """
    numbers = {key: value for key, value in metrics.items() if key not in ("preprocessing", "layers")}
    if "search" in numbers:
        numbers["search"] = {key: value for key, value in numbers["search"].items() if key != "seconds"}
    return {"plan": plan.to_json(), "metrics": json.dumps(numbers)}


def _on_inputs(
    model: nn.Module,
    data: CalibrationInputs,
    run: RunFolder,
    request: Request,
    tuner: FineTuner,
    *,
    score: Score | None,
    heldout: float | CalibrationInputs,
    test: CalibrationInputs | None,
) -> tuple[FileModule, Tune | None, dict[str, Any]]:
    """Read a user's inputs, and refuse those that cannot be used."""
    log.info("computes on %s, where the network is", model_device(model))
    dense, recipe = _plain(model), tuner.recipe
    fitted, held, tested = read_samples(
        data,
        heldout,
        test,
        dense,
        request.seed,
        skip=request.decomposition.skip,
        only=request.decomposition.only,
        score_reads_classes=score is None,
        loss_reads_classes=recipe is not None and tuner.loss is None,
    )
    if recipe is not None:
        check_loss(fitted.labels, tuner.loss)
    check_rewritten(model, dense, held.inputs)
    unseen = None if tested is None else HeldoutScore(dense, tested, "test")
    if request.goal.budget.drop is not None and unseen is None and score is None:
        held, certifying = held.parted(0.5, request.seed)  # inputs that certify a loss choose no plan
        unseen = HeldoutScore(dense, certifying, "unseen held-out")
    measure = HeldoutScore(dense, held)
    judge, unit = (measure, measure.unit) if score is None else (score, request.score_name or "score")
    batches = calibration_batches(fitted.inputs, dense)
    network = FileModule(
        dense,
        input_shape_of(batches[0]),
        batches,
        scoring=FunctionScoring(dense, judge, batches, unit),
        measure=OwnMeasure(judge, measure, unseen),
        files=OwnInputs(dense, fitted, held, request.timing),
        options=request.decomposition,
        export=request.timing,
        folder=run.state,
        seed=request.seed,
        progress=request.progress,
    )

    def tune(network: nn.Module) -> tuple[nn.Module, Sequence[EpochRow]]:
        tuned, training = tuner.tuned(network, dense, fitted, judge, request.progress)
        if training is None:
            return tuned, ()
        run.notes.trainings["finetune"] = training.numbers
        return tuned, training.history

    further: dict[str, Any] = {}
    if tuner.teacher is not None:
        further["teacher"] = _teacher_score(tuner, dense, held, measure)
    if score is None and measure.by_class and tested is None:
        further["score_name"] = HELDOUT_ACCURACY.title
    return network, None if tuner.strategy is None else tune, further


def _on_images(
    model: nn.Module, data: ImageData, run: RunFolder, request: Request, tuner: FineTuner
) -> tuple[FileModule, Tune | None, dict[str, Any]]:
    network = image_classifier(model, data, request, run.state)

    def tune(network: nn.Module) -> tuple[nn.Module, Sequence[EpochRow]]:
        if tuner.recipe is None:
            return tuner.trained_by_user(network, model), ()
        new = run.notes.about.get("heldout_is_new", True)
        teacher = tuner.image_teacher(data)
        epochs = finetune_in(run, network, data, tuner.recipe, model, teacher, heldout_is_new=new)
        return network, epochs

    return network, None if tuner.strategy is None else tune, {"dataset": data.name}


def image_classifier(model: nn.Module, data: ImageData, request: Request, folder: Path) -> FileModule:
    """Return a classifier of a data set: fitted to training images, reported on test images.

    Running statistics are re-estimated on augmented images, as those that the network was trained on.
    """
    check_classifier(model, data.input_shape, data.classes)
    count, seed, timing = request.calibration, request.seed, request.timing
    search, cache = request.refitting().goal.search, Cache(request.cache)
    export = timing if isinstance(timing, ExportOptions) else ExportOptions(**vars(timing))
    return FileModule(
        model,
        data.input_shape,
        calibrating_images(model, data, count, seed=seed).split(CALIBRATION_BATCH),
        data.preprocessing,
        scoring=ImageScoring(model, data, EvaluatorOptions.of(search, seed), search.images),
        measure=TestAccuracy(model, data, cache),
        files=ImageInputs(data, export),
        options=request.decomposition,
        export=export,
        folder=folder,
        without_file=export.skip,
        seed=seed,
        cache=cache,
        statistics=lambda: calibration_images(data, count, seed=seed, augmented=True),
    )


def scored_session(model: nn.Module, inputs: Any, score: Score, request: Request) -> SearchSession:
    batches = [part for batch in checked_batches(inputs, model) for part in split(batch, CALIBRATION_BATCH)]
    network = ScoredModule(
        model,
        input_shape_of(batches[0]),
        batches,
        judge=score,
        options=request.decomposition,
        seed=request.seed,
        progress=request.progress,
    )
    check_reachable(network, request.candidates(), request.goal)
    return opened_session(network, request.candidates(), request)


def dataset_session(model: nn.Module, data: ImageData, request: Request, folder: Path) -> SearchSession:
    request = request.refitting()
    network, candidates = image_classifier(model, data, request, folder), request.timed_candidates()
    check_reachable(network, candidates, request.goal)
    return opened_session(network, candidates, request)


def search_dataset(model: nn.Module, data: ImageData, request: Request, run: RunFolder) -> ChosenPlan:
    """Choose a plan for a data set's classifier, recorded in a run's folder that is claimed."""
    request = request.timed_in(request.cache, run.state)
    request.check()
    request = request.refitting()
    network = image_classifier(unwrapped(model), data, request, run.state)
    check_reachable(network, request.timed_candidates(), request.goal)
    search = choose_plan(network, request, run)
    if search.missed is not None:
        run.miss(search.missed)
    return search


def write_module_kit(
    model: nn.Module,
    data: CalibrationInputs | ImageData,
    folder: Path,
    request: Request,
    heldout: float | CalibrationInputs,
) -> WrittenKit:
    """Write the timing kit of a PyTorch module; see `rankrl.timing_kit`."""
    request.check()
    candidates = request.timed_candidates()
    if isinstance(data, ImageData):
        with TemporaryDirectory() as scratch:
            return write_kit(
                image_classifier(model, data, request, Path(scratch)), candidates, request, folder
            )
    dense = _plain(unwrapped(model))
    fitted, *_ = read_samples(
        data,
        heldout,
        None,
        dense,
        request.seed,
        skip=candidates.skip,
        only=candidates.only,
        score_reads_classes=False,
        loss_reads_classes=False,
    )
    batches = calibration_batches(fitted.inputs, dense)
    return write_kit(ModuleNetwork(dense, input_shape_of(batches[0]), batches), candidates, request, folder)


def _plain(model: nn.Module) -> nn.Module:
    """Rewrite attention, transposed convolutions and computed weights as plain layers."""
    return plain_transposed(plain_attention(plain_weights(model))).eval()


def calibration_batches(inputs: Inputs, model: nn.Module) -> list[Inputs]:
    device = model_device(model)
    return [mapped(lambda x: x.to(device), batch) for batch in split(inputs, CALIBRATION_BATCH)]


def _teacher_score(
    tuner: FineTuner, dense: nn.Module, held: Sample, measure: HeldoutScore
) -> dict[str, float]:
    """Log the teacher's score on the held-out inputs, and return it for metrics.json."""
    teacher = tuner.teacher_of(dense)
    check_outputs(teacher, dense, held.inputs)
    score = measure(teacher)
    log.info("fine-tune: %s of the teacher on held-out inputs: %.4f", measure.unit, score)
    return {measure.unit: score}


def train_in(
    run: RunFolder,
    stage: str,
    network: nn.Module,
    data: ImageData,
    recipe: TrainingRecipe,
    *,
    teacher: nn.Module | None = None,
) -> TrainingResult:
    """Train a network in place as a stage of a run, tracked; note the learning rate that was used."""
    title = "train" if stage == "train" else "fine-tune"
    result = run_training(
        title,
        network,
        data,
        recipe,
        state_file=run.training_state(stage),
        teacher=teacher,
        on_epoch=run.tracking.epochs(stage),
    )
    run.notes.trainings[stage] = result.numbers
    if result.halvings:
        run.warn(
            f"{title}: the training diverged at the learning rate {recipe.lr:.3g}; after "
            f"{counted(result.halvings, 'halving')} it was followed to the end at {result.lr:.3g}."
        )
    return result


def finetune_in(
    run: RunFolder,
    network: nn.Module,
    data: ImageData,
    recipe: TrainingRecipe,
    dense: nn.Module,
    teacher: Teacher | None = None,
    *,
    stage: str = "finetune",
    heldout_is_new: bool = True,
) -> Sequence[EpochRow]:
    """Fine-tune a compressed network in place, with the dense one as teacher if no other is given."""
    source = dense if teacher is None else teacher.network
    result = train_in(run, stage, network, data, recipe, teacher=source)
    if teacher is not None:
        run.notes.trainings[stage]["teacher"] = {"name": teacher.title, "accuracy": teacher.accuracy}
    if recipe.restore_best and result.epoch == 0:
        aim = heldout_accuracy(dense, data)
        kept = (
            f"fine-tune: no epoch was better on the held-out images than the network was before "
            f"({100 * result.start:.1f} %, the dense one {100 * aim:.1f} %); it is handed back as it was."
        )
        if result.start < aim:
            run.warn(f"{kept} Try another learning rate (optim.lr) or more epochs (finetune.epochs).")
        else:
            log.info("%s There was nothing to win back: finetune.epochs=0 leaves fine-tuning out.", kept)
    elif not heldout_is_new and result.accuracy < result.start:
        run.warn(
            f"fine-tune: the accuracy on the held-out images fell from {100 * result.start:.1f} to "
            f"{100 * result.accuracy:.1f} %. The dense network may have been trained on them, so they cannot "
            "tell whether that is a loss; compare with finetune.epochs=0."
        )
    return result.history
