"""Training that pulls a dense network to what a plan will keep of it, before it is cut.

The alternating direction method of multipliers (Boyd et al. 2011; for tensor trains Yin et al., CVPR 2021): a
layer's weight W is trained with the penalty s / 2 |W - Z + U|^2, and after every epoch Z becomes what the
plan's format and ranks can represent of W + U, and U grows by W - Z. Norms are those of the fits,
|D|^2 = tr(G D S D') with S the second moments of the layer's inputs and G the sensitivity of the network's
output to the layer's: a change counts by what it does to the output.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from decomposition import CompressionPlan, Factorise, collect_moments, collect_sensitivities
from decomposition.calibration.metric import whole
from decomposition.calibration.sensitivity_root import floored
from decomposition.fit.fitting import FAST, FitOptions, Fitter
from decomposition.network.layers import is_decomposable_module, weight_of
from rankrl.errors import ConfigError


class RankConstraint:
    """The penalty of one dense network and one plan.

    Args:
        model: The network, trained in place by others; its layers are looked up by name.
        plan: The plan; layers that it does not factorise are free.
        images: Model inputs (N, C, H, W) that norms are taken on.
        strength: s in the first epoch, positive.
        growth: What it is multiplied by after every epoch, at least 1.
        options: How much work each projection may do.
        seed: Seed of the patches of the inputs.

    Raises:
        ConfigError: If a number is out of its range, the plan removes channels, or it factorises nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: CompressionPlan,
        images: Tensor,
        *,
        strength: float,
        growth: float,
        options: FitOptions = FAST,
        seed: int = 0,
    ) -> None:
        if not 0 < strength < float("inf") or not 1 <= growth < float("inf"):
            raise ConfigError(
                "constrain.strength must be positive and constrain.growth at least 1, got "
                f"{strength} and {growth}"
            )
        if plan.group_kinds:
            raise ConfigError(
                "a network is constrained to ranks, not to fewer channels; leave decomposition.channels "
                "empty, or set constrain.epochs=0"
            )
        self._operations = plan.chosen(Factorise)
        if not self._operations:
            raise ConfigError("the plan factorises no layer, so there is nothing to constrain")
        self.strength, self.growth, self._options = strength, growth, options
        specs = [spec for spec in plan.specs(model) if spec.name in self._operations]
        self._specs = {spec.name: spec for spec in specs}
        moments = collect_moments(model, specs, images.split(256), seed=seed)
        self._metrics = {name: whole(moments[name].metric(centred=False)) for name in self._specs}
        self._sensitivities = collect_sensitivities(model, specs, images.split(256), seed=seed)
        modules = {name: module for name, module in model.named_modules() if name in self._specs}
        self._layers = {name: layer for name, layer in modules.items() if is_decomposable_module(layer)}
        self._duals = {name: torch.zeros_like(weight_of(layer)) for name, layer in self._layers.items()}
        self._targets = {name: self._projected(name, weight_of(self._layers[name])) for name in self._specs}
        self._placed: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def penalty(self) -> Tensor:
        """Return s / 2 times the squared distances of the weights to their targets, differentiable."""
        terms = []
        for name, layer in self._layers.items():
            weight = layer.weight.flatten(1)
            if name not in self._placed or self._placed[name][0].device != weight.device:
                target = (self._targets[name] - self._duals[name]).flatten(1)
                parts = (target, self._metrics[name], floored(self._sensitivities[name]))
                placed = [each.to(weight.device, weight.dtype) for each in parts]
                self._placed[name] = (placed[0], placed[1], placed[2])
            target, metric, sensitivity = self._placed[name]
            change = weight - target
            terms.append(_power(change, sensitivity, metric))
        return self.strength / 2 * torch.stack(terms).sum()

    def end_epoch(self) -> None:
        """Project the weights anew, move the multipliers, and raise the strength."""
        for name, layer in self._layers.items():
            beyond = weight_of(layer) + self._duals[name]
            self._targets[name] = self._projected(name, beyond)
            # Multipliers are in units of the strength, which grows.
            self._duals[name] = (beyond - self._targets[name]) / self.growth
        self.strength *= self.growth
        self._placed = {}

    def distance(self) -> float:
        """Return how far the weights are from what the plan can represent, relative, root mean square."""
        lost = whole_power = 0.0
        for name, layer in self._layers.items():
            weight = weight_of(layer)
            change = weight - self._projected(name, weight)
            weights = floored(self._sensitivities[name]), self._metrics[name].double()
            lost += float(_power(change.flatten(1), *weights))
            whole_power += float(_power(weight.flatten(1), *weights))
        return (lost / whole_power) ** 0.5 if whole_power > 0 else 0.0

    def state(self) -> dict[str, Tensor]:
        """Return what changes while the network trains."""
        strength = {"strength": torch.tensor(self.strength, dtype=torch.float64)}
        targets = {f"target.{name}": each for name, each in self._targets.items()}
        return {**strength, **targets, **{f"dual.{name}": each for name, each in self._duals.items()}}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `state` returned.

        Raises:
            KeyError: If it is another network's.
        """
        self.strength = float(state["strength"])
        self._targets = {name: state[f"target.{name}"].double().cpu() for name in self._specs}
        self._duals = {name: state[f"dual.{name}"].double().cpu() for name in self._specs}
        self._placed = {}

    def _projected(self, name: str, weight: Tensor) -> Tensor:
        """Return what the plan's format and ranks can represent of a weight (out, in, kernel)."""
        operation = self._operations[name]
        modes = operation.modes(self._specs[name])
        fitter = Fitter(
            operation.tensor_format,
            weight,
            modes,
            self._metrics[name],
            self._sensitivities[name],
        )
        fit = fitter.fit(operation.ranks, self._options)
        return operation.tensor_format.reconstruct(fit.cores, modes).reshape(weight.shape)


def _power(change: Tensor, sensitivity: Tensor, metric: Tensor) -> Tensor:
    """Return tr(G D S D') of a change D of a weight, (out, columns)."""
    return ((sensitivity @ change @ metric) * change).sum()
