"""Applying plans: the network rewritten, saved, loaded and exchanged with other libraries."""
