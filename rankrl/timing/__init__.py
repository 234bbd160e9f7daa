"""Time: how it is measured, and budgets in it."""
