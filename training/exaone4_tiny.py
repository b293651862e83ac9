"""What training and export share: the tokenizer, the architecture, and the loss that is reported."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import Exaone4Config, Exaone4ForCausalLM

SPECIALS = ("[PAD]", "[BOS]", "[EOS]", "[UNK]", "[|system|]", "[|user|]", "[|assistant|]", "[|endofturn|]")
PAD_ID, BOS_ID, END_OF_TURN_ID = 0, 1, 7
VOCAB = 2048
TRAINED_LENGTH = 512
LAYERS = 12


def train_tokenizer(text: str) -> Tokenizer:
    """Byte-level BPE of `VOCAB` entries; every byte is in the alphabet, so no text is out of vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer


def config() -> Exaone4Config:
    """EXAONE 4's architecture with every layer of full attention, as in the 1.2B.

    Sizes are multiples of 64 except the 32 of a head; `head_dim` is not `hidden_size / num_attention_heads` (24), and
    four query heads share a KV head.
    """
    return Exaone4Config(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        sliding_window=None,
        sliding_window_pattern=None,
        layer_types=["full_attention"] * LAYERS,  # transformers divides by the pattern if this is left out
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": TRAINED_LENGTH,
        },
        bos_token_id=BOS_ID,
        eos_token_id=END_OF_TURN_ID,
        pad_token_id=PAD_ID,
    )


def fresh_model() -> Exaone4ForCausalLM:
    """A model ready to train.

    A branch is normalised after it is computed, so its size in the residual stream is its norm's weight: starting at
    1/4 keeps 24 branches near unit size in sum, and leaves the embedding a voice.
    """
    model = Exaone4ForCausalLM._from_config(config(), attn_implementation="sdpa")
    for name, weight in model.named_parameters():
        if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            nn.init.constant_(weight, 0.25)
        elif "embed_tokens" in name:
            nn.init.normal_(weight, std=0.05)
        elif weight.dim() == 2:
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    return model


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer from its `tokenizer.json`."""
    return Tokenizer.from_file(str(path))


@torch.no_grad()
def text_loss(
    model: Exaone4ForCausalLM, tokenizer: Tokenizer, text: str, *, length: int = TRAINED_LENGTH
) -> dict[str, float]:
    """Held-out loss of a text, in nats a token and nats and bits a byte.

    The text follows one [BOS]. Windows of `length` tokens advance by half of it and only the new half of each is
    scored, so every token is scored once, and with at least `length / 2` tokens of context after the first window.
    """
    ids = [BOS_ID, *tokenizer.encode(text).ids]
    was_training = model.training
    model.eval()
    nats, count, half = 0.0, 0, length // 2
    for start in range(0, len(ids) - 1, half):
        window = torch.tensor(ids[start : start + length + 1])
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0].float()
        losses = nn.functional.cross_entropy(logits, window[1:], reduction="none")
        fresh = losses if start == 0 else losses[half:]
        nats, count = nats + float(fresh.double().sum()), count + fresh.numel()
        if start + length + 1 >= len(ids):
            break
    model.train(was_training)
    size = len(text.encode())
    return {
        "nats_per_token": nats / count,
        "nats_per_byte": nats / size,
        "bits_per_byte": nats / size / math.log(2),
        "tokens": count,
        "bytes": size,
    }
