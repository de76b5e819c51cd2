"""What is told about progress while a model is evaluated."""

from __future__ import annotations


class EvalProgress:
    """A listener for progress, which does nothing by default."""

    def measures(self, what: str) -> None:
        """Called before a model is evaluated.

        Args:
            what: The task, and "without the adapter" or "with the adapter".
        """

    def begins(self, inputs: int) -> None:
        """Called before a series of inputs.

        Args:
            inputs: How many follow.
        """

    def advance(self, inputs: int) -> None:
        """Called after some inputs.

        Args:
            inputs: How many were read since the last call.
        """

    def note(self, line: str) -> None:
        """Called with what the user should know.

        Args:
            line: One line.
        """
