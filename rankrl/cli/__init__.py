"""Run the command line: `config` composes and checks the configuration, `tasks` carry it out."""
