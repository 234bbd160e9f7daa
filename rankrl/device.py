"""Which device computes, and in which precision."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from decomposition.network.cost import evaluation_mode
from decomposition.network.inputs import Inputs, run_model
from rankrl.wording import counted


@dataclass(frozen=True)
class Precision:
    """A device and the floating-point type of its convolutions and matrix products.

    Parameters stay float32 in either case; `torch.bfloat16` means automatic mixed precision.
    """

    device: torch.device
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"precision must be torch.float32 or torch.bfloat16, got {self.dtype}")

    def autocast(self) -> torch.autocast:
        """Return the context in which models run: bfloat16 autocast, or autocast switched off."""
        return torch.autocast(
            self.device.type, dtype=torch.bfloat16, enabled=self.dtype == torch.bfloat16, cache_enabled=True
        )


def select_device() -> torch.device:
    """Return the CUDA device when there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_note() -> str:
    """Return which device computes, in which precision and why, in a sentence."""
    precision = inference_precision()
    width = str(precision.dtype).removeprefix("torch.")
    if precision.device.type == "cuda":
        return f"computes on {torch.cuda.get_device_name()} in {width}, the first CUDA device that torch sees"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    reason = "torch sees no CUDA device"
    if torch.version.cuda is None:
        reason = "this torch is built without CUDA"
    elif hidden is not None:
        reason += f" with CUDA_VISIBLE_DEVICES={hidden}"
    threads = counted(torch.get_num_threads(), "thread")
    return f"computes on the CPU ({processor_name()}, {threads}) in {width}: {reason}"


def inference_precision(device: torch.device | None = None) -> Precision:
    """Return the fastest precision that is safe for scoring and training networks on a device.

    bfloat16 where the device computes it faster than float32 (CUDA compute capability 8.0 and above; x86 CPUs
    with AMX, or with AVX512-BF16 if they are not Intel's; Arm CPUs with BF16), float32 elsewhere.

    AVX512-BF16 alone is no gain on Intel's processors: matrix products of 512 rows reach 78 GFLOP/s in
    bfloat16 and 160 in float32 on a Sapphire Rapids core whose AMX is hidden, as in many virtual machines;
    training steps of ResNet-20 take 1.2 to 1.4 times as long. AMD's are 1.5 to 1.9 times as fast with it.
    """
    device = select_device() if device is None else device
    return Precision(device, torch.bfloat16 if _has_fast_bfloat16(device) else torch.float32)


def model_device(model: nn.Module) -> torch.device:
    """Return the device of the first parameter or buffer of `model`; the CPU when it has neither."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def in_layout(x: Tensor, layout: torch.memory_format) -> Tensor:
    """Return `x` in a memory order, also where one channel lets its strides pass for either."""
    strides = torch.empty(x.shape, device="meta", memory_format=layout).stride()
    return x if x.stride() == strides else torch.empty_like(x, memory_format=layout).copy_(x)


def accepted_layout(model: nn.Module, example: Inputs) -> torch.memory_format:
    """Return the memory order in which a network, as it is, takes its inputs.

    Channels last is the faster one; contiguous where the network's own code asks for it, such as
    `x.view(len(x), -1)` behind a convolution.
    """
    if not isinstance(example, Tensor) or example.ndim != 4:
        return torch.contiguous_format
    with evaluation_mode(model):
        try:
            run_model(model, in_layout(example, torch.channels_last))
        except RuntimeError:
            return torch.contiguous_format
    return torch.channels_last


def to_fastest_layout(model: nn.Module, example: Inputs) -> torch.memory_format:
    """Put a network's weights into the memory order in which it runs fastest, and return it for the inputs.

    Args:
        model: The network, changed in place; its values stay as they were.
        example: An input or two, on the network's device.
    """
    weights = {parameter: parameter.data for parameter in model.parameters() if parameter.ndim == 4}
    for parameter, weight in weights.items():
        parameter.data = weight.contiguous(memory_format=torch.channels_last)
    layout = accepted_layout(model, example)
    if layout == torch.contiguous_format:
        for parameter, weight in weights.items():
            parameter.data = weight
    return layout


@contextmanager
def exact_float32() -> Iterator[None]:
    """Forbid TensorFloat-32 in CUDA convolutions and matrix products while the block runs.

    cuDNN uses TF32 by default, with 10 mantissa bits, which is enough to change a reported accuracy.
    """
    matmul = torch.backends.cuda.matmul.allow_tf32
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = matmul


@contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Let cuDNN choose only deterministic algorithms while the block runs, so that a run repeats exactly."""
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=True):
        yield


def _has_fast_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        # Older torch versions cannot be asked; float32 is right there, only slower.
        query: Callable[[], Mapping[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)
        capabilities = query()
        if capabilities.get("amx_bf16", False) or capabilities.get("bf16", False):
            return True
        return bool(capabilities.get("avx512_bf16", False)) and "Intel" not in processor_name()
    return False


def processor_name() -> str:
    """Return the processor's model name, which Linux gives only in /proc/cpuinfo."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def channel_block() -> int:
    """Return how many channels onnxruntime's convolutions compute at a time on this processor; 1: one by one.

    That is what MLAS, its library, has kernels for: 16 with AVX-512, 8 with AVX2. Elsewhere nothing is known.
    """
    return {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 1)


def usable_cores() -> int:
    """Return the cores that this process may use, which in a container can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
