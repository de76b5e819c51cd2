"""All commands, registered by import in the order in which help lists them."""

from anchorlora.cli import run  # isort: skip
from anchorlora.cli import grid, trace, select  # isort: skip
from anchorlora.cli import report  # isort: skip
from anchorlora.cli import listing, cores, diagnose, audit, general, export, data  # isort: skip

__all__ = ["audit", "cores", "data", "diagnose", "export", "general", "grid", "listing", "report", "run", "select", "trace"]
