"""The agent's hyper-parameters besides those of a policy that it begins with."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankrl.errors import ConfigError
from rankrl.options.agents import ActionKind, AgentOptions
from rankrl.options.decomposition import AUTO

if TYPE_CHECKING:
    from rankrl.plan_search.agents.policy_file import PolicyFile
    from rankrl.plan_search.space.setting import SearchSetting

__all__ = ["AgentOptions", "options_with_policy", "resolved_policy"]

PRETRAINED_REFITTED = "pretrained_refitted"
"""What `selector.policy` calls the policy that comes with rankrl."""

_FIXED = ("features", "hidden")


def resolved_policy(
    policy: str | Path | None, action: ActionKind | None, setting: SearchSetting
) -> str | Path | None:
    """Return the policy that a search begins with.

    The policy that comes with rankrl learnt how much a layer's loss counts in an allocation of ranks within a
    budget; it says nothing of channels, of blocks, or where no budget is shared out.

    Args:
        policy: A file, a name, None for no policy, or `AUTO`.
        action: What an action stands for, or None for what suits the search.
        setting: What is known of the search.

    Returns:
        A file, a name, or None for no policy.
    """
    if policy != AUTO:
        return policy
    fits = bool(setting.measures) and not setting.narrows and action != "rank"
    return PRETRAINED_REFITTED if fits else None


def options_with_policy(options: AgentOptions, policy: PolicyFile) -> AgentOptions:
    """Return the options with those that a policy fixes.

    Args:
        options: The agent's; what the policy fixes is its default or what the policy says.
        policy: The policy.

    Raises:
        ConfigError: An option contradicts the policy.
    """
    card = policy.card
    defaults = {field.name: field.default for field in fields(AgentOptions)}
    fixed: dict[str, Any] = {name: getattr(card, name) for name in _FIXED}
    for name, value in fixed.items():
        asked = getattr(options, name)
        if asked not in (defaults[name], value):
            raise ConfigError(
                f"selector.{name}={_shown(asked)} contradicts selector.policy={options.policy}, which was "
                f"trained with {_shown(value)}; leave selector.{name} out"
            )
    if options.action not in (None, card.action):
        raise ConfigError(
            f"selector.policy={options.policy} gives every layer an {card.action}; leave selector.action out"
        )
    return replace(options, action=card.action, **fixed)


def _shown(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)
