"""Kits of files that are timed on other devices, and the tables of times that come back."""
