"""Select device, floating-point precision and memory layout; convert networks to float32; reuse memory."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from decomposition.network.cost import evaluation_mode
from decomposition.network.inputs import Inputs, mapped, run_model
from decomposition.network.surgery import copied, unwrapped
from rankrl.errors import counted


@dataclass(frozen=True)
class Precision:
    """A device and the type of its matrix products; parameters stay float32, `torch.bfloat16` is autocast."""

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
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_note() -> str:
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
    """Return `x` in a memory layout, also where one channel makes its strides valid for either."""
    strides = torch.empty(x.shape, device="meta", memory_format=layout).stride()
    return x if x.stride() == strides else torch.empty_like(x, memory_format=layout).copy_(x)


def accepted_layout(model: nn.Module, example: Inputs) -> torch.memory_format:
    """Return the memory layout in which a network, as it is, takes its inputs.

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
    """Convert a network's weights to the fastest memory layout, and return that layout for the inputs."""
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
        # Older versions of torch lack the query; float32 is correct, only slower.
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
    """Return the channels that onnxruntime computes at a time: 16 with AVX-512, 8 with AVX2, else 1."""
    return {"AVX512": 16, "AVX2": 8}.get(torch.backends.cpu.get_cpu_capability(), 1)


def usable_cores() -> int:
    """Count the cores that this process may use; in a container these can be fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_NARROW = (torch.float16, torch.bfloat16)
_OWN_CLASS = "_class_in_own_types"
_CASTS = {
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
    torch.Tensor.double: torch.float64,
}


class _InFloat32(TorchFunctionMode):
    """Redirect casts to, and creations of, some floating-point types to float32 within a forward."""

    def __init__(self, types: Sequence[torch.dtype]) -> None:
        super().__init__()
        self.types = types

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if _CASTS.get(func) in self.types:
            func = torch.Tensor.float
        args, named = tree_map_only(torch.dtype, self._wide, (args, dict(kwargs or {})))
        return func(*args, **named)

    def _wide(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype in self.types else dtype


def own_types(model: nn.Module) -> dict[str, torch.dtype]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.dtype for name, tensor in tensors if tensor.is_floating_point()}


def in_float32(model: nn.Module, *, keep_double: bool = False) -> nn.Module:
    """Return a copy of a network that computes in float32.

    Where parameters have other types, what its forward casts to these stays in float32, too: a network of
    several types casts between its layers.
    """
    network = copied(unwrapped(model))
    types = _NARROW if keep_double else (*_NARROW, torch.float64)
    if not set(types) & set(own_types(network).values()):
        return network
    network._apply(lambda x: x.float() if x.dtype in types else x)
    network.__class__ = _wide_class(type(network), types)
    return network


def _wide_class(base: type[nn.Module], types: Sequence[torch.dtype]) -> type[nn.Module]:
    """Return a subclass whose forward runs under `_InFloat32`; copies of the network keep it."""
    run: Callable[..., Any] = base.forward

    @wraps(run)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _InFloat32(types):
            return run(self, *args, **kwargs)

    return type(base.__name__, (base,), {"forward": forward, _OWN_CLASS: base})


def as_float32(inputs: Inputs) -> Inputs:
    """Convert half-precision inputs to what the networks of `in_float32` take; float64 stays."""
    return mapped(lambda x: x.float() if x.dtype in _NARROW else x, inputs)


def back_in(model: nn.Module, types: Mapping[str, torch.dtype]) -> nn.Module:
    """Convert a network back to its own types, in place, after `in_float32` or a user's training."""
    model.__class__ = getattr(model, _OWN_CLASS, type(model))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.dtype != types.get(name, tensor.dtype):
            tensor.data = tensor.data.to(types[name])
    return model


_SWITCH = "RANKRL_REUSE_MEMORY"
_GIB = 1 << 30
# Constants of <malloc.h> and <sys/mman.h> on Linux.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_MMAP_MAX_DEFAULT = 65_536
_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 << 20
# glibc maps larger blocks one by one and unmaps them when freed; before 2.35 it accepts at most the second.
_THRESHOLDS = (_GIB, 32 << 20)


def reuse_memory(reserve: int | None = None) -> bool:
    """Keep freed memory for later allocations of this process.

    Results stay the same to the bit. The process keeps as much memory as it ever needed at once. Addresses
    are set aside for `reserve` bytes in huge pages (where the kernel has them on request); memory is taken
    only as it is written to. Nothing happens where glibc is not what allocates (macOS, Windows, musl,
    jemalloc or tcmalloc preloaded), where its environment variables say how it is to work (`GLIBC_TUNABLES`,
    `MALLOC_...`), or with `RANKRL_REUSE_MEMORY=0` in the environment. See mallopt(3) and madvise(2).

    Args:
        reserve: Bytes in huge pages; by default a quarter of the machine's memory, 8 GiB at most.

    Returns:
        Whether memory is reused.
    """
    libc = _glibc()
    if libc is None:
        return False
    if not any(libc.mallopt(_MMAP_THRESHOLD, size) for size in _THRESHOLDS):
        return False
    libc.mallopt(_TRIM_THRESHOLD, -1)  # never return memory to the system
    if reserve is None:
        reserve = min(8 * _GIB, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
    libc.mallopt(_MMAP_MAX, 0)  # so that the next block, whatever its size, comes from the heap
    start = libc.malloc(reserve)
    libc.mallopt(_MMAP_MAX, _MMAP_MAX_DEFAULT)
    if start:  # null under a limit on addresses (`ulimit -v`); freed memory is kept all the same
        aligned = -(-start // _HUGE_PAGE) * _HUGE_PAGE
        libc.madvise(aligned, max(start + reserve - aligned, 0), _MADV_HUGEPAGE)
        libc.free(start)
    return True


def _glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc, allocates for this process, and nobody has set how."""
    told = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
    if not sys.platform.startswith("linux") or told or os.environ.get(_SWITCH) == "0":
        return None
    try:
        process = ctypes.CDLL(None)
        libc = ctypes.CDLL("libc.so.6")
        owners = [ctypes.cast(each.malloc, ctypes.c_void_p).value for each in (process, libc)]
    except (OSError, AttributeError):
        return None
    if owners[0] != owners[1] or not hasattr(libc, "gnu_get_libc_version"):
        return None
    libc.mallopt.argtypes, libc.mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.free.restype = [ctypes.c_void_p], None
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc
