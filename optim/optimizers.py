"""Implement the optimizers: OnnxAdam and OnnxAdagrad on a base class of their own, and torch's SGD."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, overload

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import ParamsT

from optim.kernels import (
    ALPHA,
    BETA,
    EPSILON,
    Count,
    SparseGradientError,
    check_coefficient,
    check_decay,
    check_keys,
    check_params,
    check_rate,
    check_update_count,
    foreach_increase_,
    update_adagrad,
    update_adam,
)
from optim.registry import register_optimizer

# Options added later: states saved without them leave them unchanged.
_ADDED = {"maximize": False, "foreach": None, "capturable": False}


class OnnxOptimizer(Optimizer):
    """A torch optimizer that does the arithmetic of one operator of ai.onnx.preview.training.

    The state of a parameter holds `step`, the number of updates done (int32, no dimension, on the CPU unless
    `capturable`), and the operator's accumulators under the names of its inputs (`V`, `H`).

    Every group holds a learning rate of its own, of a tensor a copy: torch's schedulers change it in place.

    Args:
        params: Parameters, named parameters or param groups, float32 or float64.
        defaults: Options for the groups that do not give them: `lr`, `first_update_count`, `maximize`,
            `foreach`, `capturable` and the operator's attributes.

    Raises:
        TypeError: If a parameter is not dense float32 or float64, or an option not a number.
        ValueError: If an option is outside its range.
    """

    operator: ClassVar[str]
    """Name of the operator in the domain ai.onnx.preview.training."""

    accumulators: ClassVar[tuple[str, ...]]
    """The operator's inputs that are carried from one update to the next, in its order."""

    attributes: ClassVar[Mapping[str, Callable[[str, object], float]]]
    """For each attribute of the operator the check that returns its float32 value."""

    update: ClassVar[Callable[..., None]]
    """The arithmetic: a function of params, grads, accumulators, update counts and the group's options."""

    def __init__(self, params: ParamsT, defaults: dict[str, Any]) -> None:
        super().__init__(params, self._checked(defaults))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, such as layers that are unfrozen during training.

        Args:
            param_group: `params` and the options that shall differ from the optimizer's.

        Raises:
            TypeError: If a parameter is not dense float32 or float64, or an option not a number.
            ValueError: If an option is outside its range or a parameter is in another group already.
        """
        super().add_param_group(self._checked({**self.defaults, **param_group}))
        try:
            check_params(self.param_groups[-1]["params"])
        except TypeError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load options and state; unlike torch's, never share tensors with the optimizer they come from.

        Args:
            state_dict: What `state_dict()` of an optimizer of the same class and parameter shapes returned.
                `maximize`, `foreach` and `capturable` stay as they are here where a group of it lacks them.

        Raises:
            TypeError: If an option or an update count is not a number.
            ValueError: If groups, options or shapes do not match this optimizer, or a count is negative.
        """
        own = deepcopy(state_dict)
        for saved, group in zip(own["param_groups"], self.param_groups, strict=False):  # torch compares them
            for name in _ADDED:
                saved.setdefault(name, group[name])
        super().load_state_dict(own)

    def __setstate__(self, state: dict[str, Any]) -> None:
        for index, group in enumerate(state["param_groups"]):
            for name, default in _ADDED.items():  # missing in older pickled optimizers
                group.setdefault(name, default)
            check_keys(
                f"param group {index} of the state", group, ["lr", "first_update_count", *self.attributes]
            )
            group.update(self._checked(group))
            for param in group["params"]:
                if param in state["state"]:
                    self._check_state(index, param, state["state"][param])
        super().__setstate__(state)

    def _checked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options with those that are numbers checked, the attributes as float32 values."""
        checks = {"lr": _own_rate, "first_update_count": check_update_count, **self.attributes}
        return {
            name: checks[name](name, value) if name in checks else value for name, value in options.items()
        }

    def _check_state(self, group: int, param: Tensor, state: dict[str, Any]) -> None:
        check_keys(f"the state of a parameter in group {group}", state, ["step", *self.accumulators])
        for name in self.accumulators:
            if state[name].shape != param.shape:
                raise ValueError(
                    f"the state's {name} of a parameter in group {group} has shape "
                    f"{tuple(state[name].shape)}, the parameter has {tuple(param.shape)}: "
                    "load a state saved for this model"
                )
        # torch casts the step of capturable optimizers to float32, which stops counting at 2^24
        state["step"] = torch.as_tensor(state["step"]).to(torch.int32)
        check_update_count(f"the state's step of a parameter in group {group}", int(state["step"]))

    # torch.compile runs a method of this name instead of tracing it: it must only fill the lists it is given.
    def _init_group(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        grads: list[Tensor],
        steps: list[Tensor],
        *accumulators: list[Tensor],
    ) -> None:
        """Append the parameters that have a gradient, their gradients and state (made where missing)."""
        for index, param in enumerate(group["params"]):
            grad = param.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise SparseGradientError(
                    f"params[{index}] of shape {tuple(param.shape)} has a sparse gradient "
                    f"({grad.layout}): {type(self).__name__} needs dense ones; build its layer with "
                    "sparse=False"
                )
            state = self.state[param]
            if not state:
                device = param.device if group["capturable"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.int32, device=device)
                for name in self.accumulators:
                    state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
            params.append(param)
            grads.append(grad)
            steps.append(state["step"])
            for name, tensors in zip(self.accumulators, accumulators, strict=True):
                tensors.append(state[name])

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient, once.

        The first step of all, where every learning rate and every gradient is zero, makes the state and
        leaves parameters and update counts alone: so torch asks for state that is missing
        (`torch.distributed.checkpoint.state_dict`). By the operators `norm_coefficient_post` and
        `norm_coefficient` would act on it; they act exactly as defined in every other step.

        Args:
            closure: Computes the gradients anew and returns the loss.

        Returns:
            The closure's loss, or None without a closure.

        Raises:
            SparseGradientError: If a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._only_makes_state():
            return loss
        for group in self.param_groups:
            params: list[Tensor] = []
            grads: list[Tensor] = []
            steps: list[Tensor] = []
            accumulators: list[list[Tensor]] = [[] for _ in self.accumulators]
            self._init_group(group, params, grads, steps, *accumulators)
            if not params:
                continue
            counts: Sequence[Count]
            if group["capturable"] or torch.compiler.is_compiling():
                counts = torch._foreach_add(steps, group["first_update_count"])
            else:
                counts = [int(step.item()) + group["first_update_count"] for step in steps]
            self.update(
                params,
                grads,
                *accumulators,
                counts,
                lr=group["lr"],
                maximize=group["maximize"],
                foreach=group["foreach"],
                **{name: group[name] for name in self.attributes},
            )
            foreach_increase_(steps, 1)
        return loss

    def _only_makes_state(self) -> bool:
        """Make the state of a fresh optimizer whose rates are zero; whether all gradients are zero, too."""
        if self.state or torch.compiler.is_compiling():
            return False
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return False
        if any(float(group["lr"]) != 0 for group in self.param_groups):
            return False
        grads: list[Tensor] = []
        for group in self.param_groups:
            self._init_group(group, [], grads, [], *([] for _ in self.accumulators))
        return not any(bool(grad.any()) for grad in grads)


def _own_rate(name: str, value: object) -> float | Tensor:
    rate = check_rate(name, value)
    return rate.detach().clone() if isinstance(rate, Tensor) else rate


@register_optimizer("onnx_adam", "Adam as the ONNX operator ai.onnx.preview.training.Adam defines it")
class OnnxAdam(OnnxOptimizer):
    """Adam as ai.onnx.preview.training.Adam defines it; equations in `optim.kernels.update_adam`.

    Seen from `torch.optim.Adam`: alpha and beta are its betas, norm_coefficient its (coupled) weight_decay,
    and epsilon is added before the bias of the second moment is corrected rather than after. With
    `first_update_count=1` and an epsilon of 0 the two agree up to rounding.

    The attributes are kept as float32 values, as a graph stores them: `param_groups[0]["beta"]` is
    0.9990000128746033 where 0.999 was given. Give them to the constructor or to `add_param_group`; what is
    written into `param_groups` afterwards is neither checked nor rounded (`lr` is never rounded).

    Parameters whose gradient is None are skipped, and keep their own update count.

    Args:
        params: Parameters, named parameters or param groups, float32 or float64; for half-precision training
            keep float32 masters (torch.autocast does).
        lr: Learning rate R, >= 0; as a tensor of one element, of which every group takes a copy, a scheduler
            changes it without recompiling.
        alpha: Decay of the accumulated gradient V, in [0, 1).
        beta: Decay of the accumulated squared gradient H, in [0, 1).
        epsilon: Added to sqrt(H), >= 0.
        norm_coefficient: Coefficient of the L2 penalty 0.5 * norm_coefficient * |X|^2, >= 0.
        norm_coefficient_post: X is multiplied by 1 - norm_coefficient_post after the update, >= 0.
        first_update_count: Update count T of the first update, >= 0. The default 1 corrects the bias of both
            accumulators from the first update on, as Adam's paper does; with 0 the first update is not
            corrected and the others are by one count less.
        maximize: Ascend instead of descend.
        foreach: Use torch's foreach operations, or one tensor after the other; None chooses foreach for plain
            tensors.
        capturable: Keep the update counts on the parameters' device and never wait for it, as CUDA graphs
            need.

    Raises:
        TypeError: If a parameter is not dense float32 or float64, or an option not a number.
        ValueError: If an option is outside its range.

    Source:
        ONNX, Operators.md, ai.onnx.preview.training.Adam, version 1; after Kingma and Ba, Adam, ICLR 2015,
        algorithm 1 in the form of the end of section 2.
    """

    operator = "Adam"
    accumulators = ("V", "H")
    attributes = {  # noqa: RUF012 - a ClassVar by the base class
        "alpha": check_decay,
        "beta": check_decay,
        "epsilon": check_coefficient,
        "norm_coefficient": check_coefficient,
        "norm_coefficient_post": check_coefficient,
    }
    update = staticmethod(update_adam)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        alpha: float = ALPHA,
        beta: float = BETA,
        epsilon: float = EPSILON,
        norm_coefficient: float = 0.0,
        norm_coefficient_post: float = 0.0,
        first_update_count: int = 1,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "alpha": alpha,
                "beta": beta,
                "epsilon": epsilon,
                "norm_coefficient": norm_coefficient,
                "norm_coefficient_post": norm_coefficient_post,
                "first_update_count": first_update_count,
                "maximize": maximize,
                "foreach": foreach,
                "capturable": capturable,
            },
        )


@register_optimizer(
    "onnx_adagrad", "Adagrad as the ONNX operator ai.onnx.preview.training.Adagrad defines it"
)
class OnnxAdagrad(OnnxOptimizer):
    """Adagrad as ai.onnx.preview.training.Adagrad defines it; equations in `optim.kernels.update_adagrad`.

    Seen from `torch.optim.Adagrad`: decay_factor is its lr_decay, norm_coefficient its weight_decay; with
    `first_update_count=0` and an equal epsilon the two agree up to rounding.

    The attributes are kept as float32 values, as a graph stores them. Give them to the constructor or to
    `add_param_group`; what is written into `param_groups` afterwards is neither checked nor rounded (`lr`
    is never rounded).

    Parameters whose gradient is None are skipped, and keep their own update count.

    Args:
        params: Parameters, named parameters or param groups, float32 or float64; for half-precision training
            keep float32 masters (torch.autocast does).
        lr: Learning rate R, >= 0; as a tensor of one element, of which every group takes a copy, a scheduler
            changes it without recompiling.
        decay_factor: The learning rate is divided by 1 + T * decay_factor, >= 0.
        epsilon: Added to sqrt(H), >= 0. The default is that of the operator's schema, 1e-6 as a float32 (the
            ONNX documentation prints it rounded, as 0.0). With 0, an element that never had a gradient
            becomes NaN.
        norm_coefficient: Coefficient of the L2 penalty 0.5 * norm_coefficient * |X|^2, >= 0.
        first_update_count: Update count T of the first update, >= 0. The default 0 takes the first step
            at the full learning rate.
        maximize: Ascend instead of descend.
        foreach: Use torch's foreach operations, or one tensor after the other; None chooses foreach for plain
            tensors.
        capturable: Keep the update counts on the parameters' device and never wait for it, as CUDA graphs
            need.

    Raises:
        TypeError: If a parameter is not dense float32 or float64, or an option not a number.
        ValueError: If an option is outside its range.

    Source:
        ONNX, Operators.md, ai.onnx.preview.training.Adagrad, version 1; after Duchi, Hazan and Singer,
        Adaptive Subgradient Methods, JMLR 12 (2011), figure 1.
    """

    operator = "Adagrad"
    accumulators = ("H",)
    attributes = {  # noqa: RUF012 - a ClassVar by the base class
        "decay_factor": check_coefficient,
        "epsilon": check_coefficient,
        "norm_coefficient": check_coefficient,
    }
    update = staticmethod(update_adagrad)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        decay_factor: float = 0.0,
        epsilon: float = EPSILON,
        norm_coefficient: float = 0.0,
        first_update_count: int = 0,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "decay_factor": decay_factor,
                "epsilon": epsilon,
                "norm_coefficient": norm_coefficient,
                "first_update_count": first_update_count,
                "maximize": maximize,
                "foreach": foreach,
                "capturable": capturable,
            },
        )


@register_optimizer("sgd", "Stochastic gradient descent with momentum and weight decay (torch.optim.SGD)")
def sgd(
    params: ParamsT,
    lr: float | Tensor = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    *,
    maximize: bool = False,
    foreach: bool | None = None,
) -> SGD:
    """Return a `torch.optim.SGD`.

    Args:
        params: Parameters, named parameters or param groups.
        lr: Learning rate, >= 0.
        momentum: Factor of the velocity carried over, >= 0.
        dampening: Fraction of the gradient kept out of the velocity; 0 for Nesterov's momentum.
        weight_decay: Coefficient of the L2 penalty, >= 0.
        nesterov: Use Nesterov's momentum, which needs a momentum > 0.
        maximize: Ascend instead of descend.
        foreach: Use torch's foreach operations; None lets torch choose.

    Raises:
        ValueError: If an option is outside its range (raised by torch), or Nesterov's momentum does not go
            with the other options.
    """
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(
            f"nesterov=true needs a momentum above 0 and no dampening, got momentum={momentum} and "
            f"dampening={dampening}; set nesterov=false for SGD without it"
        )
    return SGD(
        params,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=maximize,
        foreach=foreach,
    )
