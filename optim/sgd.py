"""Register torch's own stochastic gradient descent under the name `sgd`."""

from __future__ import annotations

from torch import Tensor
from torch.optim import SGD
from torch.optim.optimizer import ParamsT

from optim.registry import register_optimizer


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
