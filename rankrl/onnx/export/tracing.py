"""Trace modules, translate the traces to ONNX graphs, and compare ONNX files with their modules."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from decomposition.errors import DecompositionError
from decomposition.network.inputs import (
    ExampleInputs,
    Inputs,
    as_inputs,
    count_inputs,
    described,
    mapped,
    random_batch,
    rows,
    run_model,
    tensors_in,
    tensors_of,
)
from rankrl.data import Preprocessing
from rankrl.device import in_float32, in_layout
from rankrl.errors import ExportError
from rankrl.onnx.runtimes import DEFAULT_RUNTIME, Batch, open_session

if TYPE_CHECKING:
    import onnx_ir as ir


ONLY_INPUT = "input"
"""Name in the file of an input that the forward has no name for."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def input_names(model: nn.Module, inputs: Inputs) -> list[str]:
    """Return the names of a file's inputs: those of the forward's parameters, if no weight is called so."""
    count = len(tensors_of(inputs))
    parameters = inspect.signature(model.forward).parameters.values()
    positional = [each.name for each in parameters if each.kind in _POSITIONAL]
    names = list(inputs) if isinstance(inputs, dict) else positional[:count]
    return names if len(names) == count and not set(names) & set(model.state_dict()) else plain_names(count)


def plain_names(count: int) -> list[str]:
    return [ONLY_INPUT] if count == 1 else [f"{ONLY_INPUT}_{index}" for index in range(count)]


def feed_of(model: nn.Module, inputs: Inputs) -> Batch:
    """Return a batch as a float32 file takes it: one array, or arrays by name where there are several."""
    arrays = [_array(tensor) for tensor in tensors_of(inputs)]
    if isinstance(inputs, torch.Tensor):
        return arrays[0]
    return dict(zip(input_names(model, inputs), arrays, strict=True))


def random_feed(model: nn.Module, input_shape: ExampleInputs, batch: int) -> Batch:
    """Return a random batch for timing, with integers that the network accepts."""
    return feed_of(model, random_batch(model, input_shape, batch))


def _array(x: torch.Tensor) -> np.ndarray[Any, Any]:
    x = x.detach().cpu().contiguous()
    array: np.ndarray[Any, Any] = (x.float() if x.is_floating_point() else x).numpy()
    return array


_ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_FAILED_NODE = re.compile(r"Error when translating node %(\w+)")
_CAUSE_LENGTH = 300  # characters of torch's message that an error quotes
_TRANSLATIONS: dict[tuple[Any, ...], Any] = {}


def inference_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the CPU in float32 and evaluation mode, without gradients."""
    try:  # functions of torch that write into `out=` refuse to be traced with gradients
        return in_float32(model).cpu().eval().requires_grad_(False)
    except DecompositionError as error:
        raise ExportError(f"cannot export {type(model).__name__}: {error}.") from error


def trace(
    model: nn.Module, sample: Inputs, axes: Sequence[Mapping[int, str]]
) -> torch.export.ExportedProgram:
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
    """Yield the arguments of a call; for a forward of `**inputs`, which torch refuses, positional ones."""
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
    """Cache torch's operator translations, and its list of operators during an export.

    It parses the source of every translation at each export, which takes half of the time of a small one, and
    lists the operators of all libraries once for each of thirty, twice; a budget in time exports dozens. Both
    are private to torch: attributes that are missing or unexpected are left as they are. The translations are
    kept for later exports, the list is not: a program may load operators of its own in between.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, AttributeError):
            utils = importlib.import_module("torch._export.utils")
            listed = cache(utils._materialize_cpp_cia_ops)
            stack.enter_context(_replaced(utils, "_materialize_cpp_cia_ops", listed))
        with contextlib.suppress(ImportError, AttributeError):
            registry = importlib.import_module("torch.onnx._internal.exporter._registration").ONNXRegistry
            own = vars(registry).get("from_torchlib")
            if isinstance(own, classmethod):
                known = classmethod(partial(_translations, own.__func__))
                stack.enter_context(_replaced(registry, "from_torchlib", known))
        yield


def _translations(translate: Callable[..., Any], cls: type, *args: Any, **options: Any) -> Any:
    """Return torch's translations, which are made once."""
    key = (*args, *sorted(options.items()))
    if key not in _TRANSLATIONS:
        _TRANSLATIONS[key] = translate(cls, *args, **options)
    return _TRANSLATIONS[key]


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    own = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep the exporter's warnings and log lines off the terminal; its errors are raised all the same."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        # torch prints the partial graph of a module that cannot be traced.
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


BATCH_SIZES = (1, 7)
"""Two sizes, because a batch size that tracing froze shows only at another one."""


def verify_onnx(
    model: nn.Module,
    path: str | Path,
    inputs: ExampleInputs,
    *,
    tolerance: float = 1e-4,
    preprocessing: Preprocessing | None = None,
    runtime: str = DEFAULT_RUNTIME,
) -> float:
    """Compare an ONNX file in a runtime with its model in PyTorch (float32, evaluation mode, CPU).

    Compared at the batch sizes 1 and 7, or at the file's own where it was exported with a fixed one.
    """
    real = as_inputs(inputs)
    if count_inputs(real) == 0:
        raise ExportError("inputs holds no image; give at least one to compare the ONNX file with the model.")
    session = open_session(path, runtime=runtime)
    fixed = session.fixed_batch
    duplicate = inference_copy(model)
    largest = 0.0
    for size in (fixed,) if fixed is not None else BATCH_SIZES:
        batch = mapped(_plain, rows(real, torch.arange(size) % count_inputs(real)))
        images = batch
        if preprocessing is not None and isinstance(batch, Tensor):
            images = preprocessing.normalised(batch)
        with torch.no_grad():
            expected = [output.numpy() for output in tensors_in(run_model(duplicate, images))]
        got = session.run(feed_of(duplicate, batch))
        shapes = [output.shape for output in expected], [output.shape for output in got]
        if shapes[0] != shapes[1]:
            raise ExportError(
                f"{path} returns {shapes[1]} for a batch of {size}, the PyTorch model {shapes[0]}. "
                "A layer may have fixed the batch size while it was traced; export with dynamic_batch=False."
            )
        for reference, output in zip(expected, got, strict=True):
            difference = float(np.abs(output.astype(np.float64) - reference).max(initial=0.0))
            allowed = tolerance * max(1.0, float(np.abs(reference).max(initial=0.0)))
            if not difference <= allowed:  # also true of NaN
                raise ExportError(
                    f"{path} differs from the PyTorch model by {difference:.2e} for a batch of {size} in "
                    f"{runtime}; at most {allowed:.2e} is accepted. Do not use this file there; try another "
                    "opset, or fold_batchnorm=False."
                )
            largest = max(largest, difference)
    return largest


def onnx_accuracy(
    path: str | Path, batches: Iterable[tuple[Tensor | np.ndarray[Any, Any], Tensor | np.ndarray[Any, Any]]]
) -> float:
    """Measure a classifier's accuracy from its ONNX file alone, on batches of images or bytes and classes."""
    session = open_session(path)
    correct = total = 0
    for images, labels in batches:
        batch = _as_array(images)
        if session.input_dtype == np.float32 and np.issubdtype(batch.dtype, np.floating):
            batch = batch.astype(np.float32)
        logits = session.run(batch)[0]
        correct += int((logits.argmax(axis=1) == _as_array(labels)).sum())
        total += len(logits)
    if total == 0:
        raise ExportError("there are no images to measure the accuracy of the ONNX file on.")
    return correct / total


def _plain(x: Tensor) -> Tensor:
    """Return an input on the CPU, contiguous, in float32 where it is no integer."""
    x = x.detach().cpu()
    return in_layout(x.float() if x.is_floating_point() else x, torch.contiguous_format)


def _as_array(values: Tensor | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values
