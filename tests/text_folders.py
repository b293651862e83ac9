"""Tokenizer folders made on the spot: a tiny byte-level BPE, and one that falls back to bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEXT = "In the beginning the word. 태초에 말씀이 계시니라 👩‍👩‍👧 naïve 你好"
SPECIAL = ["[PAD]", "[BOS]", "[EOS]", "[|user|]", "[|assistant|]", "[|endofturn|]"]
CHAT_TEMPLATE = """{%- for message in messages %}
    {%- if loop.index > 8 %}{% break %}{% endif %}
    {{- '[|' + message['role'] + '|]\\n' + message['content'] | trim }}
    {%- generation %}{{ eos_token }}{% endgeneration %}
    {{ '' }}
    {% set last = message['role'] %}
{%- endfor %}
{%- if tools is not none %}{{ tools | tojson }}{% endif %}
{{- {'<b>': bos_token, 'år': 1} | tojson(indent=1) }}{{ strftime_now('%Y') }}
{%- if add_generation_prompt %}{{ '[|assistant|]\\n' }}{% endif %}
"""
SETTINGS: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "[BOS]",
    "eos_token": {"__type": "AddedToken", "content": "[EOS]", "special": True},
    "pad_token": "[PAD]",
    "chat_template": CHAT_TEMPLATE,
}
VOCABULARY = 280  # 6 special tokens, 256 bytes, 18 merges


def byte_level(*, adds_bos: bool = False, truncated: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 1)])
    if truncated:
        tokenizer.enable_truncation(3)
        tokenizer.enable_padding(length=64)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 has it: words, and bytes for what is in none."""
    tokens = ["<unk>", "▁a", "b", "你", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def write_tokenizer(folder: Path, tokenizer: Tokenizer | None = None, **settings: Any) -> Path:
    """Adds tokenizer.json and tokenizer_config.json to a folder. A setting of None is left out."""
    folder.mkdir(exist_ok=True)
    (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
    values = {name: value for name, value in (SETTINGS | settings).items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder
