"""Implement Adagrad with the semantics of ai.onnx.preview.training.Adagrad."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT

from optim.base import OnnxOptimizer
from optim.kernels import EPSILON, update_adagrad
from optim.registry import register_optimizer
from optim.settings import check_coefficient


@register_optimizer(
    "onnx_adagrad", "Adagrad as the ONNX operator ai.onnx.preview.training.Adagrad defines it"
)
class OnnxAdagrad(OnnxOptimizer):
    """Adagrad as ai.onnx.preview.training.Adagrad defines it; equations in `optim.kernels.adagrad`.

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
