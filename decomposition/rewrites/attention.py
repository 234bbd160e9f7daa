"""`nn.MultiheadAttention` with its projections as linear layers, which can be decomposed like others."""

from __future__ import annotations

from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from decomposition.errors import DecompositionError
from decomposition.network.rewriting import rewritten
from decomposition.network.surgery import copied
from decomposition.network.wrappers import unwrapped
from decomposition.public_calls import public_call

Module = TypeVar("Module", bound=nn.Module)


class PlainAttention(nn.Module):
    """An `nn.MultiheadAttention` with a linear layer for each projection.

    It takes and returns the same and keeps all attributes except the packed weight, so torch's fast path for
    Transformer layers, which reads that weight, stays off.

    Args:
        attention: The attention; its weights are copied.

    Raises:
        ValueError: It appends keys of its own (`add_bias_kv`, `add_zero_attn`).
    """

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        if attention.bias_k is not None or attention.add_zero_attn:
            raise ValueError("add_bias_kv and add_zero_attn are not supported")
        self.embed_dim, self.num_heads = attention.embed_dim, attention.num_heads
        self.head_dim, self.kdim, self.vdim = attention.head_dim, attention.kdim, attention.vdim
        self.dropout, self.batch_first = attention.dropout, attention.batch_first
        self._qkv_same_embed_dim = False  # where torch's Transformer layers look before their fast path
        self.in_proj_weight, self.in_proj_bias = None, None
        if attention._qkv_same_embed_dim:
            weights = list(attention.in_proj_weight.chunk(3))
        else:
            weights = [attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight]
        bias = attention.in_proj_bias
        biases = [None] * 3 if bias is None else bias.chunk(3)
        self.q_proj, self.k_proj, self.v_proj = map(_linear, weights, biases)
        self.out_proj = _linear(attention.out_proj.weight, attention.out_proj.bias)
        self.train(attention.training)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend; arguments and results are those of `nn.MultiheadAttention`."""
        batched = query.ndim == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for project, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        mask = self._mask(attn_mask, key_padding_mask, q)
        dropout = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            heads = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        output: torch.Tensor = self.out_proj(heads.transpose(1, 2).flatten(-2))
        if not batched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _mask(
        self, attn_mask: torch.Tensor | None, padding: torch.Tensor | None, queries: torch.Tensor
    ) -> torch.Tensor | None:
        """Return what is added to the scores (N, heads, L, S), or `None`."""
        mask = None
        if attn_mask is not None:
            mask = _additive(attn_mask, queries.dtype)
            mask = mask.unflatten(0, (-1, self.num_heads)) if mask.ndim == 3 else mask
        if padding is not None:
            hidden = _additive(padding, queries.dtype)[:, None, None, :]
            mask = hidden if mask is None else mask + hidden
        return mask


@public_call(values=False)
def plain_attention(model: Module) -> Module:
    """Return a copy of a model whose attention projects with linear layers, which plans may decompose.

    `nn.MultiheadAttention` holds its projections on queries, keys and values as one parameter that no layer
    owns. In the copy they are the layers `q_proj`, `k_proj`, `v_proj` and `out_proj`, and the outputs are the
    same. A model without such attention is copied as it is.

    Args:
        model: Any module; left untouched.

    Raises:
        DecompositionError: An attention appends keys of its own (`add_bias_kv`, `add_zero_attn`).
    """
    network = copied(unwrapped(model))
    layers = {}
    for name, module in network.named_modules():
        try:
            plain = plain_form(module)
        except ValueError as error:
            raise DecompositionError(
                f"the attention {name!r} cannot be made of linear layers: {error}; leave the model as it is"
            ) from error
        if plain is not None:
            layers[name] = plain
    return cast(Module, rewritten(network, "plain_attention", layers))


def plain_form(module: nn.Module) -> PlainAttention | None:
    """Return an attention's plain form, or `None` for another module."""
    # A subclass may compute something else.
    return PlainAttention(module) if type(module) is nn.MultiheadAttention else None


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """Return the linear layer with a copy of these values."""
    rows, columns = weight.shape
    layer = nn.Linear(columns, rows, bias=bias is not None, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
            layer.bias.requires_grad_(bias.requires_grad)
    layer.weight.requires_grad_(weight.requires_grad)
    return layer


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask as a term to add to scores: minus infinity where a boolean mask is true."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
