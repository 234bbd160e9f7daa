"""Create selectors by name: `create_selector`, `list_selectors`."""

from __future__ import annotations

from rankrl.plan_search.selectors import (
    bayes,
    cma_es,
    divergence,
    local_changes,
    random_plans,
    reinforcement,
    selector,
    tpe,
)
from rankrl.plan_search.selectors.selector import (
    Proposal,
    Selector,
    SelectorEntry,
    check_selector,
    create_selector,
    list_selectors,
    register_selector,
    selector_class,
)

__all__ = [
    "Proposal",
    "Selector",
    "SelectorEntry",
    "bayes",
    "check_selector",
    "cma_es",
    "create_selector",
    "divergence",
    "list_selectors",
    "local_changes",
    "random_plans",
    "register_selector",
    "reinforcement",
    "selector",
    "selector_class",
    "tpe",
]
