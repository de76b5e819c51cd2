"""Push an export to the Hugging Face hub."""

from __future__ import annotations

import shlex
from pathlib import Path

from anchorlora.errors import Failed, InvalidValue


def refuse_unnamed(repo: str) -> None:
    """Refuse what is no name of a repository, before anything is written."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError:
        repo_is_valid = False
    else:
        repo_is_valid = repo.count("/") == 1
    if not repo_is_valid:
        raise InvalidValue(f"--push takes ORG/NAME, a repository of yours on the hub, not {repo!r:.100}")


def push(folder: Path, repo: str) -> str:
    """Upload an export to a model repository on the hub, which is made if it does not exist. The folder stays."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        address = str(api.create_repo(repo, repo_type="model", exist_ok=True))
        api.upload_folder(repo_id=repo, repo_type="model", folder_path=folder, commit_message="Export of anchorlora")
    except Exception as error:  # of the network, the hub, or its library: many kinds
        reason = " ".join((str(error).strip() or type(error).__name__).split())
        again = f"hf upload {shlex.quote(repo)} {shlex.quote(str(folder))}"
        raise Failed(
            f"{folder} is written, but was not pushed to {repo}: {reason:.300}; log in with hf auth login if the hub asks who you "
            f"are, then push again: {again}"
        ) from error
    return address
