from .api import apply_plan, load_compressed, search
from .envs import RankSelectionEnv
from .export import export_onnx
from .memory import reuse_memory
from .network_compression import NetworkCompression, compress
from .onnx_graph import ImagePreprocessing, apply_onnx_plan, compress_onnx
from .operations import KeepChannels
from .timing.options import LatencyOptions
from .training import TrainingRecipe

__all__ = [
    "ImagePreprocessing",
    "KeepChannels",
    "LatencyOptions",
    "NetworkCompression",
    "RankSelectionEnv",
    "TrainingRecipe",
    "apply_onnx_plan",
    "apply_plan",
    "compress",
    "compress_onnx",
    "export_onnx",
    "load_compressed",
    "reuse_memory",
    "search",
]
