"""Score plans on held-out inputs, turn scores into rewards, and record them."""
