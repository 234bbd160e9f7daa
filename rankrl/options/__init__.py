"""Options: frozen dataclasses, the same in Python and in the configuration."""
