"""Implement Adam with the semantics of ai.onnx.preview.training.Adam."""

from __future__ import annotations

from torch import Tensor
from torch.optim.optimizer import ParamsT

from optim.base import OnnxOptimizer
from optim.kernels import ALPHA, BETA, EPSILON, update_adam
from optim.registry import register_optimizer
from optim.settings import check_coefficient, check_decay


@register_optimizer("onnx_adam", "Adam as the ONNX operator ai.onnx.preview.training.Adam defines it")
class OnnxAdam(OnnxOptimizer):
    """Adam as ai.onnx.preview.training.Adam defines it; equations in `optim.kernels.adam`.

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
