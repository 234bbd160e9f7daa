"""Norms that leave channels out, against torch's own norms of the channels that are left."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pruning.masks import GatedForward, gated_norm

NORMS = {
    "layer": lambda: nn.LayerNorm(10, eps=1e-3),
    "rms": lambda: nn.RMSNorm(10),
    "plain": lambda: nn.LayerNorm(10),
}


def random_norm(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    norm = NORMS[name]().to(dtype)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


def values(dtype: torch.dtype) -> torch.Tensor:
    return (3 * torch.randn(4, 5, 10, generator=torch.Generator().manual_seed(1)) + 2).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NORMS)
def test_gates_of_zero_and_one_give_the_norm_of_what_is_left(name: str, dtype: torch.dtype) -> None:
    norm, x = random_norm(name, dtype), values(dtype)
    keep = torch.arange(10) % 3 > 0
    gated = GatedForward(norm)
    assert torch.equal(norm(x), type(norm).forward(norm, x))
    for presence, kept in ((torch.ones(10), slice(None)), (keep, keep), (0.25 * keep, keep)):
        gated.presence = presence
        weight, bias = norm.weight[kept], norm.bias[kept] if name != "rms" else None
        shape = (len(weight),)
        expected = (
            F.rms_norm(x[..., kept], shape, weight, norm.eps)
            if bias is None
            else F.layer_norm(x[..., kept], shape, weight, bias, norm.eps)
        )
        assert norm(x).dtype == dtype
        torch.testing.assert_close(norm(x)[..., kept], expected)


@pytest.mark.parametrize("centred", [True, False])
def test_it_is_differentiable_in_values_and_presence(centred: bool) -> None:
    x, presence = values(torch.float64)[0, :2].requires_grad_(), torch.rand(10).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda x, p: gated_norm(x, p, eps=1e-2, centred=centred), (x, presence))


def test_with_nothing_present_all_count() -> None:
    x = values(torch.float32)
    presence = torch.zeros(10, requires_grad=True)
    found = gated_norm(x, presence, eps=1e-5, centred=True)
    torch.testing.assert_close(found, F.layer_norm(x, (10,)))
    found.sum().backward()
    assert presence.grad is not None
    assert presence.grad.isfinite().all()


def test_a_forward_that_was_replaced_before_comes_back() -> None:
    norm = nn.LayerNorm(10)
    own = norm.forward
    for before in (own, lambda x: 2 * own(x)):
        norm.forward = before
        gated = GatedForward(norm)
        gated.presence = torch.ones(10)
        torch.testing.assert_close(norm(values(torch.float32)), before(values(torch.float32)))
        GatedForward.remove_from(norm)
        assert norm.forward == before
