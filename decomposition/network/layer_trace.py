"""One forward pass that records how each layer is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from decomposition.errors import DecompositionError
from decomposition.network.cost import evaluation_mode
from decomposition.network.input_specs import InputShape, InputSpec
from decomposition.network.inputs import Inputs, run_model
from decomposition.network.kinds import BatchNorm, ListedModule
from decomposition.network.opaque import OPAQUE, OpaqueModule, macs_of_call


class LayerTrace:
    """One forward pass that records each layer's calls and which batch norm consumes its output."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
        self.calls: dict[ListedModule, list[tuple[torch.Size, torch.Size]]] = {}
        self.opaque_calls: dict[OpaqueModule, list[tuple[int, int]]] = {}
        self.reached: dict[ListedModule | OpaqueModule, None] = {}
        self.uses: dict[ListedModule, list[tuple[torch.Size, torch.Size]]] = {}
        self.batch_norms: dict[nn.Module, nn.Module] = {}
        # The outputs are kept alive for the pass: an id would otherwise be reused by a later tensor.
        self._outputs: list[tuple[torch.Tensor, nn.Module]] = []

    def run(self, batch: Inputs, shape: InputShape) -> None:
        """Run the model once on a batch."""
        handles = []
        for module in self.names:
            if isinstance(module, ListedModule):
                handles.append(module.register_forward_hook(self._record_call))
            elif isinstance(module, OPAQUE):
                handles.append(module.register_forward_hook(self._record_opaque, with_kwargs=True))
            elif isinstance(module, BatchNorm):
                handles.append(module.register_forward_pre_hook(self._record_batch_norm))
        try:
            with evaluation_mode(self.model), _FunctionalUses(self):
                run_model(self.model, batch)
        except Exception as error:  # whatever the model's own code raises
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            inputs, advice = (
                f"an input of shape {shape}",
                "the shape of one real input, or a batch of real ones",
            )
            if isinstance(shape, InputSpec):
                inputs, advice = f"the inputs {shape}", "a batch of real inputs"
            raise DecompositionError(
                f"the model does not accept {inputs} (without the batch axis): {reason}; pass {advice}"
            ) from error
        finally:
            for handle in handles:
                handle.remove()

    def _record_call(self, module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        tensors = [tensor for tensor in (*inputs[:1], output) if isinstance(tensor, torch.Tensor)]
        if isinstance(module, ListedModule) and len(tensors) == 2:  # a subclass may take and return others
            self.reached[module] = None
            self.calls.setdefault(module, []).append((inputs[0].shape, output.shape))
            self._outputs.append((output, module))

    def _record_opaque(
        self, module: OpaqueModule, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        self.reached[module] = None
        self.opaque_calls.setdefault(module, []).append(macs_of_call(module, inputs, keywords))

    def _record_batch_norm(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        for output, producer in self._outputs:
            if output is inputs[0]:
                self.batch_norms[producer] = module


class _FunctionalUses(TorchFunctionMode):
    """Records in a trace which linear layers' weights are used by functions instead of by their layer."""

    def __init__(self, trace: LayerTrace) -> None:
        super().__init__()
        self.trace = trace
        self.owners = {id(m.weight): m for m in trace.names if isinstance(m, nn.Linear)}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = dict(kwargs or {})
        output = func(*args, **keywords)
        if func is F.linear:
            x, weight = (*args[:2], *(keywords[key] for key in ("input", "weight") if key in keywords))
            self._record(weight, x, output)
        elif func is F.multi_head_attention_forward:
            weight = inspect.signature(func).bind(*args, **keywords).arguments["out_proj_weight"]
            self._record(weight, output[0], output[0])
        return output

    def _record(self, weight: torch.Tensor, x: torch.Tensor, output: torch.Tensor) -> None:
        owner = self.owners.get(id(weight))
        if owner is not None:
            self.trace.uses.setdefault(owner, []).append((x.shape, output.shape))
