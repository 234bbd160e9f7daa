from .policy_agent import ALGORITHMS, PolicyAgent
from .policy_file import AgentOptions

__all__ = ["ALGORITHMS", "AgentOptions", "PolicyAgent"]
