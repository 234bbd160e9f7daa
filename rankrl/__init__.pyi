from .api import apply_plan, load_compressed, search
from .envs import RankSelectionEnv
from .export import export_onnx
from .operations import KeepChannels

__all__ = ["KeepChannels", "RankSelectionEnv", "apply_plan", "export_onnx", "load_compressed", "search"]
