"""The command line: `anchorlora COMMAND`.  Each command imports what it needs when it is called."""
