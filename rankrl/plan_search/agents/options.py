"""The agent's hyper-parameters beside those of a policy that it begins with."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from rankrl.errors import ConfigError
from rankrl.options.agents import AgentOptions

if TYPE_CHECKING:
    from rankrl.plan_search.agents.policy_file import PolicyFile

__all__ = ["AgentOptions", "options_with_policy"]

_FIXED = ("features", "hidden", "importance_scale")


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
        given = getattr(options, name)
        if given not in (defaults[name], value):
            raise ConfigError(
                f"selector.{name}={_shown(given)} contradicts selector.policy={options.policy}, which was "
                f"trained with {_shown(value)}; leave selector.{name} out"
            )
    if options.action not in (None, card.action):
        raise ConfigError(
            f"selector.policy={options.policy} gives every layer an {card.action}; leave selector.action out"
        )
    return replace(options, action=card.action, **fixed)


def _shown(value: Any) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)
