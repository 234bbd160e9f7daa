"""The command line: `config` says what may be asked for, `tasks` carry it out."""
