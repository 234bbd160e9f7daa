"""The search for the best plan.

A selector (`selectors`) proposes plans of a problem (`space`), an evaluator scores them (`scores`), and `run`
keeps the best. Reinforcement learning has its environment (`envs`), its agents and their `pretraining` here.
`session` is the way in.
"""
