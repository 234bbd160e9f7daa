"""Compress one network, a module or an ONNX file, as a request asks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from decomposition import (
    CompressionPlan,
    Inputs,
    list_heuristics,
    plain_attention,
    plain_transposed,
    plain_weights,
    save_compressed,
)
from decomposition.cache import digest
from decomposition.calibration.calibration_set import CalibrationInputs, checked_batches
from decomposition.files import announce_write
from decomposition.network.inputs import input_shape_of, mapped, split
from decomposition.network.surgery import copied, unwrapped
from decomposition.plan.plan import LayerPlan, fingerprint
from decomposition.progress import Progress, progress_bar
from rankrl.data import ImageData
from rankrl.data.calibration import CALIBRATION_BATCH
from rankrl.data.sample import Sample, read_samples
from rankrl.device import as_float32, back_in, in_float32, model_device, own_types
from rankrl.errors import ConfigError
from rankrl.kits.kit import WrittenKit
from rankrl.models.classifiers import check_classifier, network_digest
from rankrl.networks.graph import GraphNetwork, measured_sensitivities
from rankrl.networks.graph_scoring import FileMetric, OnnxScoring, SessionScore
from rankrl.networks.module import (
    FileModule,
    ModuleNetwork,
    ScoredModule,
    calibrating_images,
    heldout_scoring,
    image_network,
)
from rankrl.networks.network import CandidateOptions
from rankrl.onnx.graph.batch_axes import Axes
from rankrl.onnx.graph.inputs import HELDOUT, ImagePreprocessing
from rankrl.onnx.graph.positions import METADATA, from_metadata, to_metadata
from rankrl.onnx.graph.precisions import check_without_integers, without_integers
from rankrl.onnx.graph.prepared_file import FileInputs, PreparedFile
from rankrl.onnx.graph.refit import check_plan
from rankrl.onnx.graph.rewrite import check_formats
from rankrl.onnx.runtimes import check_runtimes
from rankrl.options.tasks import CalibrationOptions
from rankrl.options.timing import ExportOptions
from rankrl.plan_search.run import ChosenPlan, SearchResult
from rankrl.plan_search.scores.evaluators import Score
from rankrl.plan_search.scores.scoring import FunctionScoring
from rankrl.plan_search.session import SearchSession, check_reachable
from rankrl.report.run_tables import HELDOUT_ACCURACY
from rankrl.request import Request, opened_session, write_kit
from rankrl.result import Compression, ModuleCompression, finish, run_numbers, shallow, write_call
from rankrl.runs.run_folder import SAME_CALL, RunFolder, check_writable
from rankrl.timing.form import faster_positions
from rankrl.timing.network_timer import relative_time
from rankrl.training import Loss, TrainingProgress, TrainingRecipe, TrainingResult, check_loss, train_on
from rankrl.training.loop import check_outputs, steps_of_an_epoch
from rankrl.training.networks import DISTILLATION, together
from rankrl.verify.agreement import agreement_score
from rankrl.verify.fidelity import check_as_read, check_rewritten
from rankrl.verify.measure import HeldoutScore, OwnInputs, OwnMeasure

log = logging.getLogger(__name__)

FineTuning = int | TrainingRecipe | Callable[[nn.Module], Any]
"""Epochs, a recipe, or a function that trains the network it is given, in training mode, in place (or returns
another)."""


@dataclass(frozen=True)
class FineTuner:
    """Settings of the fine-tuning of a compressed network."""

    strategy: FineTuning | None = None
    loss: Loss | None = None
    teacher: nn.Module | Sequence[nn.Module] | None = None

    def __post_init__(self) -> None:
        strategy = self.strategy
        if isinstance(strategy, bool) or not (
            strategy is None or isinstance(strategy, int | TrainingRecipe) or callable(strategy)
        ):
            raise ConfigError(
                f"finetune is a {type(strategy).__name__}; give a number of epochs, a rankrl.TrainingRecipe, "
                "or a function that trains the network that it is given"
            )
        if self.loss is not None and self.recipe is None:
            raise ConfigError(
                "loss= is for our own training; give finetune= a number of epochs or a recipe"
                + ("" if strategy is None else ", or leave loss= to your function")
            )
        if self.teacher is None:
            return
        if self.recipe is None:
            raise ConfigError(
                "teacher= is for our own training; give finetune= a number of epochs or a recipe"
                + ("" if strategy is None else ", or let your function learn from it")
            )
        if isinstance(strategy, TrainingRecipe) and strategy.distillation == 0:
            raise ConfigError(
                "teacher= has no effect: the recipe has distillation=0; set its share of the loss, such as "
                f"distillation={DISTILLATION}"
            )
        together(self.teacher)

    @property
    def recipe(self) -> TrainingRecipe | None:
        """The training recipe; None without fine-tuning or if a user's function trains."""
        if isinstance(self.strategy, int):
            share = 0.0 if self.teacher is None else DISTILLATION
            return TrainingRecipe(epochs=self.strategy, distillation=share)
        return self.strategy if isinstance(self.strategy, TrainingRecipe) else None

    def teacher_of(self, dense: nn.Module) -> nn.Module:
        """Return a copy of the teacher on the dense network's device; without a teacher the dense network."""
        teacher = dense if self.teacher is None else together(self.teacher)
        return in_float32(teacher, keep_double=True).to(model_device(dense)).eval()


def compress_module(
    model: nn.Module,
    data: CalibrationInputs,
    folder: Path,
    request: Request,
    *,
    score: Score | None,
    heldout: float | CalibrationInputs,
    test: CalibrationInputs | None,
    tuner: FineTuner,
) -> ModuleCompression:
    """Compress a PyTorch module; see `rankrl.compress`."""
    model = unwrapped(model)
    log.info("computes on %s, where the network is", model_device(model))
    recipe = tuner.recipe
    run = RunFolder(folder)
    request = request.timed_in(request.cache, run.state)
    request.check()
    timing = request.timing
    check_writable(run.path, "target")
    record = request.record(network_digest(model))
    if not request.overwrite:
        run.check(record, advice=SAME_CALL)
    candidates = request.timed_candidates()
    dense = _plain(model)
    fitted, held, tested = read_samples(
        data,
        heldout,
        test,
        dense,
        request.seed,
        skip=candidates.skip,
        only=candidates.only,
        score_reads_classes=score is None,
        loss_reads_classes=recipe is not None and tuner.loss is None,
    )
    if recipe is not None:
        check_loss(fitted.labels, tuner.loss)
    check_rewritten(model, dense, held.inputs)
    drop = request.goal.budget.drop
    unseen = None if tested is None else HeldoutScore(dense, tested, "test")
    if drop is not None and unseen is None and score is None:
        held, certifying = held.parted(0.5, request.seed)  # inputs that certify a loss choose no plan
        unseen = HeldoutScore(dense, certifying, "unseen held-out")
    measure = HeldoutScore(dense, held)
    if score is None and measure.by_class and tested is None:
        request = replace(request, score_name=HELDOUT_ACCURACY.title)
    taught = {} if tuner.teacher is None else {"teacher": _teacher_score(tuner, dense, held, measure)}
    run.replace(record)
    run.prepare()
    run.claim(record, (), resume=True)
    batches = calibration_batches(fitted.inputs, dense)
    judge = measure if score is None else score
    network = FileModule(
        dense,
        input_shape_of(batches[0]),
        batches,
        scoring=FunctionScoring(
            dense, judge, batches, measure.unit if score is None else request.score_name or "score"
        ),
        measure=OwnMeasure(judge, measure, unseen),
        files=OwnInputs(dense, fitted, held, timing),
        options=request.decomposition,
        export=timing,
        folder=run.state,
        seed=request.seed,
        progress=request.progress,
    )
    _ = network.baseline  # a network that cannot be exported is refused before anything takes time
    check_reachable(network, candidates, request.goal)
    with opened_session(network, candidates, request) as session:
        call = request.search_call(run.path, anew_for_other_scores=True, on_set_aside=run.remove_results)
        search = session.choose(call)
    if isinstance(search, SearchResult) and search.stopped_by == "interrupt":
        raise KeyboardInterrupt(f"the search was stopped; the same call goes on with it in {run.path}")
    compressed = network.applied(search.plan)
    tuned: nn.Module | None = None
    training: TrainingResult | None = None
    if tuner.strategy is not None:
        tuned, training = _tuned(copied(compressed), dense, tuner, fitted, judge, request.progress)
    last = compressed if tuned is None else tuned
    run.remove_results()  # of an earlier same call, so that files of two calls never mix
    search.plan.save(run.plan)
    save_compressed(last, search.plan, run.model, dense=dense)
    budget = request.goal.budget
    finished = finish(network, search.plan, compressed, run.onnx, tuned=tuned, search=search, budget=budget)
    result = ModuleCompression(
        **shallow(finished),
        model=last.eval(),
        dense=dense,
        folder=run.path,
        epochs=() if training is None else training.history,
        test=None
        if tested is None or unseen is None
        else {"baseline": unseen(dense), "compressed": unseen(last)},
    )
    numbers = run_numbers(result) | taught
    if training is not None:
        numbers["trainings"] = {"finetune": training.numbers}
    if tuned is not None:
        numbers["compressed"]["agreement"] = agreement_score(measure.agreement(compressed))
    write_call(run, result, request, type(model).__name__, numbers)
    return result


def scored_session(model: nn.Module, inputs: Any, score: Score, request: Request) -> SearchSession:
    """Open the search of a module whose plans a function scores."""
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
    """Open the search of a data set's classifier, as the command line does."""
    check_classifier(model, data.input_shape, data.classes)
    narrows = bool(request.decomposition.channels) or request.decomposition.blocks
    search = request.goal.search.resolved(refits=not narrows)
    request = replace(request, goal=replace(request.goal, search=search))
    network = image_network(
        model,
        data,
        calibrating_images(model, data, CalibrationOptions().images, seed=request.seed),
        heldout_scoring(model, data, search, seed=request.seed),
        request.decomposition,
        ExportOptions(**vars(request.timing)),
        folder,
        seed=request.seed,
    )
    candidates = request.timed_candidates()
    check_reachable(network, candidates, request.goal)
    return opened_session(network, candidates, request)


def write_module_kit(
    model: nn.Module,
    data: CalibrationInputs,
    folder: Path,
    request: Request,
    heldout: float | CalibrationInputs,
) -> WrittenKit:
    """Write the timing kit of a PyTorch module; see `rankrl.timing_kit`."""
    request.check()
    candidates = request.timed_candidates()
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
    """Return inputs in batches on a network's device."""
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


def _tuned(
    network: nn.Module,
    dense: nn.Module,
    tuner: FineTuner,
    fitted: Sample,
    judge: Score,
    progress: Progress,
) -> tuple[nn.Module, TrainingResult | None]:
    """Return the fine-tuned network, and the result of our own training."""
    types, recipe = own_types(network), tuner.recipe
    if tuner.loss is None:
        fitted = fitted.labelled()
    if recipe is None:
        assert callable(tuner.strategy)
        returned = tuner.strategy(network.train())
        tuned = returned if isinstance(returned, nn.Module) else network
        # Lightning's Trainer leaves the network on the CPU, possibly in another type.
        return back_in(tuned.to(model_device(dense)), types).eval(), None
    steps = recipe.epochs * steps_of_an_epoch(len(fitted), recipe.batch_size)
    with progress_bar("fine-tune", total=steps, progress=progress) as bar:

        def show(state: TrainingProgress) -> None:
            bar.update(state.step, best=state.best_accuracy)

        # Steps with a small learning rate vanish in 16-bit types.
        trained = in_float32(network, keep_double=True)
        result = train_on(
            trained,
            as_float32(fitted.inputs, keep_double=True),
            fitted.labels,
            recipe,
            score=judge if types == own_types(trained) else lambda each: judge(back_in(copied(each), types)),
            loss=tuner.loss,
            teacher=tuner.teacher_of(dense),
            on_step=show,
        )
    return back_in(trained, types), result


@dataclass(frozen=True)
class FileSource:
    """A network in an ONNX file, its inputs and its score."""

    path: Path
    inputs: FileInputs = field(repr=False)
    images: ImagePreprocessing | None = None
    batch_axes: Axes | None = None
    heldout: float = HELDOUT
    score: SessionScore | None = None
    metric: FileMetric = OnnxScoring.metric

    def read(self, request: Request, *, scored: float = 0.0) -> PreparedFile:
        """Read the file and its inputs."""
        return PreparedFile.read(
            self.path,
            self.inputs,
            images=self.images,
            batch_axes=self.batch_axes,
            heldout=self.heldout,
            scored=scored,
            skip=request.decomposition.skip,
            only=request.decomposition.only,
            seed=request.seed,
        )


@dataclass(frozen=True)
class FileSearch:
    """A prepared ONNX file with the candidates and the request of its search."""

    request: Request
    network: GraphNetwork
    candidates: CandidateOptions
    kept: bool = False

    @classmethod
    def of(cls, source: FileSource, request: Request) -> FileSearch:
        """Read a network, check the request, and under a latency budget rewrite slow nodes."""
        request.check()
        check_options(request)
        file = source.read(request, scored=source.heldout if _chooses(source, request) else 0.0)
        file.check_gaps()
        check_as_read(file)
        candidates = _of_file(request.candidates(), file)
        network = _network(file, source, request)
        check_reachable(network, candidates, request.goal)
        request = replace(request, goal=replace(request.goal, timing=network.timing))
        begun = cls(request, network, candidates)
        return begun if request.goal.budget.latency is None else begun._rewritten(request.goal.budget.latency)

    def session(self) -> SearchSession:
        """Calibrate the layers and return the search session; nothing is fitted yet."""
        return opened_session(self.network, self.candidates, self.request)

    def write(
        self, plan: CompressionPlan, target: Path, sensitivities: Mapping[str, torch.Tensor]
    ) -> Compression:
        """Apply a plan of the search and write the file."""
        _check_target(target, Path(self.network.file.network.source))
        return _finished(self.network, self.request, plan, target, sensitivities)

    def _rewritten(self, latency: float) -> FileSearch:
        """Return the search with nodes rewritten where that alone is faster, and ranks that suit them."""
        request, network = self.request, self.network
        file, timing = network.file, request.timing
        candidates = _of_file(request.timed_candidates(), file)
        budget = request.goal.budget
        in_time_alone = not any(budget.counted.values())
        if timing.tables:  # nothing is timed here
            return replace(self, candidates=candidates)
        if in_time_alone:
            faster = faster_positions(file.network, file.sites, network.feed, timing)
            file = file.with_several_positions(faster)
            if faster:
                check_as_read(file)
        if file.network is file.original:
            return replace(self, candidates=candidates)
        share = relative_time(file.original, file.network, network.feed, timing)
        kept = in_time_alone and share <= latency and budget.drop is None
        if kept:
            log.info("rewritten, it takes %.3f of its time: nothing has to be compressed", share)
        network = replace(network, file=file, time_of_original=share)
        return replace(self, network=network, candidates=candidates, kept=kept)


def compress_file(
    source: FileSource,
    target: Path,
    request: Request,
    *,
    folder: Path | None = None,
    **told: Any,
) -> Compression:
    """Compress a network in an ONNX file; see `rankrl.compress`."""
    _check_target(target, source.path)
    begun = FileSearch.of(source, request)
    if begun.kept:
        return _finished(begun.network, begun.request, _as_it_is(begun.network.file), target, {})
    with (session := begun.session()):
        result = session.choose(request.search_call(folder, **told))
    if isinstance(result, SearchResult) and result.stopped_by == "interrupt":
        raise KeyboardInterrupt("the search was stopped; with a folder the same call goes on with it")
    sensitivities = session.library.sensitivities
    return _finished(begun.network, begun.request, result.plan, target, sensitivities, result)


def compress_file_in(source: FileSource, folder: Path | None, request: Request, target: Path) -> Compression:
    """Compress a file; if the target is a folder, write plan, metrics and report there, too."""
    request = request.timed_in(request.cache, folder)
    if folder is None or target != folder:
        return compress_file(source, target, request, folder=folder)
    request.check()
    run = RunFolder(folder)
    record = request.record(digest(source.path.read_bytes())[:16])
    if not request.overwrite:
        run.check(record, advice=SAME_CALL)
    run.replace(record)
    run.prepare()
    run.claim(record, (), resume=True)
    result = compress_file(source, run.state / "model.onnx", request, folder=folder)
    run.remove_results()
    announce_write(run.onnx)
    os.replace(result.path, run.onnx)
    result.plan.save(run.plan)
    result = replace(result, path=run.onnx)
    write_call(run, result, request, source.path.stem, run_numbers(result))
    return result


def write_file_kit(source: FileSource, request: Request, folder: Path) -> WrittenKit:
    """Write the timing kit of a network in an ONNX file; see `rankrl.timing_kit`."""
    begun = FileSearch.of(source, request)
    return write_kit(begun.network, begun.candidates, begun.request, folder)


def apply_to_file(source: FileSource, plan: CompressionPlan, target: Path, request: Request) -> Compression:
    """Apply a plan to a network in an ONNX file; see `rankrl.apply_plan`."""
    _check_target(target, source.path)
    check_runtimes(request.timing)
    file = source.read(request)
    several = plan.metadata.get(METADATA, {})
    file = file.with_several_positions(from_metadata(several, file.network, file.sites))
    check_plan(plan, file.sites, file.network.source)
    if file.network.half.computes:
        check_without_integers(plan, file.network.source)
    file.check_gaps()
    check_as_read(file)
    sensitivities: Mapping[str, torch.Tensor] = {}
    if request.decomposition.weigh_outputs:
        sensitivities = measured_sensitivities(file, folder=request.fits, seed=request.seed)
    return _finished(_network(file, source, request), request, plan, target, sensitivities)


def check_options(request: Request) -> None:
    """Refuse options that only PyTorch modules support."""
    options = request.decomposition
    check_formats(options.choices)
    if options.channels:
        raise ConfigError("decomposition.channels removes channels of PyTorch networks; leave it out here")
    if options.blocks:
        raise ConfigError("decomposition.blocks removes blocks of PyTorch networks; leave it out here")


def _check_target(target: Path, path: Path) -> None:
    if target.resolve() == path.resolve():
        raise ConfigError(f"the target {target} is the original itself, which is never written; name another")


def _chooses(source: FileSource, request: Request) -> bool:
    """Tell whether plans are compared on inputs; a heuristic within a budget of counts has a single plan."""
    budget = request.goal.budget
    several = bool({"latency", "bytes"} & set(budget.fractions)) or budget.drop is not None
    return source.score is None and (several or request.selector not in list_heuristics())


def _of_file(candidates: CandidateOptions, file: PreparedFile) -> CandidateOptions:
    """Return the candidates without integer precisions if the file computes in half precision."""
    if not file.network.half.computes:
        return candidates
    return replace(candidates, precisions=without_integers(candidates.precisions, file.network.source))


def _network(file: PreparedFile, source: FileSource, request: Request) -> GraphNetwork:
    """Return the network as searches see it, timed with batches that the file accepts."""
    feed = file.feed(request.timing.batch)
    timing = replace(request.timing, batch=file.network.axes.size(feed))
    options = request.decomposition
    return GraphNetwork(file, feed, timing, options, source.score, source.metric, request.seed)


def _as_it_is(file: PreparedFile) -> CompressionPlan:
    """Return the plan that leaves every node as it is."""
    reason = "the budget is kept without"
    layers = tuple(LayerPlan(site.name, reason=site.spec.refusal or reason) for site in file.sites)
    return CompressionPlan(layers, fingerprint([site.spec for site in file.sites]), file.shape, "rewriting")


def _finished(
    network: GraphNetwork,
    request: Request,
    plan: CompressionPlan,
    target: Path,
    sensitivities: Mapping[str, torch.Tensor],
    search: ChosenPlan | None = None,
) -> Compression:
    """Apply a plan, write the file and compare it with the original."""
    if network.file.several:
        plan = replace(plan, metadata={**plan.metadata, METADATA: to_metadata(network.file.several)})
    compressed = network.finished(plan, sensitivities)
    result = finish(network, plan, compressed, target, search=search, budget=request.goal.budget)
    if result.collapsed is not None:
        log.error(result.collapsed)
    return result
