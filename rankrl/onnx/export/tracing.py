"""From a module to an ONNX graph through `torch.export`, with errors that name the layer at fault."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from decomposition.errors import DecompositionError
from decomposition.network.inputs import Inputs, described, run_model, tensors_of
from rankrl.float32 import in_float32
from rankrl.onnx.errors import ExportError

if TYPE_CHECKING:
    import onnx_ir as ir

_ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FAILED_NODE = re.compile(r"Error when translating node %(\w+)")
_CAUSE_LENGTH = 300
_TRANSLATIONS: dict[tuple[Any, ...], Any] = {}


def inference_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the CPU that computes in float32, in evaluation mode, without gradients.

    Functions of torch that write into `out=` refuse to be traced with them.
    """
    try:
        return in_float32(model).cpu().eval().requires_grad_(False)
    except DecompositionError as error:
        raise ExportError(f"cannot export {type(model).__name__}: {error}.") from error


def trace(
    model: nn.Module, sample: Inputs, axes: Sequence[Mapping[int, str]]
) -> torch.export.ExportedProgram:
    """Capture the graph of a model."""
    try:
        with _silence(), _in_order(model, sample) as (args, keywords):
            free = dict(zip(map(id, tensors_of(sample)), map(_free, axes), strict=True))
            dynamic_shapes = _by_parameter(model, args, keywords, free) if any(axes) else None
            return torch.export.export(model, args, keywords, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:  # torch.export passes on whatever the model's own code raises
        layer = _failing_layer(model, error)
        advice = "Use only tensor operations in its forward: no branches on the values of tensors, no NumPy"
        if not _runs(model, sample):
            advice = "It fails outside of the export too: give the shape of one real input, without the batch"
        elif layer is None and any(axes) and isinstance(error, torch._dynamo.exc.UserError):
            advice = "If a layer needs a fixed batch size, export with dynamic_batch=False"
            if any(set(each) - {0} for each in axes):
                advice = "If a layer needs a fixed size, leave its axis out of dynamic_axes"
        raise ExportError(
            f"cannot export {type(model).__name__} to ONNX: {layer or 'the model'} cannot be traced with "
            f"{_given(sample)}: {_one_line(error)}. {advice}."
        ) from error


def convert(
    program: torch.export.ExportedProgram, model_name: str, opset: int | None, *, inputs: Sequence[str]
) -> ir.Model:
    """Translate a captured program into an ONNX graph, one node after the other, without optimising it."""
    outputs = len(program.graph_signature.user_outputs)
    names = ["output"] if outputs == 1 else [f"output_{index}" for index in range(outputs)]
    try:
        with _silence(), _operators_listed_once():
            converted = torch.onnx.export(
                program,
                dynamo=True,
                external_data=False,
                input_names=list(inputs),
                output_names=names,
                opset_version=opset,
                optimize=False,
                verbose=False,
            )
    except Exception as error:  # the exporter's error classes are private to torch
        layer = _untranslated_layer(program, error)
        raise ExportError(
            f"cannot export {model_name} to ONNX: {layer or 'the model'} uses an operation that has no ONNX "
            f"counterpart: {_one_line(_root_cause(error))}. Replace the operation, or export without it."
        ) from error
    if converted is None:
        raise ExportError(f"cannot export {model_name} to ONNX: torch.onnx.export returned no graph.")
    version = converted.model.graph.opset_imports[""]
    if opset is not None and version != opset:
        raise ExportError(
            f"cannot export {model_name} to ONNX opset {opset}: an operation in it needs opset {version}. "
            f"Choose opset {version}, or none for the default."
        )
    return converted.model


def _free(axes: Mapping[int, str]) -> dict[int, Any]:
    """Return the free axes of an input for torch; only the batch is known to be the same for all."""
    return {axis: torch.export.Dim.DYNAMIC if axis else torch.export.Dim("batch") for axis in axes}


def _by_parameter(
    model: nn.Module,
    positional: Sequence[torch.Tensor],
    keywords: Mapping[str, torch.Tensor],
    free: Mapping[int, Any],
) -> dict[str, Any]:
    """Return the free axes by parameter of the forward, of those by `id`; `*inputs` holds several."""
    arguments = inspect.signature(model.forward).bind_partial(*positional, **keywords).arguments
    return {
        name: tuple(free[id(each)] for each in value) if isinstance(value, tuple) else free[id(value)]
        for name, value in arguments.items()
    }


@contextlib.contextmanager
def _in_order(model: nn.Module, sample: Inputs) -> Iterator[tuple[tuple[torch.Tensor, ...], dict[str, Any]]]:
    """Yield what to call the model with; for a forward of `**inputs`, which torch refuses, in order."""
    if not isinstance(sample, dict):
        yield tensors_of(sample), {}
        return
    forward, own = model.forward, vars(model).get("forward")
    if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(forward).parameters.values()):
        yield (), sample
        return
    model.forward = lambda *inputs: forward(**dict(zip(sample, inputs, strict=True)))
    try:
        yield tensors_of(sample), {}
    finally:
        del model.forward
        vars(model).update({} if own is None else {"forward": own})


@contextlib.contextmanager
def _operators_listed_once() -> Iterator[None]:
    """Keep torch from reading its translations of operators anew for this export, and from listing all often.

    It parses the source of every translation at each export, which takes half of the time of a small one, and
    lists the operators of all libraries once for each of thirty, twice; a budget in time exports dozens. Both
    are private to torch: what is not found, or another than expected, is left as it is. The translations are
    kept for later exports, the list is not: a program may load operators of its own in between.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_translations_kept())
        stack.enter_context(_list_kept())
        yield


@contextlib.contextmanager
def _list_kept() -> Iterator[None]:
    try:
        from torch._export import utils

        own = utils._materialize_cpp_cia_ops
    except (ImportError, AttributeError):
        yield
        return
    utils._materialize_cpp_cia_ops = cache(own)
    try:
        yield
    finally:
        utils._materialize_cpp_cia_ops = own


@contextlib.contextmanager
def _translations_kept() -> Iterator[None]:
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:
        ONNXRegistry = None  # type: ignore[assignment,misc]
    own = getattr(ONNXRegistry, "__dict__", {}).get("from_torchlib")
    if not isinstance(own, classmethod):
        yield
        return

    def known(cls: type, *args: Any, **options: Any) -> Any:
        key = (*args, *sorted(options.items()))
        if key not in _TRANSLATIONS:
            _TRANSLATIONS[key] = own.__func__(cls, *args, **options)
        return _TRANSLATIONS[key]

    ONNXRegistry.from_torchlib = classmethod(known)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        ONNXRegistry.from_torchlib = own  # type: ignore[method-assign,assignment]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep the exporter's warnings and log lines off the terminal; its errors are raised all the same."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        # Of a graph that cannot be traced, torch prints what it has so far.
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _given(sample: Inputs) -> str:
    if isinstance(sample, torch.Tensor):
        return f"an input of shape {tuple(sample.shape)}"
    return f"the inputs {described(sample)}"


def _runs(model: nn.Module, sample: Inputs) -> bool:
    """Tell whether the model accepts the sample at all."""
    try:
        with torch.no_grad():
            run_model(model, sample)
    except Exception:  # whatever the model's own code raises
        return False
    return True


def _failing_layer(model: nn.Module, error: BaseException) -> str | None:
    """Return the innermost submodule that was running when the error was raised."""
    names = {id(module): name for name, module in model.named_modules()}
    layer = None
    traceback = error.__traceback__
    while traceback is not None:
        module = traceback.tb_frame.f_locals.get("self")
        if isinstance(module, nn.Module) and names.get(id(module)):
            layer = f"layer '{names[id(module)]}' ({type(module).__name__})"
        traceback = traceback.tb_next
    return layer


def _untranslated_layer(program: torch.export.ExportedProgram, error: BaseException) -> str | None:
    """Return the submodule that the operation named in a conversion error belongs to."""
    match = _FAILED_NODE.search(str(error))
    if match is None:
        return None
    for candidate in (program, program.run_decompositions()):
        for node in candidate.graph.nodes:
            stack = node.meta.get("nn_module_stack")
            if node.name == match.group(1) and stack:
                path, kind = list(stack.values())[-1]
                kind = kind if isinstance(kind, str) else kind.__name__
                return f"layer '{path}' ({kind.rsplit('.', 1)[-1]})" if path else None
    return None


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _one_line(error: BaseException) -> str:
    """Return the first line of an error's message, without colours and within a readable length."""
    lines = [line.strip() for line in _ANSI_COLOUR.sub("", str(error)).splitlines() if line.strip()]
    text = lines[0].rstrip(".") if lines else type(error).__name__
    return text if len(text) <= _CAUSE_LENGTH else text[: _CAUSE_LENGTH - 1] + "…"
