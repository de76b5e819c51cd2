"""Answers by vLLM, for large models: the run's adapter is served over a second copy of the base model.

vLLM computes with other kernels, so where two tokens are nearly tied it may choose the other one. A sample of every task is
answered by transformers too; if most answers of a sample differ, the adapter is not what vLLM computes with, and the run stops.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from anchorlora.adapters import write_adapter
from anchorlora.data.templates import stop_ids
from anchorlora.data.thoughts import decode_answer
from anchorlora.errors import Failed, InvalidValue, MissingExtra
from anchorlora.geometry import Factors, one_scale
from anchorlora.models.load import LoadedModel, ends_of
from anchorlora.processes import Processes

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has kernels for
SAMPLE = 8  # examples of each task that transformers answers as well
MEMORY = 0.4  # of the GPU, beside the model that trains


class Served:
    """A base model in vLLM, which sleeps between two evaluations."""

    def __init__(self, base_model: LoadedModel, *, quantized: str | None, processes: Processes) -> None:
        if find_spec("vllm") is None:
            raise MissingExtra("backend=vllm needs vLLM, which is not installed: pip install vllm, or set backend=transformers")
        if processes.count > 1:
            raise InvalidValue("backend=vllm answers for one process; start the run as one, or set backend=transformers")
        if quantized == "int8":
            raise InvalidValue("vLLM quantizes to 4 bits, not to 8; set quantized=nf4, or backend=transformers")
        self.base_model, self.quantized = base_model, quantized
        self._llm: Any = None
        self._rank = self._adapters = 0

    def texts(self, factors: Mapping[str, Factors], prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[str]:
        """Return the greedy answers to prompts, up to the end of sequence."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        tokenizer = self.base_model.tokenizer
        llm = self._awake(max(f.A.shape[0] for f in factors.values()))
        greedy = SamplingParams(
            temperature=0.0, max_tokens=max_new_tokens, stop_token_ids=sorted(stop_ids(tokenizer, ends_of(self.base_model.model)))
        )
        with tempfile.TemporaryDirectory() as folder:
            scale = one_scale(factors)  # vLLM reads one scale for all layers
            same = {layer: f if f.scale == scale else f.scaled_to(scale) for layer, f in factors.items()}
            write_adapter(Path(folder) / "adapter", same, base=self.base_model.name)
            self._adapters += 1  # a number of its own, or vLLM would take the adapter that it has by that number
            request = LoRARequest(f"task-{self._adapters}", self._adapters, str(Path(folder) / "adapter"))
            asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
            outputs = llm.generate(asked, greedy, lora_request=request, use_tqdm=False)
        llm.sleep(level=1)
        return [decode_answer(tokenizer, output.outputs[0].token_ids) for output in outputs]

    def _awake(self, rank: int) -> Any:
        if self._llm is not None and rank <= self._rank:
            self._llm.wake_up()
            return self._llm
        fitting = [rank_limit for rank_limit in RANKS if rank_limit >= rank]
        if not fitting:
            raise InvalidValue(f"vLLM serves adapters up to rank {RANKS[-1]}, and this one has {rank}; set backend=transformers")
        from vllm import LLM

        self._llm, self._rank = None, fitting[0]  # the smaller one goes first
        kinds = {"quantization": "bitsandbytes"} if self.quantized else {}
        self._llm = LLM(
            model=self.base_model.model.config._name_or_path,
            revision=self.base_model.revision,
            dtype=self.base_model.dtype.partition(" ")[0],
            enable_lora=True,
            max_loras=1,
            max_lora_rank=self._rank,
            enable_sleep_mode=True,
            gpu_memory_utilization=MEMORY,
            generation_config="vllm",  # no stop tokens but ours
            seed=0,
            **kinds,
        )
        return self._llm


def compare(task: str, ours: Sequence[str], served: Sequence[str]) -> str | None:
    """Return a sentence on the answers of a sample that differ; None if they are all the same."""
    alike = sum(a == b for a, b in zip(ours, served, strict=True))
    sentence = f"vLLM and transformers answer {alike} of {len(ours)} sampled questions of {task} alike"
    if 2 * alike < len(ours):
        raise Failed(f"{sentence}, so vLLM does not compute with this adapter; set backend=transformers")
    return sentence if alike < len(ours) else None
