"""From a recipe to an optimizer over a network's parameters."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from decomposition import factorised_layers
from optim import create_optimizer
from rankrl.errors import ConfigError
from rankrl.training.recipe import TrainingRecipe

_DECAY_OPTIONS = ("weight_decay", "norm_coefficient", "norm_coefficient_post")


def build_optimizer(model: nn.Module, recipe: TrainingRecipe) -> Optimizer:
    """Make the recipe's optimizer with two groups: parameters with and without weight decay.

    Spared are vectors, that is biases and the parameters of normalisation layers (everything of one dimension
    or none), unless `recipe.decay_vectors`, and the cores of factorised layers where `recipe.product_decay`
    is above 0.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    layers = factorised_layers(model).values() if recipe.product_decay else ()
    cores = {id(parameter) for layer in layers for parameter in layer.parameters()}
    groups: list[dict[str, list[nn.Parameter]]] = [{"params": []}, {"params": []}]
    for parameter in trained:
        spared = id(parameter) in cores or (parameter.ndim <= 1 and not recipe.decay_vectors)
        groups[spared]["params"].append(parameter)
    decayed, groups = groups[0]["params"], [group for group in groups if group["params"]]
    if not groups:
        raise ConfigError("the network has no parameter that requires a gradient; nothing can be trained")
    try:
        optimizer: Optimizer = create_optimizer(
            recipe.optimizer, groups, lr=recipe.lr, **recipe.optimizer_options
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer {recipe.optimizer!r}: {error}") from error
    if len(groups) > bool(decayed):
        for option in _DECAY_OPTIONS:
            if option in optimizer.param_groups[-1]:
                optimizer.param_groups[-1][option] = 0.0
    return optimizer
