"""Modules with random in-place operations behind their layers, in integers; see `fuzz_inputs.py`.

What is simulated of 8-bit integers in PyTorch has to be what onnxruntime computes with the file.
"""

from __future__ import annotations

import functools
import importlib.util
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import nn

from decomposition import (
    CompressionPlan,
    DecompositionError,
    LayerPlan,
    Quantise,
    build_structure,
    calibrate_ranges,
    fingerprint,
    inspect_layers,
    load_compressed,
    save_compressed,
)
from rankrl.onnx.export.static_quantiser import sums_overflow

STATEMENTS = (
    *("y[:, ::2] = 0", "y[:, 1] *= 2.0", "y += 0.3", "y -= x.mean()", "y *= 2", "y /= 3", "y **= 2"),
    *("torch.mul(y, 2.0, out=y)", "torch.sigmoid(y, out=y)", "torch.add(y, y, out=y)", "y.view(-1).mul_(3)"),
    *("y.transpose(1, 2).sub_(0.5)", "y[:, ::2].copy_(y[:, 1:2].expand_as(y[:, ::2]))", "y.mT.mul_(2.0)"),
    *(
        "torch.relu_(y)",
        "F.relu(y, inplace=True)",
        "F.leaky_relu_(y, 0.2)",
        "F.elu_(y)",
        "F.hardtanh_(y, 0.1, 0.4)",
    ),
    *("F.relu6(y, inplace=True)", "F.silu(y, inplace=True)", "F.hardswish(y, inplace=True)"),
    *("y.masked_fill_(y > 0.5, 0.0)", "y.index_fill_(1, torch.zeros(1, dtype=torch.long), 0.0)"),
    *("y.relu_().mul_(2)", "y.clamp_(min=0.3).neg_()", "y.clamp_(min=-1)", "z = y\n    z.mul_(2)"),
)
"""Statements that change an output y (0 to 1 mostly) in place, beside the functions of torch."""

UNTRANSLATED = frozenset(
    ("digamma_", "erfinv_", "hypot_", "i0_", "igamma_", "igammac_", "lgamma_", "nextafter_")
)
"""Functions that torch's exporter has no operators for."""
_OTHERS = frozenset(("set_", "copy_"))
_ARGUMENTS = (
    "",
    "0.5",
    "torch.full_like(y, 0.7)",
    "torch.full_like(y, 0.7), 0.5",
    "*[torch.full_like(y, 0.7)] * 2",
)


@functools.cache
def in_place_functions() -> tuple[str, ...]:
    """Find a statement for every function of torch that changes numbers in place and is not random."""
    torch.manual_seed(0)
    x = torch.rand(2, 4, 3, 3) * 0.6 + 0.2
    found = []
    for name in sorted(set(dir(torch.Tensor)) - UNTRANSLATED - _OTHERS):
        if name.endswith("_") and not name.startswith("_"):
            calls = (f"y.{name}({arguments})" for arguments in _ARGUMENTS)
            found += [call for call in calls if _changes(call, x)][:1]
    return tuple(found)


def _changes(call: str, x: torch.Tensor) -> bool:
    """Tell whether a call gives other finite numbers, not all 0, in place, the same ones each time."""
    results = []
    for _ in range(2):
        y = x.clone()
        try:
            returned = eval(call, {"y": y, "torch": torch})
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False
        if returned is not y or y.shape != x.shape or not bool(y.isfinite().all()):
            return False
        results.append(y)
    return torch.equal(*results) and not torch.equal(results[0], x) and bool(results[0].any())


def statements() -> tuple[str, ...]:
    """List everything that may be done to the output of a layer in place."""
    return (*STATEMENTS, *in_place_functions())


def source_of(changes: Sequence[str], kind: str) -> str:
    """Write the code of a network: a layer, a change in place and a second layer for each of some changes.

    It takes numbers from -1 to 1, of shape (N, 3 or 1, 8, 8), and returns scores of classes, or the output of
    every second layer (`Net(outcomes=True)`). Layers are of the kind `convolution` or `linear`.
    """
    layers = "nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 1)"
    if kind == "linear":
        layers = "nn.Linear(8, 4), nn.Linear(4, 5)"
    lines = [
        "import torch",
        "from torch import nn",
        "from torch.nn import functional as F",
        "",
        *(f"def change_{index}(x, y):\n    {each}\n    return y\n" for index, each in enumerate(changes)),
        "def net(num_classes=10):",
        "    torch.manual_seed(0)",
        "    return Net(num_classes)",
        "",
        "class Net(nn.Module):",
        "    def __init__(self, num_classes=10, outcomes=False):",
        "        super().__init__()",
        "        self.outcomes = outcomes",
        f"        pairs = [nn.ModuleList([{layers}]) for _ in range({len(changes)})]",
        "        self.pairs, self.head = nn.ModuleList(pairs), nn.Linear(5, num_classes)",
        "        for first, second in pairs:  # numbers that all functions are defined for",
        "            rows = first.weight.data.flatten(1)",
        "            rows.mul_(0.3 / rows.abs().sum(1, keepdim=True))",
        "            first.bias.data.fill_(0.5)",
        "            second.bias.data.normal_()",
        "    def forward(self, x):",
        "        x = x.expand(-1, 3, -1, -1).clamp(-1, 1)",
        "        found = []",
        *(
            line
            for index in range(len(changes))
            for line in (
                f"        y = self.pairs[{index}][0](x)",
                f"        y = change_{index}(x, y)",
                f"        found.append(self.pairs[{index}][1](y))",
            )
        ),
        "        if self.outcomes:",
        "            return tuple(found)",
        "        total = sum(each.sigmoid() for each in found)",
        f"        return self.head(total.mean({'(2, 3)' if kind == 'convolution' else '(1, 2)'}))",
    ]
    return "\n".join(lines) + "\n"


def plan_in_integers(dense: nn.Module, shape: tuple[int, ...]) -> CompressionPlan:
    specs, bits = inspect_layers(dense, shape), 7 if sums_overflow() else 8
    layers = tuple(LayerPlan(spec.name, () if spec.refusal else (Quantise(bits),)) for spec in specs)
    return CompressionPlan(layers, fingerprint(specs), shape)


def module_case(draw: random.Random, data: Path, folder: Path) -> tuple[str, tuple[str, ...]]:
    """Write a random network, in integers, and return what it does, and a command that exports it."""
    with np.load(data) as arrays:
        images = torch.from_numpy(arrays["x_train"]).permute(0, 3, 1, 2) / 255
    name = f"net_{draw.getrandbits(64)}"  # modules of all cases stay imported
    while True:
        kind = draw.choice(("convolution", "linear"))
        changes = draw.choices(statements(), k=draw.randrange(1, 4))
        (folder / f"{name}.py").write_text(source_of(changes, kind))
        dense = _network(folder / f"{name}.py")
        plan = plan_in_integers(dense, tuple(images.shape[1:]))
        try:
            compressed = build_structure(dense, plan)
            calibrate_ranges(compressed, [images])
        except DecompositionError:  # one change after another left nothing but zeros, or NaN
            continue
        break
    save_compressed(compressed, plan, folder / "small.safetensors", dense=dense)
    target = ("model=custom", f"model._target_={name}.net", "weights=small.safetensors")
    short = ("export.runs=1", "export.batch=1", "export.int8=false", "hydra.run.dir=run")
    return f"{kind}: {'; '.join(changes)}", (
        "task=export",
        *target,
        "dataset=npz",
        f"dataset.path={data}",
        *short,
    )


def module_problems(folder: Path) -> list[str]:
    """List what is wrong with the file that a command wrote of a network in integers; nothing should be."""
    path = folder / "run" / "model.onnx"
    if not path.exists():
        return ["wrote no file"]
    dense = _network(next(folder.glob("net_*.py")))
    network = load_compressed(dense, folder / "small.safetensors")[0].eval()
    x = torch.rand(64, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
    with torch.no_grad():
        exact, simulated = (np.asarray(each(x)) for each in (dense, network))
    spread = np.linalg.norm(exact - exact.mean(0)) + 1e-6 * np.linalg.norm(exact)
    apart, moved = (np.linalg.norm(each - simulated) / spread for each in (found, exact))
    return [f"SILENTLY WRONG: {apart:.2g}, rounding {moved:.2g}"] if not apart < max(0.1, 2 * moved) else []


def _network(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.net().eval()
