"""Whether the code that comes with a model may be run: only where the command line names the very commit.

A configuration may come from anybody, so that it asks for code allows nothing.
"""

from __future__ import annotations

import re

from anchorlora.continual.recipe import Backbone
from anchorlora.shown import without_secrets

OPTION = "--trust-remote-code COMMIT"


def asked_for(settings: Backbone, commit: str | None, *, where: str, option: str = OPTION) -> Backbone:
    """The settings, with code of the model run if the command line asks for it.

    commit: from the command line; where: what the settings are from; option: how a commit is given. Raises ValueError for settings
    that ask for code without the same commit there, and for what is no whole commit.
    """
    if commit is not None and not re.fullmatch(r"[0-9a-f]{40}", commit):
        name = option.removesuffix("COMMIT").rstrip(" =")
        raise ValueError(f"{name} takes the 40 hexadecimal digits of a commit, not {without_secrets(commit)!r:.60}")
    asked = settings.trust_remote_code
    if asked not in (None, commit):
        given = f"the command line gives {commit}" if commit else "the command line does not"
        raise ValueError(
            f"{where} asks to run code that comes with its model, as of commit {asked}, and {given}; read that code, and if you "
            f"trust it give {option.replace('COMMIT', asked)}"
        )
    return settings.model_copy(update={"trust_remote_code": commit})
