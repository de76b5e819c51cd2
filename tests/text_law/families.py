"""Chat templates of nineteen families, in our own words, and tokenizers of six kinds, made here."""

import json
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

ASK = "{%- if add_generation_prompt %}"
CHATML = "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endfor %}"
CHATML += ASK + "{{ '<|im_start|>assistant\n' }}{%- endif %}"
THINKING = (
    """{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- if tools %}{{ '<|im_start|>system\n' }}{%- for tool in tools %}{{ tool | tojson + '\n' }}{%- endfor %}{{ '<|im_end|>\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role in ('user', 'system') %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}{{ '<|im_start|>user\n<result>' + m.content + '</result><|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set said = m.content %}{%- set thought = m.reasoning_content or '' %}
{%- if not thought and '</think>' in said %}
{%- set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}{%- set said = said.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}{%- endif %}
{{- said }}
{%- for call in m.tool_calls or [] %}{{ '\n<call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</call>' }}{%- endfor %}
{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"""  # noqa: E501
    + ASK
    + "{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
CLOSED = (
    """{%- for m in messages %}{%- if m.role == 'assistant' %}{{ '<|assistant|>\n<think></think>\n' + m.content.strip() }}
{%- else %}{{ '<|' + m.role + '|>\n' + m.content }}{%- endif %}{%- endfor %}{%- if not add_generation_prompt %}{{ '<|user|>' }}{%- endif %}
"""  # noqa: E501
    + ASK
    + "{{ '<|assistant|>' }}{%- endif %}"
)
OPENED = (
    """{{- bos_token or '' }}{%- for m in messages %}{%- if m.role == 'assistant' %}
{{- '<|assistant|>' + m.content.split('</think>')[-1] + eos_token }}{%- else %}{{ '<|' + m.role + '|>' + m.content }}{%- endif %}
{%- endfor %}"""
    + ASK
    + "{{ '<|assistant|><think>\n' }}{%- endif %}"
)
SHUT = (  # as GLM-4.7's: opens a thought in the prompt, and of an answer without one writes its end alone
    """{{- bos_token or '' }}{%- for m in messages %}{%- if m.role == 'assistant' %}
{{- '<|assistant|>' + ('<think>' + m.reasoning_content if m.reasoning_content else '') + '</think>' + m.content + eos_token }}
{%- else %}{{ '<|' + m.role + '|>' + m.content }}{%- endif %}{%- endfor %}"""
    + ASK
    + "{{ '<|assistant|><think>' }}{%- endif %}"
)
CHANNELS = (
    """{%- for m in messages %}{%- if m.role == 'assistant' %}{{ '<|start|>assistant' }}
{%- if m.reasoning_content and loop.last %}{{ '<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|><|start|>assistant' }}{%- endif %}
{{- '<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}
"""  # noqa: E501
    + ASK
    + "{{ '<|start|>assistant' }}{%- endif %}"
)
FOLDED = (
    """{{- bos_token or '' }}{%- set ns = namespace(system='') %}{%- for m in messages %}
{%- if m.role == 'system' %}{%- set ns.system = m.content | trim + '\n\n' %}{%- else %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}{%- if m.role == 'user' %}{{ ns.system }}{%- set ns.system = '' %}{%- endif %}
{{- m.content | trim + '<end_of_turn>\n' }}{%- endif %}{%- endfor %}"""  # noqa: E501
    + ASK
    + "{{ '<start_of_turn>model\n' }}{%- endif %}"
)
DATED = (
    """{{- bos_token or '' }}{{ '<|im_start|>system\nToday is ' + strftime_now('%d %b %Y') + '<|im_end|>' }}
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n\n' + m.content | trim + '<|im_end|>' }}{%- endfor %}
"""
    + ASK
    + "{{ '<|im_start|>assistant\n\n' }}{%- endif %}"
)
BRACKETS = """{%- set ns = namespace(system='') %}{%- for m in messages %}
{%- if m.role == 'system' %}{%- set ns.system = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' %}
{%- elif m.role == 'user' %}{{ (bos_token or '') + '[INST] ' + ns.system + m.content | trim + ' [/INST]' }}{%- set ns.system = '' %}
{%- else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{%- endif %}{%- endfor %}"""
PIPES = (
    "{%- for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{%- endfor %}"
    + ASK
    + "{{ '<|assistant|>\n' }}{%- endif %}"
)
LAST = """{{- bos_token or '' }}{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- for m in messages[1 if system else 0:] %}{%- if m.role == 'user' %}
{{- '[INST]' + (system + '\n\n' if system and loop.last else '') + m.content + '[/INST]' }}
{%- else %}{{ m.content + eos_token }}{%- endif %}{%- endfor %}"""  # as Mistral Nemo's: the system message is the last question's
SILENT = "{%- for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{%- endfor %}"
LINES = "{%- for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{%- endfor %}" + ASK + "{{ 'assistant:' }}{%- endif %}"
DEFAULT = "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe of help.<|im_end|>\n' }}{%- endif %}" + CHATML
REFUSING = "{%- if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{%- endif %}" + CHATML
DROPPING = CHATML.replace("for m in messages", "for m in messages if m.role in ('user', 'assistant', 'system')")
RULED = CHATML.replace(
    "{{ '<|im_start|>' + m.role", "{%- if m.role == 'assistant' %}{{ '\n' }}{%- endif %}{{ '<|im_start|>' + m.role"
)
RULED = RULED.replace(ASK + "{{ '", ASK + "{{ '\n")
TOOLED = """{{- bos_token or '' }}{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}{%- if m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}{{ '[TOOLS] ' + (tools | tojson) + '[/TOOLS]' }}{%- endif %}{{ '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{ '[RESULT] ' + m.content + '[/RESULT]' }}
{%- elif m.role == 'assistant' and m.tool_calls %}{{ '[CALLS] [' }}
{%- for call in m.tool_calls %}{{ call.function | tojson }}{%- endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
{%- else %}{{ raise_exception('only user, assistant and tool') }}{%- endif %}{%- endfor %}"""  # noqa: E501

KEPT = THINKING.replace("{%- if not thought and '</think>' in said %}", "{%- if false %}")  # takes no thought out of content
# content of models that see: a list of parts, and none of them text
JOINED = "m.content | map(attribute='text') | join"
PARTS = {
    "every-part": CHATML.replace("m.content", f"({JOINED})"),
    "first-part": CHATML.replace("m.content", "m.content[0]['text']"),
    "parts-of-answers": CHATML.replace("m.content", f"(m.content if m.role == 'user' and m.content is string else {JOINED})"),
}

CLOSING = CHATML.replace("assistant\n' }}{%- endif %}", "assistant\n<think>\n\n</think>\n\n' }}{%- endif %}")  # of the prompt alone
SPLITTING = CHATML.replace("m.content", "(m.content.split('</think>')[-1] if m.role == 'assistant' else m.content)")

FAMILIES = {
    "chatml": CHATML,
    "thinking": THINKING,
    "closed-thought": CLOSED,
    "opened-thought": OPENED,
    "closed-in-prompt": CLOSING,
    "channels": CHANNELS,
    "folded-system": FOLDED,
    "dated": DATED,
    "brackets": BRACKETS,
    "pipes": PIPES,
    "no-generation-prompt": SILENT,
    "no-end-of-turn": LINES,
    "default-system": DEFAULT,
    "no-system": REFUSING,
    "drops-unknown-roles": DROPPING,
    "ruled": RULED,
    "tools-in-brackets": TOOLED,
    "shut-thought": SHUT,
    "system-last": LAST,
}
SPECIAL = [
    "<s>",
    "</s>",
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|tool|>",
    "<|end|>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|return|>",
    "<start_of_turn>",
    "<end_of_turn>",
]
PLAIN = ["<think>", "</think>"]  # added tokens that are not special, as the families have them
CORPUS = [
    "the old stone mill by the river, and now what is 2 + 2 = 4?",
    "你好，世界。是的 🙂 Être né ou ne pas être",
    "a  b\n\nc\tassistant user <{.,:/()[]|_'\">",
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789",
]


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer: one of KINDS or SERVED."""
    if kind in SERVED:
        made = _byte_fallback() if kind == "byte-fallback-bos" else _stripping()
        return PreTrainedTokenizerFast(
            tokenizer_object=made, eos_token="</s>", pad_token="<pad>", padding_side="left", bos_token="<s>"
        )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind.startswith("bytes"):
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    else:
        made = Tokenizer(models.BPE(unk_token="<unk>") if kind.startswith("metaspace") else models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
        trainer = trainers.BpeTrainer if kind.startswith("metaspace") else trainers.UnigramTrainer
        made.train_from_iterator(CORPUS, trainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False, **UNKNOWN[kind]))
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    made.add_special_tokens(SPECIAL)
    made.add_tokens(PLAIN)
    if kind.endswith("bos"):
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])
    bos = {"bos_token": "<s>"} if kind.endswith("bos") else {}
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="<pad>", padding_side="left", **bos)


def _byte_fallback() -> Tokenizer:
    """As Llama 2's: text begins with a space, spaces are ▁, and characters that are not in the vocabulary are written as bytes."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    every = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(CORPUS[::2], trainers.BpeTrainer(vocab_size=500, special_tokens=every, show_progress=False))
    made = Tokenizer.from_str(json.dumps(json.loads(made.to_str()) | {"added_tokens": []}))  # bytes are plain tokens
    strip = decoders.Strip(" ", 1, 0)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    made.add_special_tokens(SPECIAL)
    made.add_tokens(PLAIN)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))])
    return made


def _stripping() -> Tokenizer:
    """As Phi-3's: the tokens that begin and end a turn swallow the white space after them."""
    made = json.loads(tokenizer("bytes-bos").backend_tokenizer.to_str())
    for token in made["added_tokens"]:
        token["rstrip"] = token["content"] in ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
    return Tokenizer.from_str(json.dumps(made))


def deaf(kind: str) -> PreTrainedTokenizerFast:
    """A tokenizer that says so where it does not know a character, or one that leaves it out."""
    made = json.loads(tokenizer("metaspace-bos" if kind == "silent" else kind).backend_tokenizer.to_str())
    if kind == "silent":
        made["model"]["unk_token"] = None
    unk = {} if kind == "silent" else {"unk_token": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(made)), eos_token="</s>", pad_token="<pad>", padding_side="left", **unk
    )


UNKNOWN = {"metaspace-bos": {}, "unigram": {"unk_token": "<unk>"}}
KINDS = ("bytes", "bytes-bos", "metaspace-bos", "unigram")
SERVED = ("byte-fallback-bos", "stripping-bos")  # kinds with habits of real ones
