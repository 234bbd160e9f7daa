from .policy_file import AgentOptions, PolicyCard, PolicyFile, PolicyTask, read_policy

__all__ = ["AgentOptions", "PolicyCard", "PolicyFile", "PolicyTask", "read_policy"]
