"""Simulate 8-bit integers in modules: ranges, rounding, and the parts that stay in floating point."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from decomposition.errors import DecompositionError
from decomposition.network.cost import evaluation_mode
from decomposition.network.inputs import Inputs, run_model
from decomposition.network.surgery import remove_parametrizations
from decomposition.public_calls import public_call

Range = Callable[[torch.Tensor, int], torch.Tensor]
"""Rounds a tensor in the range of a use of a layer."""

# Runtimes fuse these into the convolution before them: only their output is rounded.
_FUSED = {
    *(F.batch_norm, torch.batch_norm, F.relu, torch.relu, torch.relu_),
    *(torch.Tensor.relu, torch.Tensor.relu_),
}
# These read a tensor's metadata alone (`__get__` stands for its properties, except views such as `.T`).
_LOOKS = {
    *("__get__", "dim", "ndimension", "size", "stride", "numel", "nelement", "__len__"),
    *("is_contiguous", "is_floating_point", "is_complex", "type", "get_device", "element_size"),
}
_SUMS = {
    *(torch.add, torch.Tensor.add, torch.Tensor.add_),
    *(torch.Tensor.__add__, torch.Tensor.__radd__, torch.Tensor.__iadd__),
}


class _Unrounded(torch.Tensor):
    """A tensor yet to be rounded: batch norm and ReLU keep it so, sums round both summands, others it."""

    numbers: torch.Tensor
    range: Range | None
    use: int
    settled: bool

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _computed(func, args, dict(kwargs or {}))


class _Tracing(TorchFunctionMode):
    """Acts as `_Unrounded` while `torch.export` runs a network on tensors of its own class."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return _computed(func, args, dict(kwargs or {}))


_TRACES: list[_Tracing] = []


def _computed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on tensors some of which are marked as unrounded."""
    name = getattr(func, "__name__", "")
    if name == "__hash__":
        return func(*args)
    if name in _LOOKS:
        look = func(*map(_numbers, args), **kwargs)
        if not isinstance(look, torch.Tensor):
            return look
    writes = kwargs.get("out") is not None
    fused = func in _FUSED and not writes and _is_marked(args[0]) and not args[0].settled
    whole = func in _SUMS and not writes and all(map(_is_integer, args[:2]))
    settle = _numbers if fused else _rounded if func in _SUMS else settled
    taking = [settle(value) for value in args]
    result = func(*taking, **{key: settle(value) for key, value in kwargs.items()})
    for owner in (*args[:1], kwargs.get("out")):
        if _is_marked(owner) and owner.numbers is result:
            if fused or whole:
                _mark(owner, result, owner.range if fused else None, owner.use)
            return owner
    if func in _SUMS and taking and result is taking[0] is not args[0]:
        result = args[0].copy_(result)  # a summand in floating point was rounded out of place
    if fused:
        return marked(result, args[0].range, args[0].use)
    return marked(result, None) if whole else result


def marked(x: torch.Tensor, where: Range | None, use: int = 0) -> torch.Tensor:
    """Mark a tensor as yet to be rounded, in a range; None (for sums) takes its first consumer's range."""
    if not torch.compiler.is_exporting():
        handle: torch.Tensor = x.as_subclass(_Unrounded)
    elif _TRACES:
        with torch._C.DisableTorchFunction():
            handle = x.view_as(x)
    else:
        raise DecompositionError(
            "torch.export of layers that compute in integers takes the whole network that apply_plan "
            "returned, no part of it; export that, or decomposition.without_rounding(copy.deepcopy(part))"
        )
    handle.is_unrounded = True  # type: ignore[attr-defined]
    _mark(handle, x, where, use)
    return handle


def _mark(handle: Any, numbers: torch.Tensor, where: Range | None, use: int) -> None:
    handle.numbers, handle.range, handle.use, handle.settled = numbers, where, use, False


def taken(x: torch.Tensor, where: Range, use: int = 0) -> torch.Tensor:
    """Return the unmarked input of an integer layer; other consumers get it rounded in the same range."""
    if not _is_marked(x):
        x.integer_range = (where, use, _version(x))  # type: ignore[attr-defined]
        return x
    if x.range is None:  # type: ignore[attr-defined]
        x.range, x.use = where, use  # type: ignore[attr-defined]
    numbers: torch.Tensor = x.numbers  # type: ignore[attr-defined]
    return numbers


def settled(value: Any) -> Any:
    """Round marked tensors, inside lists and tuples too."""
    if _is_marked(value):
        if value.range is not None and not value.settled:
            value.numbers, value.settled = value.range(value.numbers, value.use), True
        return value.numbers
    if isinstance(value, list | tuple) and any(map(_is_marked, value)):
        return type(value)(settled(item) for item in value)
    return value


def _begin(_: nn.Module, __: Any) -> None:
    if torch.compiler.is_exporting():
        _TRACES.append(_Tracing())
        _TRACES[-1].__enter__()


def _end(_: nn.Module, __: Any, output: Any) -> Any:
    if not torch.compiler.is_exporting() or not _TRACES:
        return None
    _TRACES.pop().__exit__(None, None, None)
    return tree_map(settled, output)


TRACING_HOOKS = (_begin, _end)


def _is_marked(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and getattr(value, "is_unrounded", False)


def _numbers(value: Any) -> Any:
    """Return the unrounded values of a marked tensor."""
    return value.numbers if _is_marked(value) else value


def _version(x: torch.Tensor) -> float:
    """Return a tensor's version, which in-place changes raise; NaN, equal to nothing, if unknown."""
    return float("nan") if torch.compiler.is_dynamo_compiling() or x.is_inference() else x._version


def _integer_range(value: Any) -> tuple[Range, int] | None:
    """Return the range in which an integer layer takes a tensor, unless it was changed since."""
    where, use, version = getattr(value, "integer_range", (None, 0, 0.0))
    return None if where is None or version != _version(value) else (where, use)


def _is_integer(value: Any) -> bool:
    """Tell whether a summand is an integer tensor, or also feeds an integer layer."""
    return _is_marked(value) or _integer_range(value) is not None


def _rounded(value: Any) -> Any:
    """Round a summand that is marked, or that also feeds an integer layer, in that layer's range."""
    known = None if _is_marked(value) else _integer_range(value)
    return settled(value) if known is None else known[0](value, known[1])


# Activations are uint8.
_LARGEST_ACTIVATION = 255
_FOLLOWED = 0.05
"""Share of a training batch in the moving average of a range."""

_RANGES = ("input_range", "output_range")

REDUCED_BITS = 7
"""Bits of weights that compute in integers where sums of 8-bit products overflow: on x86 without VNNI."""


def largest_integer(bits: int) -> int:
    """Return 2^(bits-1) - 1, but 64 for 7 bits, onnxruntime's `reduce_range`: 2 x 255 x 64 fits 16 bits."""
    return 64 if bits == REDUCED_BITS else 2 ** (bits - 1) - 1


def rounded_weight(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Round a weight (out, ...) to signed integers, one scale a channel, in its own units; gradients pass."""
    scale = weight.detach().abs().flatten(1).amax(1) / largest_integer(bits)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale)).reshape(-1, *[1] * (weight.ndim - 1))
    return weight + (torch.round(weight.detach() / scale) * scale - weight.detach())


class RoundedWeight(nn.Module):
    """The parametrisation that rounds a weight wherever it is read."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return rounded_weight(weight, self.bits)


def _to_uint8(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    levels = torch.div(x.float(), scale).round_().add_(zero)
    return levels.clamp_(0, _LARGEST_ACTIVATION).sub_(zero).mul_(scale).to(x.dtype)


class _RoundToUint8(torch.autograd.Function):
    """Rounding to scale * (q - zero) with q of 0 to 255; gradients pass where q is not cut off.

    The same as `torch.fake_quantize_per_tensor_affine`, which takes ten times as long on a CPU where channels
    come last (torch 2.15), but for dividing by the scale, as ONNX's QuantizeLinear does.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        if ctx.needs_input_grad[0]:
            ends = [scale * (end - zero) for end in (-0.5, _LARGEST_ACTIVATION + 0.5)]
            ctx.save_for_backward(x, *ends)
        return _to_uint8(x, scale, zero)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, low, high = ctx.saved_tensors
        if x.is_cuda:  # reading numbers on the host would synchronise
            return gradients[0].masked_fill((x <= low) | (x >= high), 0.0), None, None
        return torch.ops.aten.hardtanh_backward(gradients[0], x, float(low), float(high)), None, None


class ActivationRange(nn.Module):
    """The range of a tensor for each use of a layer, in which it rounds; in training a moving average."""

    low: torch.Tensor
    high: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))
        self.observing = False
        self.calls = 0

    @property
    def calibrated(self) -> bool:
        """Whether any value but 0 was seen; without a range nothing is rounded."""
        return bool((self.high > self.low).any())

    def reset(self) -> None:
        self.hold(1)
        self.low.zero_()
        self.high.zero_()

    def hold(self, uses: int) -> None:
        """Resize the buffers to this number of uses; new ranges are empty."""
        for name in ("low", "high"):
            old: torch.Tensor = getattr(self, name)
            if old.numel() != uses:
                new = old.new_zeros(uses)
                kept = min(uses, old.numel())
                new[:kept] = old.reshape(-1)[:kept]
                setattr(self, name, new if uses > 1 else new[0])

    def next_use(self) -> int:
        """Return the index of this call's range; calls beyond the last range share it."""
        if not self.observing and self.low.ndim == 0:
            return 0
        self.calls += 1
        return self.calls - 1 if self.observing else min(self.calls, len(self.low)) - 1

    def forward(self, x: torch.Tensor, use: int = 0) -> torch.Tensor:
        """Widen the range of a use if it is being observed; otherwise round to it."""
        if self.observing:
            self.hold(max(use + 1, self.low.numel()))
        low, high = (ends if ends.ndim == 0 else ends[use] for ends in (self.low, self.high))
        if self.observing or self.training:
            with torch.no_grad():
                least, most = x.detach().amin().to(low), x.detach().amax().to(high)
                if self.observing:
                    low.copy_(torch.minimum(low, least))
                    high.copy_(torch.maximum(high, most))
                    return x
                # A range includes 0, which padding and ReLU need exactly.
                low.lerp_(least.clamp_max(0.0), _FOLLOWED)
                high.lerp_(most.clamp_min(0.0), _FOLLOWED)
        exporting = torch.compiler.is_exporting()
        if not exporting and not x.is_cuda:
            return _in_range(x, low, high - low) if bool(high > low) else x
        # No branch on values: `torch.export` cannot trace it, and a GPU would synchronise.
        calibrated = high > low
        width = torch.where(calibrated, high - low, 1.0)
        return torch.where(calibrated, _in_range(x, low, width, exporting=exporting), x)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        self.hold_as(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def hold_as(self, tensors: Mapping[str, torch.Tensor], prefix: str) -> None:
        """Resize to the number of ranges that are stored under a prefix."""
        if f"{prefix}low" in tensors:
            self.hold(max(1, tensors[f"{prefix}low"].numel()))


def _in_range(
    x: torch.Tensor, low: torch.Tensor, width: torch.Tensor, *, exporting: bool = False
) -> torch.Tensor:
    scale = width / _LARGEST_ACTIVATION
    rounding = _to_uint8 if exporting else _RoundToUint8.apply
    rounded: torch.Tensor = rounding(x, scale, torch.round(-low / scale))
    return rounded


def _round_input(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    where: ActivationRange = module.input_range  # type: ignore[assignment]
    use = where.next_use()
    return (where(taken(args[0], where, use), use), *args[1:])


def _mark_output(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    where: ActivationRange = module.output_range  # type: ignore[assignment]
    return marked(output, where, where.next_use())


def _count_anew(model: nn.Module, _: Any) -> None:
    for where in _ranges_in(model):
        if where.calls:  # `torch.export` warns of attributes that are set
            where.calls = 0


def _ranges_in(model: nn.Module) -> list[ActivationRange]:
    return [module for module in model.modules() if isinstance(module, ActivationRange)]


_OUR_HOOKS = (_round_input, _mark_output, _count_anew, *TRACING_HOOKS)


def round_whole(model: nn.Module) -> None:
    """Add hooks that count the uses of integer layers and let `torch.export` trace the network, in place."""
    begin, end = TRACING_HOOKS
    if end not in model._forward_hooks.values():
        model.register_forward_pre_hook(_count_anew)
        model.register_forward_pre_hook(begin)
        model.register_forward_hook(end, always_call=True)


def round_weights(module: nn.Module, bits: int, names: Iterable[str] = ("weight",)) -> None:
    """Parametrise parameters of a module by their rounded values (`torch.nn.utils.parametrize`)."""
    for name in names:
        parametrize.register_parametrization(module, name, RoundedWeight(bits))


def round_activations(module: nn.Module) -> None:
    """Add hooks with which a convolution or linear layer rounds its input and marks its output."""
    for name in _RANGES:
        where = ActivationRange().to(next(module.parameters()).device)
        module.register_module(name, where.train(module.training))
    module.register_forward_pre_hook(_round_input)
    module.register_forward_hook(_mark_output)


def is_rounded(module: nn.Module) -> bool:
    return any(isinstance(part, RoundedWeight) for part in module.modules())


def integer_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the convolutions and linear layers that compute in integers, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "input_range", None), ActivationRange)
    }


def rounded_parameters(model: nn.Module) -> dict[str, int]:
    """Return the bits of every rounded parameter, by its name in the network without rounding."""
    bits_by_name = {}
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module):
            for parameter, steps in module.parametrizations.items():
                bits = next((step.bits for step in steps if isinstance(step, RoundedWeight)), None)
                if bits is not None:
                    bits_by_name[f"{name}.{parameter}" if name else parameter] = bits
    return bits_by_name


@public_call()
def calibrate_ranges(model: nn.Module, batches: Iterable[Inputs], *, inside: str = "") -> None:
    """Set the ranges of all activations to the values on some inputs, with only the weights rounded.

    Args:
        model: A network with integer layers; others are left as they are.
        batches: Model inputs, at least one batch.
        inside: Name of the layer that the network is, for messages.

    Raises:
        DecompositionError: If there are no inputs, or an activation is not finite or always 0.
    """
    layers = integer_layers(model)
    if not layers:
        return
    count = 0
    with _observing(model), evaluation_mode(model):
        for batch in batches:
            _count_anew(model, batch)
            tree_map(settled, run_model(model, batch))
            count += 1
    if any(where.low.ndim for where in _ranges_in(model)):
        round_whole(model)
    if not count:
        raise DecompositionError(
            "ranges of activations need at least one batch of inputs; give calibration images"
        )
    for path, layer in layers.items():
        name = ".".join(filter(None, (inside, path)))
        where: ActivationRange = layer.input_range  # type: ignore[assignment]
        if not bool(torch.isfinite(where.high - where.low).all()):
            raise DecompositionError(
                f"layer {name!r}: its inputs reach {float(where.low.min())} to {float(where.high.max())} on "
                "the calibration inputs, which no 8-bit range covers; check the network and the inputs"
            )
        if not where.calibrated:
            raise DecompositionError(
                f"layer {name!r}: its inputs are 0 on all calibration inputs, so they have no range; give "
                "inputs that reach the layer, or take Quantise off it"
            )


@contextmanager
def _observing(model: nn.Module) -> Iterator[None]:
    ranges = _ranges_in(model)
    for activation_range in ranges:
        activation_range.reset()
        activation_range.observing = True
    try:
        yield
    finally:
        for activation_range in ranges:
            activation_range.observing, activation_range.calls = False, 0


def reduce_weight_range(model: nn.Module) -> nn.Module:
    """Set the weights of layers that compute in integers to `REDUCED_BITS`, in place."""
    for layer in integer_layers(model).values():
        for step in layer.modules():
            if isinstance(step, RoundedWeight):
                step.bits = REDUCED_BITS
    return model


@public_call()
def without_rounding(model: nn.Module) -> nn.Module:
    """Make rounded weights plain parameters of the rounded values and let activations pass, in place.

    A runtime's quantiser starts from this network and finds the same scales again.
    """
    for module in model.modules():
        for name in _RANGES:
            module._modules.pop(name, None)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [
                key for key, hook in hooks.items() if any(hook is our_hook for our_hook in _OUR_HOOKS)
            ]:
                del hooks[key]
        if parametrize.is_parametrized(module):
            remove_parametrizations(module)
    return model
