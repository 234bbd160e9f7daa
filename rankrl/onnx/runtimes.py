"""Run ONNX files in registered runtimes, one class each; `list_runtimes()` lists them."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import onnx.parser
import onnxruntime

from decomposition.registry import Registry
from rankrl.errors import ConfigError, ExportError
from rankrl.options.timing import DEFAULT_RUNTIME, LatencyOptions

Batch = np.ndarray[Any, Any] | Mapping[str, np.ndarray[Any, Any]]
"""Inputs of a file: the array for its only input, or one array for each input by name."""


class Session(ABC):
    """An ONNX file, opened in a runtime; of several inputs it describes the first.

    Args:
        input_name: The input's name in the file.
        input_type: Its type in the runtime's own words, for messages.
        input_dtype: The type of the arrays it takes, such as float32 (normalised images) or uint8 (bytes);
            None where numpy has no such type.
        input_shape: Its shape, the batch first; None for a size that is free.
    """

    def __init__(
        self,
        input_name: str,
        input_type: str,
        input_dtype: np.dtype[Any] | None,
        input_shape: Sequence[int | None],
    ) -> None:
        self.input_name, self.input_type, self.input_dtype = input_name, input_type, input_dtype
        self.input_shape = tuple(input_shape)

    @property
    def fixed_batch(self) -> int | None:
        """The batch size that the file was exported with, or None where it is free."""
        return self.input_shape[0] if self.input_shape else None

    def run(self, batch: Batch) -> Sequence[np.ndarray[Any, Any]]:
        """Run the model on a batch and return all its outputs.

        Raises:
            ExportError: The batch does not fit the model's inputs.
        """
        feed = dict(batch) if isinstance(batch, Mapping) else {self.input_name: batch}
        feed = {name: np.asarray(array, order="C") for name, array in feed.items()}
        try:
            return self.outputs(feed)
        except Exception as error:  # the error classes of runtimes have no common base of their own
            arrays = ", ".join(f"{array.dtype} of shape {array.shape}" for array in feed.values())
            raise ExportError(
                f"the ONNX model takes {self.input_type} of shape {self.input_shape} and fails on "
                f"{arrays}: {error}"
            ) from error

    @abstractmethod
    def outputs(self, feed: dict[str, np.ndarray[Any, Any]]) -> Sequence[np.ndarray[Any, Any]]:
        """Return the outputs for contiguous arrays by input name; the runtime's exceptions pass through."""


class Runtime(ABC):
    """A runtime on this machine.

    Attributes:
        name: What it is chosen by.
        description: One line for listings.
        in_calling_thread: Whether a session of one thread computes in the thread that calls it, so that this
            thread's processor time is all that a pass takes.
        runs_nncf: Whether it runs the networks that NNCF quantises.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    in_calling_thread: ClassVar[bool] = True
    runs_nncf: ClassVar[bool] = False

    @abstractmethod
    def obstacle(self) -> str | None:
        """Return the reason why the runtime cannot be used here, with what to install; None where it can."""

    def check(self) -> None:
        """Check that the runtime can be used here.

        Raises:
            ConfigError: It cannot; the message says what to install.
        """
        obstacle = self.obstacle()
        if obstacle is not None:
            raise ConfigError(f"the runtime {self.name!r} cannot be used here: {obstacle}")

    @property
    @abstractmethod
    def version(self) -> str:
        """The version that is installed."""

    def open(self, path: str | Path, *, threads: int | None = None) -> Session:
        """Open an ONNX file for inference.

        Args:
            path: The file.
            threads: Number of threads that compute one operator; None for the runtime's default (all cores).

        Raises:
            ConfigError: The runtime cannot be used here.
            ExportError: The file is missing, or the runtime cannot load it.
        """
        self.check()
        if threads is not None and threads < 1:
            raise ExportError(f"threads is {threads}; it must be at least 1.")
        if not Path(path).is_file():
            raise ExportError(f"there is no ONNX file at {path}; export the model first.")
        try:
            return self.load(str(path), threads)
        except Exception as error:  # the error classes of runtimes have no common base of their own
            raise ExportError(f"{self.name} cannot load {path}: {error}") from error

    @abstractmethod
    def load(self, path: str, threads: int | None) -> Session:
        """Open an existing file; the runtime's own exceptions pass through."""


_RUNTIMES: Registry[Runtime] = Registry("runtime", ConfigError)


def register_runtime(runtime: type[Runtime]) -> type[Runtime]:
    """Register the decorated class under its `name`.

    Raises:
        ConfigError: The name is taken.
    """
    _RUNTIMES.add(runtime.name, runtime(), runtime.description)
    return runtime


def list_runtimes() -> list[str]:
    """Return the names of the runtimes, sorted, whether or not they can be used here."""
    return _RUNTIMES.names()


def get_runtime(name: str) -> Runtime:
    return _RUNTIMES[name]


def check_runtimes(options: LatencyOptions) -> None:
    for option, names in (("export.runtime", (options.runtime,)), ("export.runtimes", options.runtimes)):
        try:
            for name in names:
                get_runtime(name).check()
        except ConfigError as error:
            raise ConfigError(f"{option}: {error}") from error


def open_session(path: str | Path, *, threads: int | None = None, runtime: str = DEFAULT_RUNTIME) -> Session:
    """Open an ONNX file in a runtime; arguments and errors are those of `get_runtime` and `Runtime.open`."""
    return get_runtime(runtime).open(path, threads=threads)


_ERRORS_ONLY = 3  # onnxruntime's log severity
_DTYPES: dict[str, np.dtype[Any]] = {
    "tensor(float)": np.dtype(np.float32),
    "tensor(uint8)": np.dtype(np.uint8),
}


class OnnxRuntimeSession(Session):
    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        entry = session.get_inputs()[0]
        shape = [size if isinstance(size, int) else None for size in entry.shape]
        super().__init__(entry.name, entry.type, _DTYPES.get(entry.type), shape)
        self._session = session

    def outputs(self, feed: dict[str, np.ndarray[Any, Any]]) -> Sequence[np.ndarray[Any, Any]]:
        outputs: Sequence[np.ndarray[Any, Any]] = self._session.run(None, feed)
        return outputs


@register_runtime
class OnnxRuntime(Runtime):
    """onnxruntime's own kernels, on the CPU."""

    name: ClassVar[str] = DEFAULT_RUNTIME
    description: ClassVar[str] = "onnxruntime on the CPU"

    def obstacle(self) -> str | None:
        return None

    @property
    def version(self) -> str:
        return str(onnxruntime.__version__)

    def load(self, path: str, threads: int | None) -> Session:
        return OnnxRuntimeSession(inference_session(path, threads))


def inference_session(
    model: str | bytes, threads: int | None = None, *, optimised: bool = True, arena: bool = True
) -> onnxruntime.InferenceSession:
    """Open a model on the processor, with the CPU's provider alone."""
    options = session_options(threads)
    options.enable_cpu_mem_arena = arena
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def session_options(threads: int | None) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _ERRORS_ONLY
    if threads is not None:
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
    # Sessions are timed in turns: the threads of one that has finished must not spin while another runs.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


_PROVIDER = "CUDAExecutionProvider"
_FATAL_ONLY = 4  # log severity: without a GPU the probe logs errors
_PROBE = '<ir_version: 10, opset_import: ["": 18]> probe (float[1] x) => (float[1] y) { y = Relu(x) }'


@register_runtime
class OnnxRuntimeCuda(OnnxRuntime):
    """onnxruntime's CUDA provider; operators for which it has no kernel run on the CPU.

    It computes in float32 proper, not in TF32, its own default, which has 10 bits of mantissa. A pass begins
    and ends in the computer's memory, so its time holds both copies.
    """

    name: ClassVar[str] = "onnxruntime_cuda"
    description: ClassVar[str] = "onnxruntime on an NVIDIA GPU"
    in_calling_thread: ClassVar[bool] = False

    def obstacle(self) -> str | None:
        """Return a message where the GPU's build of onnxruntime, or a usable GPU, is missing."""
        if _PROVIDER not in onnxruntime.get_available_providers():
            return (
                f"this onnxruntime {self.version} is built without CUDA; install the GPU's in its place "
                "(`pip uninstall onnxruntime`, then `pip install onnxruntime-gpu`), or leave it out"
            )
        if not _starts():
            return (
                f"onnxruntime {self.version} finds no GPU that it can use; check `nvidia-smi` and that the "
                "versions of CUDA and cuDNN are those of the package, or leave it out"
            )
        return None

    def load(self, path: str, threads: int | None) -> Session:
        return OnnxRuntimeSession(_session(path, session_options(threads)))


def _session(model: str | bytes, options: onnxruntime.SessionOptions) -> onnxruntime.InferenceSession:
    providers: list[Any] = [(_PROVIDER, {"use_tf32": "0"}), "CPUExecutionProvider"]
    return onnxruntime.InferenceSession(model, options, providers=providers)


@cache
def _starts() -> bool:
    """Tell whether the provider starts; without a GPU or its libraries, onnxruntime falls back on the CPU."""
    probe = onnx.parser.parse_model(_PROBE)
    options = session_options(1)
    options.log_severity_level = _FATAL_ONLY
    return _PROVIDER in _session(probe.SerializeToString(), options).get_providers()


class OpenVinoSession(Session):
    def __init__(self, compiled: Any) -> None:
        entry = compiled.input(0)
        kind, shape = entry.get_element_type(), entry.get_partial_shape()
        sizes = [size.get_length() if size.is_static else None for size in shape]
        super().__init__(entry.get_any_name(), kind.get_type_name(), kind.to_dtype(), sizes)
        self._request = compiled.create_infer_request()

    def outputs(self, feed: dict[str, np.ndarray[Any, Any]]) -> Sequence[np.ndarray[Any, Any]]:
        if feed[self.input_name].dtype != self.input_dtype:
            raise TypeError("the types differ, and OpenVINO would convert without a word")
        return list(self._request.infer(feed, share_inputs=True).values())


@register_runtime
class OpenVino(Runtime):
    """OpenVINO on the CPU (extra `openvino`), from the same ONNX file.

    It computes in float32, not in bfloat16, is told to make one batch fast, and binds no threads to cores.
    """

    name: ClassVar[str] = "openvino"
    description: ClassVar[str] = "OpenVINO on the CPU"
    runs_nncf: ClassVar[bool] = True

    def obstacle(self) -> str | None:
        try:
            importlib.import_module("openvino")
        except ImportError as error:
            return (
                f"it needs the package openvino ({error}); install it with `pip install 'rankrl[openvino]'`, "
                "or leave it out"
            )
        return None

    @property
    def version(self) -> str:
        return str(importlib.import_module("openvino").__version__).partition("-")[0]

    def load(self, path: str, threads: int | None) -> Session:
        """Compile the file; free axes stay free."""
        core = importlib.import_module("openvino").Core()
        options: dict[str, Any] = {
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
            "ENABLE_CPU_PINNING": False,
        }
        if threads is not None:
            options["INFERENCE_NUM_THREADS"] = threads
        return OpenVinoSession(core.compile_model(path, "CPU", options))
