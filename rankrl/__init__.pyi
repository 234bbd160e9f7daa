from .api import apply_plan, load_compressed, search
from .memory import reuse_memory
from .network_compression import NetworkCompression, compress
from .onnx.export import export_onnx
from .onnx.graph import ImagePreprocessing
from .onnx_compression import apply_onnx_plan, compress_onnx
from .operations import KeepChannels
from .options.timing import LatencyOptions
from .plan_search.envs import RankSelectionEnv
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
