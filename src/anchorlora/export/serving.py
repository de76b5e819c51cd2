"""Commands that serve an export, vLLM's and llama.cpp's converter, and its push to the Hugging Face hub.

vLLM takes one of a few values as --max-lora-rank and refuses adapters of a larger rank. It reads `r` and `lora_alpha`; many of its
versions, and llama.cpp, ignore `rank_pattern` and `alpha_pattern`. An adapter with patterns would load and be scaled wrongly, so no
command is given for one.
"""

from __future__ import annotations

import re
import shlex
from contextlib import suppress
from pathlib import Path

from anchorlora import embedded
from anchorlora.adapters.whole import COME_WITH
from anchorlora.continual.served import RANKS
from anchorlora.errors import Failed, InvalidValue
from anchorlora.models.hub import is_path
from anchorlora.store.adapter_config import CONFIG_FILE, read_config


def accepted_rank(rank: int) -> int:
    """Return the smallest rank that a server can be started with for an adapter."""
    for accepted in (1, *RANKS):
        if rank <= accepted:
            return accepted
    raise InvalidValue(
        f"the adapter has rank {rank}, and vLLM serves ranks up to {RANKS[-1]}; "
        "reduce it with --form svd --rank R, or use --form merged"
    )


def serve_line(adapter_folder: Path, base_model_name: str, *, name: str) -> str:
    """Return the command that serves an adapter with vLLM, quoted for a shell."""
    path = Path(adapter_folder) / CONFIG_FILE
    config = read_config(Path(adapter_folder))
    if config.get("rank_pattern") or config["alpha_pattern"]:
        raise InvalidValue(
            f"{path} has rank_pattern or alpha_pattern, which many servers ignore; anchorlora export {adapter_folder} --out DIR "
            "writes an equal adapter of one rank and one scale"
        )
    if named := next((name for name in COME_WITH if config.get(name)), None):
        raise InvalidValue(
            f"{path} has {named}, whole weights that vLLM takes from no adapter; anchorlora export {adapter_folder} --form merged "
            "--out DIR writes a model that it serves"
        )
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise InvalidValue(f"{path}: r is {rank!r}, not a rank of 1 or more")
    modules, base = shlex.quote(f"{name}={adapter_folder}"), str(embedded.folder(base_model_name, "base_model") or base_model_name)
    return f"vllm serve {shlex.quote(base)} --enable-lora --max-lora-rank {accepted_rank(rank)} --lora-modules {modules}"


def stop_note(stops: list[int]) -> str:
    """Return what requests to a served adapter need where its answers end at tokens that the base model does not stop at."""
    return f'the base model does not stop where answers of the adapter end: give requests "stop_token_ids": {stops}'


def commands(to: Path, base_model: str | None, *, merged: bool) -> dict[str, str]:
    """Return the commands that put an export to use, quoted for a shell."""
    path = shlex.quote(str(to))
    if merged:
        return {"serve with vLLM": f"vllm serve {path}", "convert for llama.cpp": f"python convert_hf_to_gguf.py {path}"}
    if any(read_config(to).get(name) for name in COME_WITH):
        model = f" --model {shlex.quote(base_model)}" if base_model else ""
        how = f"anchorlora export {path}{model} --form merged --out {shlex.quote(f'{to}-merged')}"
        return {"vLLM and llama.cpp take no whole weights beside an adapter; for them": how}
    folder = embedded.folder(base_model, "base_model") if base_model else None
    base = str(folder or base_model or "BASE_MODEL")
    name = re.sub(r"[^\w.-]", "-", to.resolve().name, flags=re.ASCII)
    option = "--base-model-id" if base_model and not folder and not is_path(base_model) else "--base"
    return {
        "serve with vLLM": serve_line(to, base, name=name),
        "convert for llama.cpp": f"python convert_lora_to_gguf.py {option} {shlex.quote(base)} {path}",
    }


def refuse_unnamed(repo: str) -> None:
    """Refuse what is no name of a repository, before anything is written."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    with suppress(HFValidationError):
        validate_repo_id(repo)
        if repo.count("/") == 1:
            return
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
