"""The commands that serve an adapter: ranks that vLLM takes, and adapters that it would refuse or scale wrongly."""

import json
import shlex

import pytest
import torch

from anchorlora.adapters import write_adapter
from anchorlora.errors import InvalidValue
from anchorlora.export.serving import accepted_rank, serve_line
from anchorlora.geometry import Factors

PATH = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def adapter(tmp_path):
    write_adapter(tmp_path / "my adapter", {PATH: Factors(torch.ones(9, 4), torch.ones(4, 9), 2.0)}, base=None)
    return tmp_path / "my adapter"


@pytest.mark.parametrize(("rank", "accepted"), [(1, 1), (2, 8), (8, 8), (9, 16), (64, 64), (257, 320), (321, 512), (512, 512)])
def test_the_smallest_rank_that_a_server_takes(rank, accepted):
    assert accepted_rank(rank) == accepted


def test_a_rank_over_512_is_refused_with_the_remedy():
    with pytest.raises(InvalidValue, match=r"^the adapter has rank 513, and vLLM serves ranks up to 512; .*--form svd --rank R"):
        accepted_rank(513)


def test_the_line_survives_a_shell(adapter):
    line = serve_line(adapter, "/models/a b", name="mine")
    assert shlex.split(line) == [
        *("vllm", "serve", "/models/a b", "--enable-lora", "--max-lora-rank", "16"),
        *("--lora-modules", f"mine={adapter}"),
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank_pattern": {PATH: 9}}, "has rank_pattern or alpha_pattern, which many servers ignore; anchorlora export"),
        ({"alpha_pattern": {PATH: 3}}, "has rank_pattern or alpha_pattern, which many servers ignore; anchorlora export"),
        (
            {"modules_to_save": ["lm_head"]},
            "has modules_to_save, whole weights that vLLM takes from no adapter; anchorlora export .* --form merged",
        ),
        ({"r": "9"}, "r is '9', not a rank of 1 or more"),
        ({"use_dora": True}, "DoRA"),
    ],
)
def test_adapters_that_vllm_would_refuse_or_scale_wrongly_get_no_line(adapter, fields, message):
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    with pytest.raises(InvalidValue, match=message):
        serve_line(adapter, "org/model", name="mine")
