"""Modules that multiply with weights inside them: what they are, and why they stay as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

OpaqueKind = Literal["lstm", "gru", "rnn", "attention"]
OPAQUE_KINDS: tuple[OpaqueKind, ...] = ("lstm", "gru", "rnn", "attention")
"""Kinds that plans made before they were listed have no entries for."""

OPAQUE = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
OpaqueModule = nn.RNNBase | nn.RNNCellBase | nn.MultiheadAttention


@dataclass(frozen=True)
class Opaque:
    """A module whose weights no format can replace."""

    kind: OpaqueKind
    out_features: int
    in_features: int
    bias: bool
    params: int
    refusal: str


def opaque(module: OpaqueModule) -> Opaque:
    """Describe such a module."""
    params = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    name = type(module).__name__
    if isinstance(module, nn.MultiheadAttention):
        packed = module.in_proj_weight is not None
        rows = (3 if packed else 1) * module.embed_dim
        return Opaque(
            "attention",
            rows,
            module.embed_dim,
            module.in_proj_bias is not None,
            params,
            "its projections are parameters of one function; decomposition.plain_attention(model) makes "
            "linear layers of them, which can be decomposed"
            if type(module) is nn.MultiheadAttention
            else f"a {name}, which may compute something else than the MultiheadAttention that it extends",
        )
    kind: OpaqueKind = next((prefix for prefix in OPAQUE_KINDS if name.lower().startswith(prefix)), "rnn")
    weights = [parameter for parameter in module.parameters(recurse=False) if parameter.ndim == 2]
    return Opaque(
        kind,
        weights[0].shape[0],
        weights[0].shape[1],
        bool(module.bias),
        params,
        f"its weights are applied anew at every step of a sequence inside one function ({name}): an error "
        "would feed back on itself, which no fit accounts for",
    )


def macs_of_call(module: OpaqueModule, inputs: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many positions a call multiplies with the weights, and its multiply-accumulates."""
    if isinstance(module, nn.MultiheadAttention):
        names = ("query", "key", "value")
        arguments = dict(zip(names, inputs, strict=False)) | {n: keywords[n] for n in names if n in keywords}
        tensors = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
        return tensors[0].numel() // tensors[0].shape[-1], sum(x.numel() for x in tensors) * module.embed_dim
    (x,) = (*inputs[:1], *(keywords[key] for key in ("input",) if key in keywords))
    data = x.data if isinstance(x, PackedSequence) else x
    positions = data.numel() // module.input_size
    weights = sum(parameter.numel() for parameter in module.parameters(recurse=False) if parameter.ndim == 2)
    return positions, positions * weights
