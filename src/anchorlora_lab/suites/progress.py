"""What is told about progress while a model is evaluated."""

from __future__ import annotations


class EvalProgress:
    """A listener for progress, which does nothing by default."""

    def measures(self, what: str) -> None:
        """Called before a model is evaluated."""

    def begins(self, inputs: int) -> None:
        """Called before a series of inputs."""

    def advance(self, inputs: int) -> None:
        """Called after some inputs."""

    def note(self, line: str) -> None:
        """Called with what the user should know."""
