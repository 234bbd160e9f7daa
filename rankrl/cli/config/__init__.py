"""Define, compose and check the configuration: schema, command line, values and paths, earlier runs."""
