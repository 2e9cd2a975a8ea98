"""The command line: the only place that prints, exits or sets up logging (imported as `specgen.cli`)."""
