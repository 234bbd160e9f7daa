from .api import apply_plan, load_compressed, search
from .envs import RankSelectionEnv
from .export import export_onnx
from .onnx_graph import ImagePreprocessing, compress_onnx
from .operations import KeepChannels
from .workflow.latency import LatencyOptions

__all__ = [
    "ImagePreprocessing",
    "KeepChannels",
    "LatencyOptions",
    "RankSelectionEnv",
    "apply_plan",
    "compress_onnx",
    "export_onnx",
    "load_compressed",
    "search",
]
