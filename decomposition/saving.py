"""Compressed models on disk: safetensors for the tensors, the plan beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from decomposition.apply import build_structure
from decomposition.errors import PlanError
from decomposition.files import replacing
from decomposition.plan import CompressionPlan

Structure = Callable[[nn.Module, CompressionPlan], nn.Module]
_PLAN_KEY = "rankrl.plan"


def save_compressed(model: nn.Module, plan: CompressionPlan, path: str | Path) -> None:
    """Write a compressed model and its plan to one safetensors file, atomically.

    Args:
        model: The compressed model, the result of `apply_plan` for `plan`, fine-tuned or not.
        plan: Its plan; stored in the file's metadata.
        path: File to write, by custom `*.safetensors`.
    """
    path = Path(path)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _own_tensors(model).items()}
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={_PLAN_KEY: plan.to_json()})


def load_compressed(
    model: nn.Module,
    path: str | Path,
    plan: CompressionPlan | None = None,
    *,
    structure: Structure = build_structure,
) -> tuple[nn.Module, CompressionPlan]:
    """Load what `save_compressed` wrote.

    Args:
        model: The dense model's architecture; its weights are not used and it is left untouched.
        path: The file.
        plan: The plan, if it is to be another copy than the file's own.
        structure: Makes the compressed model without its weights from the dense one and the plan. The
            default knows plans of tensor formats only, not plans with kept channels.

    Returns:
        The compressed model and its plan.

    Raises:
        PlanError: If the file cannot be read, holds no plan, or does not fit the model.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():  # a pipe or a device may never end
            raise PlanError(f"the compressed model {path} cannot be read (no regular file); check the path")
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            metadata = file.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise PlanError(f"the compressed model {path} cannot be read ({error}); check the path") from error
    if plan is None:
        if _PLAN_KEY not in metadata:
            raise PlanError(f"{path} holds no compression plan; pass the plan it was made with")
        plan = CompressionPlan.from_json(metadata[_PLAN_KEY], source=f"the plan in {path}")
    compressed = structure(model, plan)
    expected = _own_tensors(compressed)
    missing, unknown = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    misfits = [n for n, t in expected.items() if n in tensors and tensors[n].shape != t.shape]
    if missing or unknown or misfits:
        raise PlanError(
            f"{path} does not fit the model under its plan: missing {missing[:3]}, unknown {unknown[:3]}, "
            f"other shapes {misfits[:3]}; load it into the architecture that it was made from"
        )
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(tensors[name])
    return compressed, plan


def _own_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of `model`, a tensor with several names under the first of them only."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors
