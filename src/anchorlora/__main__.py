"""`python -m anchorlora`: the same as `anchorlora`."""

from anchorlora.cli.app import entry

entry()
