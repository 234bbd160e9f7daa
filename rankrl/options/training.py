"""Options of training and pruning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from rankrl.errors import ConfigError
from rankrl.option_types import check_least, check_positive
from rankrl.options.search import BudgetOptions, check_choice


@dataclass(frozen=True)
class RecipeOptions:
    """How a network is trained.

    Attributes:
        epochs: Passes through the training images.
        batch_size: Images in a step, at least 1; a smaller training set makes one batch.
        halvings: How often a training that diverges, or falls back to guessing, starts again from its first
            weights with half the learning rate; 0 never.
        product_decay: Weight decay on the weight that each factorised layer's cores contract to, 0 or more
            (Frobenius decay, Khodak et al., ICLR 2021). Above 0 the optimizer's own skips the cores, which
            are sized alike before the first step, so that one learning rate suits them all; layers in
            integers stay as they are.
        schedule: "constant", "cosine" or "one_cycle"; see `rankrl.training.recipe`.
        warmup: Fraction of all steps in which the learning rate rises, 0 to below 1.
        label_smoothing: Probability mass spread over all classes, 0 to below 1 (Szegedy et al. 2016).
        gradient_clip: Largest Euclidean norm of the whole gradient, or None for no clipping.
        ema_decay: Decay of the moving average of the weights, below 1, or None for no average. With one, the
            average is what is scored and returned.
        distillation: Share m of the teacher in the loss, 0 (no teacher) to 1: (1 - m) * cross-entropy +
            m * T^2 * KL(teacher || student) (Hinton et al. 2015).
        temperature: T of the distillation, positive.
        augment: Whether training images are cropped and flipped at random.
        early_stop_patience: Epochs without a better held-out accuracy after which training ends, or None.
        restore_best: Whether the weights with the best held-out accuracy are returned, those before the first
            epoch included, rather than the last. None does so unless the dense network may have been trained
            on these images: a checkpoint that was not trained here with the same ones held out.
    """

    # Four halvings reach a sixteenth of a rate; the teacher's share is varied, not T; datasets say how images
    # are augmented (dataset.padding, dataset.flip).
    PYTHON_ONLY: ClassVar[tuple[str, ...]] = ("halvings", "temperature", "augment")

    epochs: int = 10
    batch_size: int = 128
    halvings: int = 4
    product_decay: float = 0.0
    schedule: str = "cosine"
    warmup: float = 0.05
    label_smoothing: float = 0.0
    gradient_clip: float | None = None
    ema_decay: float | None = None
    distillation: float = 0.0
    temperature: float = 4.0
    augment: bool = True
    early_stop_patience: int | None = None
    restore_best: bool | None = None

    def __post_init__(self) -> None:
        check_whole("batch_size", self.batch_size, 1)
        for name in ("epochs", "halvings"):
            check_whole(name, getattr(self, name), 0)
        if self.early_stop_patience is not None:
            check_whole("early_stop_patience", self.early_stop_patience, 1)
        check_number(self, "temperature", "positive", lambda value: 0 < value < float("inf"))
        check_number(self, "product_decay", "0 or more", lambda value: 0 <= value < float("inf"))
        check_number(self, "warmup", "at least 0 and below 1", lambda value: 0 <= value < 1)
        check_number(self, "label_smoothing", "at least 0 and below 1", lambda value: 0 <= value < 1)
        check_number(self, "distillation", "between 0 and 1", lambda value: 0 <= value <= 1)
        if self.gradient_clip is not None:
            check_number(self, "gradient_clip", "positive", lambda value: 0 < value < float("inf"))
        if self.ema_decay is not None:
            check_number(self, "ema_decay", "at least 0 and below 1", lambda value: 0 <= value < 1)


@dataclass(frozen=True)
class OptimizerOptions:
    """An optimizer.

    Attributes:
        name: A registered optimizer.
        lr: Its learning rate; for fine-tuning None takes that of finetune.rates, but 1e-3 for onnx_adam after
            a removal of channels, which moves weights further. For training from scratch None takes what
            suits the network: for sgd 0.1 for the CIFAR ResNets, 0.01 for lenet5 and 0.05 for conv4; for
            torchvision's and your own 0.1 with batch normalisation, 0.01 without. 1e-3 for onnx_adam, 1e-2
            for onnx_adagrad.
        options: Its options other than the rate, where they are not to have their defaults. For
            training from scratch sgd has momentum 0.9, nesterov, and weight_decay 5e-4.
    """

    name: str = "onnx_adam"
    lr: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FineTuningOptions(RecipeOptions):
    """Fine-tuning of the compressed network, with the dense one as teacher, or another.

    Attributes:
        epochs: Passes through the training images; 0 leaves fine-tuning out.
        rates: Highest learning rate after a decomposition by optimizer, where optim.lr is null.
        teacher: Weights of the network to learn from, such as a larger one for the same data, or a list of
            such files, whose class scores are averaged; None for the dense network.
        teacher_model: The teacher's network, as for `model`: one name, or one for each file. None for the
            dense network's own.
        teacher_options: Options of `teacher_model`, such as _target_ of a custom one.
    """

    PYTHON_ONLY = (*RecipeOptions.PYTHON_ONLY, "label_smoothing")  # the teacher's answers are soft

    rates: Mapping[str, float] = field(
        default_factory=lambda: {"onnx_adam": 1e-4, "onnx_adagrad": 1e-2, "sgd": 1e-2}
    )
    teacher: str | Path | tuple[str | Path, ...] | None = None
    teacher_model: str | tuple[str, ...] | None = None
    teacher_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.epochs < 0:
            raise ConfigError(
                f"finetune.epochs must be a whole number >= 0, got {self.epochs}; 0 leaves fine-tuning out"
            )
        super().__post_init__()
        if len(self.teacher_models) not in (0, 1, len(self.teachers)):
            raise ConfigError(
                f"finetune.teacher_model names {len(self.teacher_models)} networks and finetune.teacher "
                f"{len(self.teachers)} files; give one network for all of them, or one for each"
            )

    @property
    def teachers(self) -> tuple[str, ...]:
        """The files of the teachers; none where the dense network teaches."""
        return _listed(self.teacher)

    @property
    def teacher_models(self) -> tuple[str, ...]:
        """The names of the teachers' networks; none for the dense one's."""
        return _listed(self.teacher_model)


@dataclass(frozen=True)
class TrainingOptions(RecipeOptions):
    """How a network without a checkpoint is trained first (He et al. 2016, shortened): without a teacher."""

    # There are no cores and no teacher, and a schedule's last epochs are its best.
    PYTHON_ONLY = (*RecipeOptions.PYTHON_ONLY, "product_decay", "distillation", "restore_best")

    epochs: int = 30
    schedule: str = "one_cycle"
    warmup: float = 0.3
    restore_best: bool | None = False
    optim: OptimizerOptions = field(default_factory=lambda: OptimizerOptions("sgd"))


def _listed(names: str | Path | Sequence[str | Path] | None) -> tuple[str, ...]:
    return (str(names),) if isinstance(names, str | Path) else tuple(map(str, names or ()))


def check_whole(name: str, value: object, least: int) -> None:
    """Refuse what is no whole number from `least` on."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number >= {least}, got {value!r}")


def check_number(options: object, name: str, allowed: str, holds: Callable[[float], bool]) -> None:
    """Refuse an option that is no number or out of its range."""
    value = getattr(options, name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
        raise ConfigError(f"{name} must be {allowed}, got {value!r}")


Scope = Literal["uniform", "global", "per_cost"]


@dataclass(frozen=True)
class BlockOptions:
    """Options of what removes whole blocks.

    Attributes:
        layers: Names of the layers whose channels, or blocks, may go; None for all that can be pruned.
    """

    layers: tuple[str, ...] | None = None


@dataclass(frozen=True)
class CriterionOptions(BlockOptions):
    """Options of a criterion, whose scores are compared.

    Attributes:
        scope: `uniform` keeps the same share of every channel group, `global` ranks all channels together,
            `per_cost` by what they save (see `pruning.keep_within`); None takes `per_cost` for
            reconstruction, `uniform` for the others.
        multiple: Channels are kept in multiples of it; processors compute several at a time.
    """

    scope: Scope | None = None
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.scope is not None:
            check_choice("pruner.scope", self.scope, Scope)
        check_least("pruner", self, multiple=1)


@dataclass(frozen=True)
class NetworkSteps:
    """How the network learns while its masks do.

    Attributes:
        batch_size: Images in a step.
        lr: Learning rate of Adam for the network's parameters.
        mask_lr: Learning rate of Adam for the masks' parameters; None for each mask's own, faster in short
            trainings.
        augment: Whether training images are cropped and flipped at random.
    """

    # A mask knows the rate that suits how it is parametrised; datasets say how they are augmented.
    PYTHON_ONLY = ("mask_lr", "augment")

    batch_size: int = 128
    lr: float = 1e-3
    mask_lr: float | None = None
    augment: bool = True

    def __post_init__(self) -> None:
        check_least("pruner", self, batch_size=1)
        check_positive("pruner", self, "lr", "mask_lr")


@dataclass(frozen=True)
class MaskOptions(NetworkSteps, BlockOptions):
    """Options of a mask that is trained; what else `pruning.MaskTrainingOptions` has, has its defaults.

    Attributes:
        epochs: Epochs of the pruning phase, in which the masks learn.
        strength: Factor of the mask penalty (summed over all units); where it starts, if there is a target.
        strengths: Further factors for single groups, by group name (per-branch strengths).
        limit: Share of each group's units that may remain at most when the masks are fixed (hard limit); None
            for no limit.
        rewind: Keep what the masks chose and go back to the dense network's weights, solved for again like
            those that a criterion leaves; None for whichever weights do better on held-out images.
    """

    epochs: int = 10
    strength: float = 1e-3
    strengths: Mapping[str, float] = field(default_factory=dict)
    limit: float | None = None
    rewind: bool | None = None


PRUNERS: dict[str, type] = {
    "apoz": CriterionOptions,
    "blocks": BlockOptions,
    "first_k": CriterionOptions,
    "group_lasso": MaskOptions,
    "hard_concrete": MaskOptions,
    "magnitude": CriterionOptions,
    "random": CriterionOptions,
    "reconstruction": CriterionOptions,
}
"""Options by the pruner's name."""


@dataclass(frozen=True)
class PruneOptions:
    """Steps of task=prune once budget.params or budget.macs is reached (0.5 of the MACs if neither is set).

    Attributes:
        decompose_params: Decompose what is left (decomposition, selector, search) to this fraction of its
            parameters; None does not.
        decompose_macs: The same for its multiply-accumulates.
        finetune_epochs: Epochs of fine-tuning before the decomposition; None takes finetune.epochs, 0 is
            none.
    """

    decompose_params: float | None = None
    decompose_macs: float | None = None
    finetune_epochs: int | None = None

    def __post_init__(self) -> None:
        if self.decompose_params is not None and self.decompose_macs is not None:
            raise ConfigError("set prune.decompose_params or prune.decompose_macs, not both")
        for name in ("decompose_params", "decompose_macs"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ConfigError(
                    f"prune.{name}={value} is outside (0, 1); it is the fraction of the pruned network to "
                    "keep"
                )
        check_least("prune", self, finetune_epochs=0)

    @property
    def budget(self) -> BudgetOptions | None:
        """Fractions of the pruned network that the decomposition keeps; None where there is none."""
        if self.decompose_params is None and self.decompose_macs is None:
            return None
        return BudgetOptions(params=self.decompose_params, macs=self.decompose_macs)
