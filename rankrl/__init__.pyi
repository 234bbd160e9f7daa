from .compression import apply_plan, compress, load_compressed, make_task, search, timing_kit
from .device import reuse_memory
from .onnx.export import export_onnx
from .onnx.graph import ImagePreprocessing
from .operations import KeepChannels
from .options.decomposition import DecompositionOptions
from .options.search import SearchOptions
from .options.timing import LatencyOptions
from .plan_search.envs import RankSelectionEnv
from .report import load_runs
from .result import Compression, ModuleCompression
from .task import SearchTask
from .training import TrainingRecipe

__all__ = [
    "Compression",
    "DecompositionOptions",
    "ImagePreprocessing",
    "KeepChannels",
    "LatencyOptions",
    "ModuleCompression",
    "RankSelectionEnv",
    "SearchOptions",
    "SearchTask",
    "TrainingRecipe",
    "apply_plan",
    "compress",
    "export_onnx",
    "load_compressed",
    "load_runs",
    "make_task",
    "reuse_memory",
    "search",
    "timing_kit",
]
