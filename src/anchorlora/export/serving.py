"""Commands that serve an exported adapter: vLLM's, and llama.cpp's converter.

vLLM takes one of a few values as --max-lora-rank and refuses adapters of a larger rank. It reads `r` and `lora_alpha`, and ignores
`rank_pattern` and `alpha_pattern`: an adapter with patterns would load and be scaled wrongly, so no command is given for one.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from anchorlora.adapters import CONFIG_FILE, read_config
from anchorlora.errors import InvalidValue

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM takes as --max-lora-rank


def accepted_rank(rank: int) -> int:
    """Return the smallest rank that a server can be started with for an adapter.

    Args:
        rank: Rank of the adapter.

    Raises:
        InvalidValue: No server takes such a rank.

    Example:
        >>> from anchorlora.export.serving import accepted_rank
        >>> accepted_rank(8), accepted_rank(24)
        (8, 32)
    """
    for accepted in RANKS:
        if rank <= accepted:
            return accepted
    raise InvalidValue(
        f"the adapter has rank {rank}, and vLLM serves ranks up to {RANKS[-1]}; "
        "reduce it with --form svd --rank R, or use --form merged"
    )


def serve_line(adapter_folder: Path, base_model_name: str, *, name: str) -> str:
    """Return the command that serves an adapter with vLLM, quoted for a shell.

    Args:
        adapter_folder: Folder of the adapter.
        base_model_name: Name or folder of the base model.
        name: Name that requests use for the adapter.

    Raises:
        InvalidValue: The folder holds no plain LoRA adapter, or one that vLLM refuses or would scale wrongly.

    Example:
        >>> from pathlib import Path
        >>> from anchorlora.export.serving import serve_line
        >>> tiny().save_pretrained(tmp / "adapter")
        >>> serve_line(tmp / "adapter", "org/model", name="mine").replace(str(tmp), "out")
        'vllm serve org/model --enable-lora --max-lora-rank 8 --lora-modules mine=out/adapter'
    """
    path = Path(adapter_folder) / CONFIG_FILE
    config = read_config(Path(adapter_folder))
    if config.get("rank_pattern") or config["alpha_pattern"]:
        raise InvalidValue(
            f"{path} has rank_pattern or alpha_pattern, which vLLM ignores; anchorlora export {adapter_folder} --out DIR writes an "
            "equal adapter of one rank and one scale"
        )
    if config.get("modules_to_save"):
        raise InvalidValue(f"{path} has modules_to_save, which vLLM refuses; train the adapter without it")
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise InvalidValue(f"{path}: r is {rank!r}, not a rank of 1 or more")
    modules = shlex.quote(f"{name}={adapter_folder}")
    return f"vllm serve {shlex.quote(base_model_name)} --enable-lora --max-lora-rank {accepted_rank(rank)} --lora-modules {modules}"
