"""Compensating for removed inputs: the rest of a layer reproduces its former outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn

from decomposition.calibration.input_check import checked_batches
from decomposition.calibration.moments import PATCHES_PER_LAYER
from decomposition.errors import DecompositionError
from decomposition.fit.lockstep import absorbs_mean, refit_in_lockstep, solved
from decomposition.network.inputs import Inputs
from decomposition.network.kinds import weight_of
from decomposition.network.layers import inspect_layers
from decomposition.network.surgery import copied
from decomposition.network.wrappers import unwrapped
from decomposition.public_calls import public_call


@public_call()
def compensate(
    model: nn.Module,
    present: Mapping[str, torch.Tensor],
    images: Inputs,
    *,
    removed: Collection[str] = (),
    substitutes: Mapping[str, nn.Module] | None = None,
    correct_batch_norm: bool = True,
    max_patches: int = PATCHES_PER_LAYER,
    seed: int = 0,
) -> nn.Module:
    """Return a copy of `model` whose weights compensate for what is going to be removed.

    Layer by layer in forward order, the weights on the inputs that stay are solved for by least squares, so
    that the layer's outputs become those of the dense network as nearly as the inputs allow: the channel
    pruning of He et al. (ICCV 2017, eq. 5) with the asymmetric reconstruction of its section 3.3, for a whole
    network in one forward pass. Layers that lose no inputs take part: they undo the errors of those before.

    Args:
        model: The dense model; left untouched.
        present: For layers that lose inputs, which channels (or features) stay, boolean, shape (in,). The
            weights on the others are left in place, to be cut.
        images: Model inputs, one batch of a few hundred to a few thousand.
        removed: Modules, residual blocks say, that are gone in the copy: an identity stands in their place.
        substitutes: What takes the place of some modules behind what is removed, by their names: norms that
            leave out channels that are going to be cut, say. The copy has its own modules again.
        correct_batch_norm: Shift every batch norm's running mean by the change of its input's mean.
        max_patches: Input patches that each layer is fitted on at most. A layer for which they are fewer than
            four for each weight of an output channel keeps its weights.
        seed: Seed of the patch positions.

    Raises:
        DecompositionError: If a module is unknown, a layer is no plain convolution or linear layer, a mask
            does not fit its inputs, the images are unusable, or the model cannot be refitted in one pass.
    """
    model = unwrapped(model)
    (images,) = checked_batches(images, model, present)
    network = copied(model)
    modules = dict(network.named_modules())
    gone = tuple(f"{name}." for name in removed)
    specs = {
        spec.name: spec
        for spec in inspect_layers(model, images)
        if spec.refusal is None and not spec.name.startswith(gone)
    }
    for name in substitutes or {}:
        if name not in modules:
            raise DecompositionError(
                f"there is a substitute for {name!r}, which is no module of the model; take names from "
                "named_modules()"
            )
    for name, mask in present.items():
        if name not in specs:
            raise DecompositionError(
                f"layer {name!r} cannot be refitted to fewer inputs: it is no plain convolution or linear "
                f"layer of the model; choose among {', '.join(specs)}"
            )
        if mask.shape != (specs[name].in_channels,) or mask.dtype != torch.bool:
            raise DecompositionError(
                f"layer {name!r} has {specs[name].in_channels} input channels, its mask is {mask.dtype} of "
                f"shape {tuple(mask.shape)}; give one boolean for each channel"
            )

    def arriving(name: str) -> int:
        inputs = weight_of(modules[name])[0]
        return inputs.numel() if name not in present else inputs[present[name].cpu()].numel()

    refit_in_lockstep(
        network,
        {name: solved(modules[name], arriving(name)) for name in specs},
        images,
        present=present,
        removed=removed,
        substitutes=substitutes,
        mean_absorbed={name for name, spec in specs.items() if absorbs_mean(spec, correct_batch_norm)},
        correct_batch_norm=correct_batch_norm,
        max_patches=max_patches,
        seed=seed,
        shrink=False,  # the original weights on what is left do not make up for what is gone
    )
    return network
