"""Folded attention for models of `transformers`, by the registry in which they look their attention up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ane_layers.layers import MASKED, fold_mask

NAME = "ane_layers_fold"

# Keyword arguments that do not change what attention computes: bookkeeping, what becomes of results, and the window, which the mask has.
_WITHOUT_EFFECT = frozenset(
    {
        *("cache_position", "is_causal", "labels", "num_items_in_batch", "output_attentions", "output_hidden_states"),
        *("output_router_logits", "position_embeddings", "position_ids", "return_dict", "sliding_window", "use_cache"),
    }
)


def replace_attention(model: Any) -> Any:
    """Lets a `transformers` model fold its queries, `[B, H, S, D] → [B, K, G·S, D]`, instead of repeating keys and values.

    The model is changed and returned; weights, cache and everything around attention stay its own, so that a plain `ct.convert` of its
    trace has no repeated keys or values. `model.set_attn_implementation("sdpa")` takes it back. Masks that the model makes hide by −4e4
    instead of the lowest number there is, which fp16 does not hold; sliding windows are part of them. Softcaps and attention sinks are
    computed as the model's own eager attention does.

    Args:
        model: a `PreTrainedModel`, in evaluation mode by the time that it runs.

    Raises:
        TypeError: it is no model of `transformers`.
        ValueError: it does not look its attention up in the registry, so that nothing can be put in its place.
        ImportError: `transformers` is not installed.

    While the model runs, `ValueError` is raised for what would change the result and is not computed here: dropout, a causal model
    without a mask for several tokens, and keyword arguments of attention that are not known.
    """
    from transformers import PreTrainedModel
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"replace_attention takes a model of transformers, got {type(model).__name__}")
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    for part in parts:
        if not part._can_set_attn_implementation():
            raise ValueError(
                f"replace_attention: {type(part).__name__} does not look its attention up in transformers' registry"
            )
    ALL_ATTENTION_FUNCTIONS.register(NAME, folded_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, additive_mask)
    before = [part.config._attn_implementation for part in parts]
    model.set_attn_implementation(NAME)
    for part, previous in zip(parts, before, strict=True):
        if part.config._attn_implementation != NAME:
            model.set_attn_implementation(before[0])
            raise ValueError(f"replace_attention: {type(part).__name__} keeps its attention, {previous!r}")
    _share_masks(model, parts)
    return model


def folded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor]:
    """What `transformers` calls: `softmax(Q·Kᵀ·scaling + mask)·V` with folded queries.

    Args:
        module: the attention layer.
        scaling: `D ** -0.5` by default.
        softcap: c in `c·tanh(scores / c)`.
        s_aux: a score for every query head, `[H]`, that takes part in the softmax and nothing else: an attention sink.

    Shape:
        - query: `[B, H, S, D]`; key, value: `[B, K, T, D]`
        - attention_mask: additive or boolean (True is seen), `[B or 1, 1 or H, S, T]`
        - output: `[B, S, H, D]`, and the weights, `[B, H, S, T]`

    Raises:
        ValueError: see `replace_attention`.
    """
    batch, heads, length, head_dim = query.shape
    kv_heads = key.shape[1]
    _check(module, dropout, attention_mask, length, others)
    groups = getattr(module, "num_key_value_groups", None) or int(heads) // int(kv_heads)
    rows = query.reshape(batch, kv_heads, -1, head_dim)  # [B, K, G·S, D]
    scores = rows @ key.transpose(2, 3) * (head_dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attention_mask is not None:
        scores = scores + _lined_up(module, attention_mask, groups, kv_heads)
    if s_aux is not None:
        sinks = s_aux.reshape(1, kv_heads, groups, 1).expand(batch, kv_heads, groups, length)
        scores = torch.cat([scores, sinks.reshape(batch, kv_heads, -1, 1).to(scores.dtype)], dim=3)
    weights = scores.softmax(dim=3, dtype=torch.float32).to(query.dtype)
    if s_aux is not None:
        weights = weights[..., :-1]
    out = (weights @ value).reshape(batch, heads, length, value.shape[3])
    return out.transpose(1, 2).contiguous(), weights.reshape(batch, heads, length, -1)


def additive_mask(*arguments: Any, **options: Any) -> Tensor | None:
    """transformers' mask for eager attention, but that what is hidden is so by a number that fp16 holds."""
    from transformers.masking_utils import eager_mask

    mask = eager_mask(*arguments, **options)
    return None if mask is None else mask.clamp(min=MASKED)


def _check(module: nn.Module, dropout: float, mask: Tensor | None, length: int, others: Mapping[str, Any]) -> None:
    if dropout:
        raise ValueError(f"{type(module).__name__}: dropout is {dropout}; call eval() first")
    for name, value in others.items():
        if name not in _WITHOUT_EFFECT and value is not None and value is not False:
            raise ValueError(
                f"{type(module).__name__}: {name} is not known to folded attention, and not left out silently"
            )
    causal = others.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if mask is None and length > 1 and (causal or others.get("sliding_window") is not None):
        raise ValueError(f"{type(module).__name__}: a mask is missing for {int(length)} tokens of a causal model")


class _Masks:
    """Masks that are lined up with folded rows, while a model runs: one for all its layers."""

    def __init__(self) -> None:
        self.depth = 0
        self._known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def enter(self, *_: Any) -> None:
        self.depth += 1

    def leave(self, *_: Any) -> None:
        self.depth -= 1
        if self.depth <= 0:
            self.depth = 0
            self._known.clear()

    def folded(self, mask: Tensor, groups: int) -> Tensor:
        if not self.depth:
            return fold_mask(mask, groups)
        key = id(mask), groups
        if key not in self._known:
            # The mask is kept too, so that its id is not given to another.
            self._known[key] = mask, fold_mask(mask, groups)
        return self._known[key][1]


def _share_masks(model: nn.Module, parts: list[Any]) -> None:
    if "_folded_masks" in model.__dict__:
        return
    masks = _Masks()
    for part in parts:
        part.register_forward_pre_hook(masks.enter)
        part.register_forward_hook(masks.leave, always_call=True)
    for module in model.modules():
        module.__dict__["_folded_masks"] = masks


def _lined_up(module: nn.Module, mask: Tensor, groups: int, kv_heads: int) -> Tensor:
    """The mask for folded scores, `[B or 1, 1 or K, G·S or 1, T]`."""
    if mask.shape[1] != 1:
        # One for each head: folded as the heads are.
        mask = mask.reshape(mask.shape[0], kv_heads, -1, mask.shape[3])
    else:
        masks = module.__dict__.get("_folded_masks")
        mask = fold_mask(mask, groups) if masks is None else masks.folded(mask, groups)
    if mask.dtype == torch.bool:
        return torch.zeros((), dtype=torch.float32, device=mask.device).where(mask, MASKED)
    return mask
