"""Find, choose and remove residual blocks that a network can do without.

A residual block adds the output of its layers to its input. Without these layers it is an identity, so the
network stays whole and becomes less deep (Veit et al., NIPS 2016, who remove single blocks of
trained networks; Chen & Zhao, TPAMI 2019, who choose them by what they add to the features). All of a block's
time goes with it, on every processor: fewer channels and smaller factors save little of it where layers are
narrow already.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import fx, nn

from pruning.copies import copied, fresh_input, plain_network, public_call
from pruning.errors import PruningError
from pruning.registry import register_pruner

Cost = Callable[[nn.Module], float]

_ADDITIONS = (operator.add, operator.iadd, torch.add)
_ACTIVATIONS = (F.relu, F.gelu, F.silu, F.dropout, torch.relu, "relu", "relu_")
_HANDING_ON = (nn.Identity, nn.Sequential, nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Dropout, nn.Dropout2d)
# Calibration inputs that run at once: bounds the memory of activations.
_BATCH = 256


@dataclass(frozen=True)
class ResidualBlock:
    """A block that can be removed.

    Attributes:
        name: Its module's name.
        layers: Names of the modules in it that have parameters of their own, in order of definition.
    """

    name: str
    layers: tuple[str, ...]


@public_call
def residual_blocks(model: nn.Module, example_input: torch.Tensor) -> list[ResidualBlock]:
    """Return the blocks that can be removed: those whose output is their input and something added to it.

    Of blocks inside one another only the innermost are returned. Blocks that change the shape (of the first
    of a stage, say), run several times, take several inputs or cannot be traced are left out.

    Args:
        model: The network; left untouched.
        example_input: A batch that it accepts.
    """
    model = plain_network(model)
    blocks: list[ResidualBlock] = []
    for name, (module, calls, same_shape) in _run(model, example_input).items():
        layers = tuple(
            f"{name}.{inner}"
            for inner, part in module.named_modules()
            if inner and any(True for _ in part.parameters(recurse=False))
        )
        inside = any(block.name.startswith(f"{name}.") for block in blocks)
        if layers and calls == 1 and same_shape and not inside and _adds_its_input(module):
            blocks.append(ResidualBlock(name, layers))
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    return sorted(blocks, key=lambda block: order[block.name])


@public_call
def remove_blocks(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """Return a copy of a network in which these blocks are identities."""
    smaller = copied(plain_network(model))
    for name in names:
        smaller.set_submodule(name, nn.Identity())
    return smaller


@register_pruner(
    "blocks",
    "whole residual blocks, those first that change the output least for what they cost",
    unit="blocks",
)
def least_needed_blocks(
    model: nn.Module,
    blocks: Sequence[ResidualBlock],
    calibration: torch.Tensor,
    cost: Cost,
    fraction: float,
) -> list[str]:
    """Choose blocks to remove until a network costs no more than a fraction of the whole one.

    One block goes at a time: that for which the squared change of the network's output, all blocks that are
    gone together, grows least for the cost that it saves. A block is tried again only when its last trial
    makes it the best one left.
    """
    if len(calibration) == 0:
        raise PruningError("pruner 'blocks' needs calibration inputs; pass a few hundred")
    require_blocks_suffice(model, blocks, cost, fraction)
    model = copied(plain_network(model)).eval()
    reference = _outputs(model, calibration)
    whole = remaining = cost(model)
    saves = {block.name: whole - cost(remove_blocks(model, [block.name])) for block in blocks}
    saved = {name: share for name, share in saves.items() if share > 0}
    gone: list[str] = []
    changed = 0.0  # squared output change by the blocks removed so far

    def change(name: str) -> float:
        outputs = _outputs(remove_blocks(model, [*gone, name]), calibration)
        return float((outputs - reference).square().mean())

    last = {name: change(name) / share for name, share in saved.items()}
    while remaining > fraction * whole:
        fresh: set[str] = set()
        while (best := min(last, key=last.__getitem__)) not in fresh:
            last[best] = (change(best) - changed) / saved[best] if gone else last[best]
            fresh.add(best)
        changed += last.pop(best) * saved[best]
        gone.append(best)
        remaining = cost(remove_blocks(model, gone))
    return gone


@public_call
def require_blocks_suffice(
    model: nn.Module, blocks: Sequence[ResidualBlock], cost: Cost, fraction: float
) -> None:
    """Check that a network without these blocks costs no more than `fraction` of the whole one.

    Raises:
        PruningError: If it does, or there are no blocks.
    """
    if not blocks:
        raise PruningError(
            "the network has no residual block that can be removed: one that adds its input to an output of "
            "the same shape; take a pruner that removes channels"
        )
    smallest = cost(remove_blocks(model, [block.name for block in blocks])) / cost(model)
    if smallest > fraction:
        raise PruningError(
            f"without its {len(blocks)} removable blocks the network still has {smallest:.3f} of its cost, "
            f"more than {fraction:g}; keep more, or take a pruner that removes channels"
        )


def _run(model: nn.Module, example_input: torch.Tensor) -> dict[str, tuple[nn.Module, int, bool]]:
    """Run a copy of the model; return its blocks, inner first: module, calls, whether the shape stays."""
    network = copied(model).eval()
    calls: dict[str, list[bool]] = {}
    handles = []

    def watch(name: str) -> Callable[[nn.Module, tuple[object, ...], dict[str, object], object], None]:
        def hook(_: nn.Module, inputs: tuple[object, ...], named: dict[str, object], output: object) -> None:
            tensors = [value for value in (*inputs, output) if isinstance(value, torch.Tensor)]
            alone = len(inputs) == 1 and not named and len(tensors) == 2
            calls.setdefault(name, []).append(alone and tensors[0].shape == tensors[1].shape)

        return hook

    for name, module in network.named_modules():
        if name and any(module.children()):
            handles.append(module.register_forward_hook(watch(name), with_kwargs=True))
    with torch.no_grad():
        network(fresh_input(example_input))
    for handle in handles:
        handle.remove()
    modules = dict(network.named_modules())
    depth = sorted(calls, key=lambda name: -name.count("."))
    return {name: (modules[name], len(calls[name]), all(calls[name])) for name in depth}


def _adds_its_input(module: nn.Module) -> bool:
    """Tell whether a module's output is a sum of its input and another term, perhaps activated."""
    try:
        graph = fx.Tracer().trace(module)
    except Exception:  # forwards with untraceable code
        return False
    modules = dict(module.named_modules())
    carrying: set[fx.Node] = set()
    added = False
    for node in graph.nodes:
        carried = any(source in carrying for source in node.all_input_nodes)
        if node.op == "placeholder":
            carrying.add(node)
        elif node.op == "output":
            return added and carried
        elif carried and (node.target in _ADDITIONS or node.target in ("add", "add_")):
            carrying.add(node)
            added = True
        elif carried and (
            all(isinstance(part, _HANDING_ON) for part in modules[str(node.target)].modules())
            if node.op == "call_module"
            else node.target in _ACTIVATIONS
        ):
            carrying.add(node)
    return False


def _outputs(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return torch.cat([model(fresh_input(batch)) for batch in inputs.split(_BATCH)])
