"""The configuration: its types, its folder, the command line's overrides, and what becomes of them."""
