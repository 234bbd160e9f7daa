"""From a recipe to an optimizer over a network's parameters."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from optim import create_optimizer
from rankrl.errors import ConfigError
from rankrl.training.recipe import TrainingRecipe

_DECAY_OPTIONS = ("weight_decay", "norm_coefficient", "norm_coefficient_post")


def build_optimizer(model: nn.Module, recipe: TrainingRecipe) -> Optimizer:
    """Make the recipe's optimizer, in two groups: weights, and vectors that are spared weight decay.

    Vectors are biases and the parameters of normalisation layers: everything of one dimension or none.

    Args:
        model: The network; its parameters that require a gradient are optimised.
        recipe: The recipe.

    Raises:
        ConfigError: No parameter requires a gradient, or the optimizer is unknown or refuses its options.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim <= 1]
    groups = [{"params": group} for group in (weights, vectors) if group]
    if not groups:
        raise ConfigError("the network has no parameter that requires a gradient; nothing can be trained")
    try:
        optimizer: Optimizer = create_optimizer(
            recipe.optimizer, groups, lr=recipe.lr, **recipe.optimizer_options
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer {recipe.optimizer!r}: {error}") from error
    if not recipe.decay_vectors and vectors:
        for option in _DECAY_OPTIONS:
            if option in optimizer.param_groups[-1]:
                optimizer.param_groups[-1][option] = 0.0
    return optimizer
