"""Save and load compressed networks; exchange cores with tensorly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from decomposition.errors import DecompositionError, PlanError
from decomposition.files import replacing
from decomposition.fit.fitting import Fit
from decomposition.formats import get_format
from decomposition.formats.layers import FactorisedLayer
from decomposition.formats.tensorly_objects import read_tensorly
from decomposition.network.cost import evaluation_mode
from decomposition.network.geometry import WeightModes
from decomposition.network.inputs import (
    ExampleInputs,
    InputShape,
    input_shape_of,
    random_batch,
    run_model,
    tensors_in,
    tensors_of,
)
from decomposition.network.layers import DecomposableModule, inspect_layers, is_decomposable_module, weight_of
from decomposition.network.rounding import ActivationRange
from decomposition.network.surgery import unwrapped, warn_lost_attributes
from decomposition.operations import Factorise, factors_of
from decomposition.plan.apply import build_structure, dense_form, factorised_layers
from decomposition.plan.plan import CompressionPlan, LayerPlan, fingerprint, without_growth
from decomposition.public_calls import public_call
from decomposition.rewrites import rewrites_of

_NOT_FINITE = "holds NaN or infinite values; its training diverged: train at a lower learning rate"
_PLAN_KEY = "rankrl.plan"


@public_call()
def save_compressed(
    model: nn.Module, plan: CompressionPlan, path: str | Path, *, dense: nn.Module | None = None
) -> None:
    """Write a compressed model and its plan to one safetensors file, atomically.

    The file is loaded back and compared with the model, tensors bit for bit and outputs on a random input,
    before it appears under its name.

    Args:
        model: The compressed model, the result of `apply_plan` for `plan`, fine-tuned or not.
        plan: Its plan; stored in the file's metadata.
        path: File to write, by custom `*.safetensors`.
        dense: The dense model, into whose architecture the file is loaded to check it; its weights are not
            used. Without it the architecture is taken from `model`, its factorised layers made dense again.

    Raises:
        PlanError: If `model` is not what the plan makes of its dense model, or a parameter is not finite.
        StorageError: If the file cannot be written.
    """
    path, model = Path(path), unwrapped(model)
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise PlanError(f"{path} is not written, because {name} {_NOT_FINITE}")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _own_tensors(model).items()}
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={_PLAN_KEY: plan.to_json()})
        try:
            loaded = _loaded_back(model, temporary, dense)
        except DecompositionError as error:
            raise PlanError(
                f"{path} is not written, because it could not be loaded again: the model is not what the "
                f"plan makes of its dense model ({error}); save what apply_plan returned for this plan"
            ) from error
        _compare(model, loaded, plan.input_shape, path)


@public_call()
def load_compressed(
    model: nn.Module, path: str | Path, plan: CompressionPlan | None = None
) -> tuple[nn.Module, CompressionPlan]:
    """Load what `save_compressed` wrote, whatever the plan's operations are.

    Args:
        model: The dense model's architecture, as its class makes it; its weights are not used and it is left
            untouched. What was rewritten before the plan (`plain_attention` and the like) is rewritten again.
        path: The file.
        plan: The plan, if it is to be another copy than the file's own.

    Returns:
        The compressed model, in the floating-point types that it was saved in, and its plan.

    Raises:
        PlanError: If the file cannot be read, holds no plan, or does not fit the model.
    """
    try:
        if Path(path).exists() and not Path(path).is_file():  # reading a pipe or device may never end
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
    model = plan.prepared(model)
    compressed = build_structure(model, plan)
    for name, part in compressed.named_modules():
        if isinstance(part, ActivationRange):
            part.hold_as(tensors, f"{name}.")
    modules = dict(model.named_modules())
    warn_lost_attributes(model, {name: modules[name] for name in plan.chosen(Factorise)})
    expected = _own_tensors(compressed)
    missing, unknown = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    misfits = [n for n, t in expected.items() if n in tensors and tensors[n].shape != t.shape]
    if missing or unknown or misfits:
        raise PlanError(
            f"{path} does not fit the model under its plan: missing {missing[:3]}, unknown {unknown[:3]}, "
            f"other shapes {misfits[:3]}; load it into the architecture that it was made from"
        )
    parameters = dict(compressed.named_parameters())
    for name, tensor in expected.items():
        _check_values(f"{path}: {name}", tensors[name], tensor, is_parameter=name in parameters)
    _take_types(compressed, tensors, path)
    with torch.no_grad():
        for name, tensor in _own_tensors(compressed).items():
            tensor.copy_(tensors[name])
    return compressed, plan


def _take_types(model: nn.Module, tensors: Mapping[str, torch.Tensor], path: str | Path) -> None:
    """Cast a model to the floating-point types of a file's tensors; a single type applies to all."""
    kinds = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(kinds) == 1:
        (kind,) = kinds
        model._apply(lambda x: x.to(kind) if x.is_floating_point() else x)
    for name, tensor in _own_tensors(model).items():
        tensor.data = tensor.data.to(tensors[name].dtype)
    for layer, module in model.named_modules():
        if is_decomposable_module(module) or isinstance(module, FactorisedLayer):
            types = {name: tensor.dtype for name, tensor in module.named_parameters()}
            if len(set(types.values())) > 1:
                raise PlanError(
                    f"{path}: layer {layer!r} has parameters of several types ({types}); it computes in one: "
                    "save the model again"
                )


def _check_values(name: str, tensor: torch.Tensor, current: torch.Tensor, *, is_parameter: bool) -> None:
    """Refuse tensors whose copy would lose information, and values that are not finite where they must be."""
    if (
        tensor.is_floating_point() != current.is_floating_point()
        or tensor.is_complex() != current.is_complex()
    ):
        raise PlanError(f"{name} is {tensor.dtype}, but the model needs {current.dtype}; save the model anew")
    wrong = ~torch.isfinite(tensor)
    if not is_parameter:
        wrong &= torch.isfinite(current)
    if bool(wrong.any()):
        raise PlanError(f"{name} {_NOT_FINITE}")


def _loaded_back(model: nn.Module, path: Path, dense: nn.Module | None) -> nn.Module:
    """Load the file that was written for `model`, in eval mode, with the plan from the file."""
    if dense is not None:
        return load_compressed(dense, path)[0].eval()
    with safe_open(path, framework="pt") as file:
        plan = CompressionPlan.from_json(file.metadata()[_PLAN_KEY])
    architecture = dense_form(model, plan)
    # The model has its group operations applied; only the other entries still apply.
    left = plan.after_groups(architecture, lambda kind, network, operations: network)[1]
    return load_compressed(architecture, path, left)[0].eval()


def _compare(model: nn.Module, loaded: nn.Module, input_shape: InputShape, path: Path) -> None:
    """Refuse a model that differs after loading it back."""
    expected, actual = _own_tensors(model), _own_tensors(loaded)
    for name, tensor in expected.items():
        if actual[name].dtype != tensor.dtype or not _equal(tensor.detach(), actual[name].detach()):
            raise PlanError(
                f"{path} is not written: tensor {name!r} is another one when it is loaded back; load it into "
                "an architecture of the same precision, and check the disk"
            )
    batch = random_batch(model, input_shape, 1)
    device = tensors_of(batch)[0].device
    outputs = []
    for network in (model, loaded.to(device)):
        with evaluation_mode(network), torch.random.fork_rng():
            torch.manual_seed(0)
            outputs.append(tensors_in(run_model(network, batch)))
    if not all(_equal_but_for_rounding(before, after) for before, after in zip(*outputs, strict=True)):
        raise PlanError(
            f"{path} is not written: loaded back, the model has other outputs, although its tensors are the "
            "same; keep everything that its forward needs in parameters and persistent buffers"
        )


def _equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors hold the same numbers, not-a-number included."""
    if tensor.shape != other.shape:
        return False
    other = other.to(tensor)
    return bool(((tensor == other) | ((tensor != tensor) & (other != other))).all())


def _equal_but_for_rounding(output: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether outputs agree in half their digits: another memory order of weights rounds differently."""
    if output.shape != other.shape or not output.is_floating_point():
        return _equal(output, other)
    largest = float(output.abs().nan_to_num(0.0, 0.0).max()) if output.numel() else 0.0
    allowed = torch.finfo(output.dtype).eps ** 0.5 * largest
    return torch.allclose(output, other, rtol=0.0, atol=allowed, equal_nan=True)


def _own_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of `model`, a tensor with several names under the first of them only."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor
    return tensors


@public_call()
def from_tensorly(tensor: Any, layer: DecomposableModule, *, tensor_format: str | None = None) -> Fit:
    """Read factors that tensorly computed of a layer's weight.

    Args:
        tensor: A `CPTensor`, `TuckerTensor`, `TTTensor` or `TRTensor` in any backend; or what tensorly takes
            for one: `(weights, factors)`, `(core, factors)`, also with two factors as of `partial_tucker`, or
            a list of cores. It stands for a tensor (out, in, *kernel), the kernel's axes joint or apart;
            trains and rings may split the channels into several modes.
        layer: The Conv1d, Conv2d or Linear whose weight it stands for.
        tensor_format: Name of the format to read a train or ring as; `None` for the object's own.

    Returns:
        The fit in the layer's format: weights and further kernel factors are contracted into the cores, which
        changes nothing of the tensor. Its error is |W - V| / |W|, W the layer's weight.

    Raises:
        DecompositionError: If it is no such object or stands for a tensor of another shape, if its ranks are
            larger than the format can use, or the layer cannot be decomposed.
    """
    if not is_decomposable_module(layer) or getattr(layer, "groups", 1) > 1:
        raise DecompositionError(
            f"factors are of a Conv1d, Conv2d or Linear with groups=1, not of {layer}; give the dense layer"
        )
    factors = read_tensorly(tensor)
    name = factors.kind if tensor_format is None else tensor_format
    form = get_format(name)
    if factors.kind not in (name, *form.tensorly_kinds):
        raise DecompositionError(
            f"tensorly's object is of the format {factors.kind!r} and cannot be read as {name!r}; leave "
            "tensor_format out"
        )
    weight = weight_of(layer)
    size = () if isinstance(layer, nn.Linear) else tuple(layer.kernel_size)
    plain = WeightModes((weight.shape[0],), (weight.shape[1],), weight.shape[2], size)
    cores, ranks, modes = form.from_tensorly(factors, plain)
    ranks = form.check_ranks(modes, ranks, str(layer))
    cores = [core.contiguous() for core in cores]
    lost = float((weight - form.reconstruct(cores, modes)).norm())
    whole = float(weight.norm())
    error = lost / whole if whole else float("inf") if lost else 0.0
    return Fit(cores, error, form, modes, ranks)


def as_operation(fit: Fit) -> Factorise:
    """Return the operation that gives a layer the format and ranks of a fit."""
    return Factorise(fit.tensor_format.name, fit.ranks, factors_of(fit.modes))


@public_call()
def apply_fits(
    model: nn.Module, input_shape: ExampleInputs, fits: Mapping[str, Fit], *, chosen_by: str = "user"
) -> tuple[nn.Module, CompressionPlan]:
    """Return a copy of `model` whose layers hold given cores, not fitted again, and its plan.

    Args:
        model: The dense model; left untouched.
        input_shape: Shape of one input without the batch axis, or a batch of inputs.
        fits: Fits by layer name; layers that are not named stay dense, and so do those that would get no
            smaller, with the reason.
        chosen_by: Recorded in the plan.

    Raises:
        PlanError: If a name is no compressible layer of the model.
        DecompositionError: If a fit is of a weight of another shape.
    """
    model = unwrapped(model)
    specs = inspect_layers(model, input_shape)
    known = {spec.name for spec in specs if spec.refusal is None}
    unknown = [name for name in fits if name not in known]
    if unknown:
        raise PlanError(f"{unknown[0]!r} is no compressible layer; choose from {', '.join(sorted(known))}")
    entries = {name: LayerPlan(name, (as_operation(fit),)) for name, fit in fits.items()}
    layers = tuple(
        without_growth(entries[spec.name], spec)
        if spec.name in entries
        else LayerPlan(spec.name, reason=spec.refusal or "no factors were given")
        for spec in specs
    )
    shape, rewrites = input_shape_of(input_shape), rewrites_of(model)
    plan = CompressionPlan(layers, fingerprint(specs), shape, chosen_by, preparation=rewrites)
    network = build_structure(model, plan)
    for name, layer in factorised_layers(network).items():
        dense: Any = model.get_submodule(name)
        layer.load(fits[name].cores, dense.bias, fits[name].error)
    return network, plan
