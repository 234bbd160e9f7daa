"""Choosing: budgets, costs, times, and the rules that choose a plan within them."""
