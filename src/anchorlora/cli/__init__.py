"""The command line: `anchorlora COMMAND`.  Each command imports what it needs when it is called."""

from anchorlora.cli.app import app, main

__all__ = ["app", "main"]
