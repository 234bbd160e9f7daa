"""The search for the best plan.

`problem` says what there is to choose, `evaluator` scores a plan in a `scoring_network`, `rewards` turn
scores into one number, `run` lets a selector (`rankrl.selectors`) look for the best, `history` and `state`
keep what happened.
"""
