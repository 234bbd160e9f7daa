"""Build a data set's networks and their teachers, and train or fine-tune them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decomposition import calibrate_ranges
from decomposition.network.surgery import copied
from decomposition.progress import Progress, progress_bar
from optim import OnnxOptimizer, build_step_model
from rankrl.data import ImageData, Images, batches
from rankrl.data.sample import Sample
from rankrl.device import as_float32, back_in, in_float32, inference_precision, model_device, own_types
from rankrl.errors import ConfigError, RankrlError, counted
from rankrl.files import write_atomically
from rankrl.models import build_model, checkpoint_preprocessing, load_checkpoint
from rankrl.options.training import FineTuningOptions
from rankrl.training import (
    EpochRow,
    Loss,
    TrainingProgress,
    TrainingRecipe,
    TrainingResult,
    accuracy,
    guessing_share,
    near_guessing,
    train,
    train_on,
)
from rankrl.training.loop import steps_of_an_epoch, steps_per_epoch
from rankrl.training.recipe import build_optimizer

log = logging.getLogger(__name__)

DISTILLATION = 0.9
"""Share of a teacher in the loss, where one is named and no share: that of `finetune=short`."""


class MeanOutputs(nn.Module):
    """Ensemble of classifiers: the mean of their class scores (N, classes)."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        return torch.stack([network(*inputs, **named) for network in self.networks]).mean(0)


def together(teachers: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """Combine several teachers into one, `MeanOutputs`."""
    if isinstance(teachers, nn.Module) and not isinstance(teachers, nn.ModuleList):
        return teachers
    networks = list(teachers) if isinstance(teachers, Sequence | nn.ModuleList) else [teachers]
    if not networks or not all(isinstance(each, nn.Module) for each in networks):
        kinds = ", ".join(type(each).__name__ for each in networks) or "nothing"
        raise ConfigError(f"teacher= must be a torch.nn.Module or a list of them, got {kinds}")
    return networks[0] if len(networks) == 1 else MeanOutputs(networks)


@dataclass(frozen=True)
class Teacher:
    network: nn.Module
    title: str
    accuracy: float


FineTuning = int | TrainingRecipe | Callable[[nn.Module], Any]
"""Epochs, a recipe, or a function that trains the network it is given, in training mode, in place (or returns
another)."""


@dataclass(frozen=True)
class FineTuner:
    strategy: FineTuning | None = None
    loss: Loss | None = None
    teacher: nn.Module | Sequence[nn.Module] | Teacher | None = None

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
        if not isinstance(self.teacher, Teacher):
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
        teacher = self.teacher
        if isinstance(teacher, Teacher):
            teacher = teacher.network
        network = dense if teacher is None else together(teacher)
        return in_float32(network, keep_double=True).to(model_device(dense)).eval()

    def image_teacher(self, data: ImageData) -> Teacher | None:
        """Return the teacher of a data set's classifier; None for the dense network."""
        if self.teacher is None or isinstance(self.teacher, Teacher):
            return self.teacher
        network = together(self.teacher)
        return Teacher(network, type(network).__name__, heldout_accuracy(network, data))

    def trained_by_user(self, network: nn.Module, dense: nn.Module) -> nn.Module:
        assert callable(self.strategy)
        types = own_types(network)
        returned = self.strategy(network.train())
        tuned = returned if isinstance(returned, nn.Module) else network
        # Lightning's Trainer leaves the network on the CPU, possibly in another type.
        return back_in(tuned.to(model_device(dense)), types).eval()

    def tuned(
        self,
        network: nn.Module,
        dense: nn.Module,
        fitted: Sample,
        judge: Callable[[nn.Module], Any],
        progress: Progress,
    ) -> tuple[nn.Module, TrainingResult | None]:
        types, recipe = own_types(network), self.recipe
        if self.loss is None:
            fitted = fitted.labelled()
        if recipe is None:
            return self.trained_by_user(network, dense), None
        steps = recipe.epochs * steps_of_an_epoch(len(fitted), recipe.batch_size)
        with progress_bar("fine-tune", total=steps, progress=progress) as bar:

            def show(state: TrainingProgress) -> None:
                bar.update(state.step, best=state.best_accuracy)

            # Steps with a small learning rate vanish in 16-bit types.
            trained = in_float32(network, keep_double=True)
            result = train_on(
                trained,
                as_float32(fitted.inputs),
                fitted.labels,
                recipe,
                score=judge
                if types == own_types(trained)
                else lambda each: judge(back_in(copied(each), types)),
                loss=self.loss,
                teacher=self.teacher_of(dense),
                on_step=show,
            )
        return back_in(trained, types), result


def read_teacher(
    options: FineTuningOptions, model: Mapping[str, Any], data: ImageData, *, seed: int
) -> Teacher:
    """Read the teacher that the options name, or the mean of several."""
    names = options.teacher_models or (str(model["architecture"]),)
    names *= 1 if len(names) > 1 else len(options.teachers)
    own = {} if options.teacher_model else model
    networks, titles = [], []
    for name, path in zip(names, options.teachers, strict=True):
        described = {**own, **options.teacher_options, "architecture": name, "checkpoint": path}
        try:
            networks.append(build_network(described, data, seed=seed))
        except RankrlError as error:
            raise ConfigError(
                f"finetune.teacher={path} with finetune.teacher_model={name} cannot teach on "
                f"dataset={data.name}: {error}"
            ) from error
        _check_normalisation(path, data)
        titles.append(f"{name} ({Path(path).name})")
    network, title = together(networks), " and ".join(titles)
    warning = guessing_warning(network, data)
    if warning is not None:
        raise ConfigError(
            f"finetune.teacher={title}: {warning}. Give one that was trained on {data.name}, with its "
            "classes in this order and its normalisation (dataset.mean, dataset.std)"
        )
    return Teacher(network, title, heldout_accuracy(network, data))


def _check_normalisation(path: str, data: ImageData) -> None:
    """Refuse a checkpoint whose network was trained on images with another normalisation."""
    known, own = checkpoint_preprocessing(path) or {}, data.preprocessing.to_dict()
    for name in ("mean", "std"):
        if known.get(name, own[name]) != own[name]:
            raise ConfigError(
                f"finetune.teacher={path} was trained on images of {name} {known[name]}, those of "
                f"dataset={data.name} have {own[name]}; set dataset.{name} to the teacher's, "
                "or give another one"
            )


def write_training_step(network: nn.Module, recipe: TrainingRecipe, path: Path) -> None:
    """Write one step of the recipe's optimizer over the network's parameters (`optim.build_step_model`)."""
    optimizer = build_optimizer(network, recipe)
    if not isinstance(optimizer, OnnxOptimizer):
        raise ConfigError(
            "export.training=true writes the optimizer's step as an ONNX operator, and "
            f"{recipe.optimizer!r} is none; use optim=onnx_adam or optim=onnx_adagrad"
        )
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    for group in optimizer.param_groups:
        group["param_names"] = [names[id(parameter)] for parameter in group["params"]]
    write_atomically(path, build_step_model(optimizer).SerializeToString())


JUDGED_IMAGES = 1000
"""Held-out images that tell whether a network has learned anything."""
RANGE_IMAGES = 512
"""Held-out images that set the ranges of activations in integers; their labels are not read."""
# Options by which functions that build many networks select one, in order of precedence.
_NAMING_OPTIONS = ("name", "model_name", "arch")


def build_network(model: Mapping[str, Any], data: ImageData, *, seed: int) -> nn.Module:
    options = {key: value for key, value in model.items() if key not in ("architecture", "checkpoint")}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = build_model(model["architecture"], data.input_shape, data.classes, options)
    if model.get("checkpoint"):
        load_checkpoint(network, model["checkpoint"])
    return network.eval()


def model_title(model: Mapping[str, Any], network: nn.Module) -> str:
    """Return a network's title: `resnet20`, `resnet10t (timm.create_model)`, `my_models.SmallNet`."""
    named = next((str(model[option]) for option in _NAMING_OPTIONS if model.get(option)), None)
    target = model.get("_target_")
    if target is None:
        return named or str(model["architecture"])
    if named is None and not type(network).__module__.startswith("torch."):
        named = type(network).__name__
    if named is None or str(target).rpartition(".")[2] == named:
        return str(target)
    return f"{named} ({target})"


def guessing_warning(network: nn.Module, data: ImageData) -> str | None:
    """Return a warning about a network that is hardly better than guessing on held-out images, or None."""
    heldout = data.heldout.subset(torch.arange(0, len(data.heldout), -(-len(data.heldout) // JUDGED_IMAGES)))
    accuracy = heldout_accuracy(network, data, heldout)
    share = guessing_share(heldout.y)
    if not near_guessing(accuracy, share, len(heldout)):
        return None
    return (
        f"The network is hardly better than guessing: it answers {100 * accuracy:.1f} % of "
        f"{counted(len(heldout), 'held-out image')} right, one answer to all of them {100 * share:.1f} %"
    )


def heldout_accuracy(network: nn.Module, data: ImageData, images: Images | None = None) -> float:
    """Return a network's accuracy on held-out images, in training's precision; leave it on the CPU."""
    precision, images = inference_precision(), data.heldout if images is None else images
    try:
        network.to(precision.device)
        return accuracy(network, images, mean=data.mean, std=data.std, precision=precision)
    finally:
        network.to("cpu")


def images_for_ranges(data: ImageData) -> Images:
    """Return the held-out images that calibrate the ranges of quantised activations."""
    return data.heldout.first(RANGE_IMAGES)


def range_images(data: ImageData) -> Iterator[torch.Tensor]:
    images = images_for_ranges(data)
    return (x for x, _ in batches(images, len(images), mean=data.mean, std=data.std))


def run_training(
    description: str,
    network: nn.Module,
    data: ImageData,
    recipe: TrainingRecipe,
    *,
    state_file: Path,
    teacher: nn.Module | None = None,
    on_epoch: Callable[[EpochRow], None] | None = None,
) -> TrainingResult:
    """Train a network in place with a progress bar, resuming from `state_file`; leave it on the CPU."""
    log.info(
        "%s: %s, %s, learning rate %.3g",
        description,
        counted(recipe.epochs, "epoch"),
        recipe.optimizer,
        recipe.lr,
    )
    steps = recipe.epochs * steps_per_epoch(data, recipe.batch_size)
    with progress_bar(description, total=steps) as bar:

        def show(progress: TrainingProgress) -> None:
            bar.update(progress.step, best=progress.best_accuracy)
            if progress.row is not None and on_epoch is not None:
                on_epoch(progress.row)

        result = train(
            network,
            data,
            recipe,
            teacher=teacher,
            state_file=state_file,
            resume=state_file.exists(),
            on_step=show,
        )
    network.cpu()
    if teacher is not None:
        teacher.cpu()
    calibrate_ranges(network, range_images(data))
    log.info(
        "%s: held-out accuracy %.4f %s, highest learning rate %.3g",
        description,
        result.accuracy,
        f"after epoch {result.epoch}" if result.epoch else "before training, which no epoch bettered",
        result.lr,
    )
    return result
