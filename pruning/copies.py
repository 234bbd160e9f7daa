"""Copy networks that are wrapped or compiled, and run public calls in fixed modes of torch."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel
from torch.overrides import TorchFunctionMode

from pruning.errors import PruningError

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_AUTOCAST = ("cpu", "cuda", "mps", "xpu")


def public_call(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: it computes in `own_modes`, on networks that have values."""

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        for value in (*args, *options.values()):
            if isinstance(value, nn.Module):
                check_values(value)
        with own_modes():
            return function(*args, **options)

    return call


@contextmanager
def own_modes() -> Iterator[None]:
    """Enable gradients, compute in the tensors' own types, and make new tensors on the CPU."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        for device in filter(torch.is_autocast_enabled, _AUTOCAST):
            stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device() != torch.device("cpu"):
            stack.enter_context(torch.device("cpu"))
        yield


def check_values(network: nn.Module) -> None:
    """Refuse a network with lazy parameters or tensors on the device `meta`, which have no values."""
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if is_lazy(tensor):
            raise PruningError(
                f"{name} of the {type(network).__name__} has no shape yet, as a lazy layer's that was never "
                "called; call the network once on real inputs, and load its trained weights, before this"
            )
        if tensor.is_meta:
            raise PruningError(
                f"{name} of the {type(network).__name__} is on the device meta and has no values; load its "
                "weights first, with network.to_empty(device='cpu') and network.load_state_dict(weights)"
            )


Module = TypeVar("Module", bound=nn.Module)


_WRAPPERS: tuple[type[nn.Module], ...] = (
    nn.DataParallel,
    nn.parallel.DistributedDataParallel,
    AveragedModel,
)


class _ComputedByValue(TorchFunctionMode):
    """Copies tensors that a forward computed by value: torch only copies leaves."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.__deepcopy__ and not args[0].is_leaf:
            tensor, memo = args
            memo[id(tensor)] = tensor.detach().clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def copied(model: Module) -> Module:
    """Return a deep copy of a module, tensors that its forward computed and kept by value."""
    try:
        with _ComputedByValue():
            return copy.deepcopy(model)
    except Exception as error:  # whatever an attribute's own code raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PruningError(
            f"the {type(model).__name__} cannot be copied: {_uncopyable(model)} ({reason}); keep only "
            "modules, tensors and plain values as attributes, or define __deepcopy__ or __getstate__ for it"
        ) from error


def _uncopyable(model: nn.Module) -> str:
    """Name the attribute that cannot be copied, for messages."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute == "_modules":
                continue
            try:
                with _ComputedByValue():
                    copy.deepcopy(value)
            except Exception:  # whatever the attribute's own code raises
                where = f"layer {name!r}" if name else "it"
                return f"{where} holds {attribute!r}, a {type(value).__name__}"
    return "one of its modules refuses"


def plain_network(model: nn.Module) -> nn.Module:
    """Return the network inside the wrappers of `torch.compile`, data parallelism and weight averaging."""
    inner = model
    while True:
        if isinstance(getattr(inner, "_orig_mod", None), nn.Module):
            inner = inner._orig_mod  # type: ignore[assignment]
        elif isinstance(inner, _WRAPPERS):
            inner = inner.module  # type: ignore[assignment]
        else:
            break
        log.info("the network inside the %s is taken", type(model).__name__)
    for name, module in inner.named_modules():
        kind = _frozen_kind(module)
        if kind is not None:
            raise PruningError(
                f"{name or 'the network'} is {kind}: its layers cannot be told apart any more; prune the "
                "nn.Module that it was made from, then make it again from the smaller network"
            )
    return inner


def fresh_input(inputs: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor of the same values, for a network that may change its input in place."""
    return inputs.as_subclass(torch.Tensor).clone()


def _frozen_kind(module: nn.Module) -> str | None:
    """Describe what made a graph of a module (a trace, a script, an export); None for a plain module."""
    if isinstance(module, torch.jit.TopLevelTracedModule):
        return "a traced module (torch.jit.trace)"
    if isinstance(module, torch.jit.ScriptModule):
        return "a scripted or traced module (torch.jit)"
    if isinstance(module, fx.GraphModule) and any(
        isinstance(node.target, torch._ops.OpOverload) for node in module.graph.nodes
    ):
        return "an exported module (torch.export)"
    return None
