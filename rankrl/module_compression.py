"""Compress a PyTorch module: search, refit, fine-tune, and write the network, its file and a report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from decomposition import (
    Inputs,
    plain_attention,
    plain_transposed,
    plain_weights,
    save_compressed,
)
from decomposition.calibration.calibration_set import CalibrationInputs
from decomposition.network.inputs import input_shape_of, mapped, split
from decomposition.network.surgery import copied, unwrapped
from rankrl.data.calibration import CALIBRATION_BATCH
from rankrl.data.sample import Sample, read_samples
from rankrl.device import as_float32, back_in, in_float32, model_device, own_types
from rankrl.errors import ConfigError
from rankrl.kits.kit_writer import WrittenKit
from rankrl.models.classifiers import network_digest
from rankrl.networks.module import ModuleNetwork
from rankrl.networks.own_module import OwnModule
from rankrl.plan_search.scores.score_evaluator import Score
from rankrl.plan_search.session import check_reachable
from rankrl.progress import Progress, progress_bar
from rankrl.report.run_tables import HELDOUT_ACCURACY
from rankrl.request import Request, opened_session, write_kit
from rankrl.result import ModuleCompression, finish, run_numbers, shallow, write_run
from rankrl.runs.run_folder import SAME_CALL, RunFolder, check_writable
from rankrl.training import EpochRow, Loss, TrainingProgress, TrainingRecipe, check_loss, train_on
from rankrl.training.general import check_outputs, steps_of_an_epoch
from rankrl.training.teachers import DISTILLATION, together
from rankrl.verify.agreement import agreement_score
from rankrl.verify.fidelity import check_rewritten
from rankrl.verify.own_inputs import HeldoutScore, OwnInputs

log = logging.getLogger(__name__)

FineTuning = int | TrainingRecipe | Callable[[nn.Module], Any]
"""Epochs, a recipe, or a function that trains the network it is given, in training mode, in place (or returns
another)."""


@dataclass(frozen=True)
class FineTuner:
    """Settings of the fine-tuning of a compressed network."""

    how: FineTuning | None = None
    loss: Loss | None = None
    teacher: nn.Module | Sequence[nn.Module] | None = None

    def __post_init__(self) -> None:
        how = self.how
        if isinstance(how, bool) or not (
            how is None or isinstance(how, int | TrainingRecipe) or callable(how)
        ):
            raise ConfigError(
                f"finetune is a {type(how).__name__}; give a number of epochs, a rankrl.TrainingRecipe, or a "
                "function that trains the network that it is given"
            )
        if self.loss is not None and self.recipe is None:
            raise ConfigError(
                "loss= is for our own training; give finetune= a number of epochs or a recipe"
                + ("" if how is None else ", or leave loss= to your function")
            )
        if self.teacher is None:
            return
        if self.recipe is None:
            raise ConfigError(
                "teacher= is for our own training; give finetune= a number of epochs or a recipe"
                + ("" if how is None else ", or let your function learn from it")
            )
        if isinstance(how, TrainingRecipe) and how.distillation == 0:
            raise ConfigError(
                "teacher= has no effect: the recipe has distillation=0; set its share of the loss, such as "
                f"distillation={DISTILLATION}"
            )
        together(self.teacher)

    @property
    def recipe(self) -> TrainingRecipe | None:
        """The training recipe; None without fine-tuning or if a user's function trains."""
        if isinstance(self.how, int):
            share = 0.0 if self.teacher is None else DISTILLATION
            return TrainingRecipe(epochs=self.how, distillation=share)
        return self.how if isinstance(self.how, TrainingRecipe) else None

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
    network = OwnModule(
        dense,
        input_shape_of(batches[0]),
        batches,
        judge=measure if score is None else score,
        options=request.decomposition,
        seed=request.seed,
        progress=request.progress,
        heldout=measure,
        unseen=unseen,
        files=OwnInputs(dense, fitted, held, timing.batch),
        timing=timing,
        folder=run.state,
    )
    _ = network.baseline  # a network that cannot be exported is refused before anything takes time
    check_reachable(network, candidates, request.goal)
    with opened_session(network, candidates, request) as session:
        search = session.search(
            request.selector,
            request.selector_options,
            seed=request.seed,
            folder=run.path,
            anew_for_other_scores=True,
            on_set_aside=run.remove_results,
        )
    if search.stopped_by == "interrupt":
        raise KeyboardInterrupt(f"the search was stopped; the same call goes on with it in {run.path}")
    compressed = network.applied(search.plan)
    tuned: nn.Module | None = None
    epochs: Sequence[EpochRow] = ()
    if tuner.how is not None:
        tuned, epochs = _tuned(copied(compressed), dense, tuner, fitted, network.judge, request.progress)
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
        epochs=tuple(epochs),
        test=None
        if tested is None or unseen is None
        else {"baseline": unseen(dense), "compressed": unseen(last)},
    )
    numbers = run_numbers(result) | taught
    if tuned is not None:
        numbers["compressed"]["agreement"] = agreement_score(measure.agreement(compressed))
    write_run(run, result, request, type(model).__name__, numbers)
    return result


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
) -> tuple[nn.Module, Sequence[EpochRow]]:
    """Return the fine-tuned network, and the epochs of our own training."""
    types, recipe = own_types(network), tuner.recipe
    if tuner.loss is None:
        fitted = fitted.labelled()
    if recipe is None:
        assert callable(tuner.how)
        returned = tuner.how(network.train())
        tuned = returned if isinstance(returned, nn.Module) else network
        # Lightning's Trainer leaves the network on the CPU, possibly in another type.
        return back_in(tuned.to(model_device(dense)), types).eval(), ()
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
    return back_in(trained, types), result.history
