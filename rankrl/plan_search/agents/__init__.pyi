from .options import AgentOptions
from .policy_agent import ALGORITHMS, PolicyAgent

__all__ = ["ALGORITHMS", "AgentOptions", "PolicyAgent"]
