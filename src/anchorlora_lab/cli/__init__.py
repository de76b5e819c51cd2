"""The commands of the laboratory, which `anchorlora.cli.app` finds by name."""
