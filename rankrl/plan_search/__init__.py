"""Search for the compression plan with the best reward.

A selector (`selectors`) proposes plans of a problem (`space`), an evaluator scores them (`scores`), and `run`
keeps the best. Reinforcement learning has its environment in `envs`. `session` is the entry point.
"""
