"""Which layer an operation belongs to, from the names of weights and from what flows where.

Converters keep the names of weights (`model_layers_3_mlp_down_proj_weight`, `transformer.h.3.attn…`) and seldom those of operations. So an
operation belongs to the latest layer whose weights or named operations it depends on. One that depends on none belongs to
the layer of its users if that is a single one (a slice of the cache, its position), and else to none ("other": tables, masks and
positions for all layers).

Two regions are not numbered. "embedding" begins at the largest table that is looked up before any layer (tables of positions, which
rotary embedding reads, aside). "head" begins behind the last layer at the first operation that reads a matrix (not one of integers), or a
weight called a norm's, without a layer's number in its name; or at a weight that is named like a head. What goes to a state is not behind
the last layer, for layers read it.

What that cannot know: a norm in front of a layer whose weight has lost its name counts to the layer before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeAlias

from ane_layers.analysis.flow import Datum, Flow, Step
from ane_layers.analysis.movement import LOOKUPS, data_of, root
from ane_layers.program import TensorType

# Stack by order of appearance, then number: an encoder's layers come before its decoder's.
Level: TypeAlias = tuple[int, int]

OTHER = "other"
_EMBEDDING: Level = (-1, 0)
_HEAD: Level = (1 << 30, 0)

_LAYER = re.compile(r"(?:layers?|blocks?|(?<![a-z0-9])h)[._](\d+)(?![0-9])", re.IGNORECASE)
_STACK = re.compile(r"encoder|decoder|vision|visual|text|audio", re.IGNORECASE)
_EMBEDDING_NAME = re.compile(r"embed|wte|tok", re.IGNORECASE)
_POSITIONS = re.compile(r"rot|rope|cos|sin(?!g)|pos|freq", re.IGNORECASE)
_HEAD_NAME = re.compile(r"lm_head|output_head|embed_out|classifier", re.IGNORECASE)
_NORM_NAME = re.compile(r"norm|ln_f(?![a-z])", re.IGNORECASE)


def layers(flow: Flow) -> dict[Step, str]:
    """The layer of every step: its number (`"3"`, or `"decoder.3"` where a function has several stacks), `"embedding"`, `"head"` or
    `"other"`."""
    stacks: dict[str, int] = {}
    named = {step: _named_level(step, stacks) for step in flow.steps}
    levels = _by_inputs(flow, named, _leads_to_layers(flow, named))
    _by_users(flow, levels)
    names = {order: name for name, order in stacks.items()}
    return {step: _label(levels[step], names) for step in flow.steps}


def embedding(flow: Flow, *, named: bool = False) -> Step | None:
    """The lookup that turns tokens into vectors: one with such a name, else (unless it must be `named`) the largest table that is looked
    up; None without any."""
    found: list[tuple[bool, int, int, Step]] = []
    for number, step in enumerate(flow.steps):
        table = data_of(step) if step.type in LOOKUPS else None
        if table is None or root(table).constant is None:
            continue
        name = root(table).name
        if _EMBEDDING_NAME.search(name) or not (named or _POSITIONS.search(name)):
            found.append((bool(_EMBEDDING_NAME.search(name)), table.elements or 0, -number, step))
    return max(found, key=lambda entry: entry[:3])[3] if found else None


def _named_level(step: Step, stacks: dict[str, int]) -> Level | None:
    """The layer that a weight of the operation, or the operation itself, is named after."""
    found = []
    for name in _names(step):
        match = _LAYER.search(name)
        if match is not None:
            stack = _STACK.findall(name[: match.start()] + match.group())
            order = stacks.setdefault(stack[-1].lower() if stack else "", len(stacks))
            found.append((order, int(match.group(1))))
    return max(found, default=None)


def _names(step: Step) -> Iterator[str]:
    yield step.name
    for output in step.outputs:
        yield output.name
    for _, datum in step.given():
        if root(datum).constant is not None:
            yield root(datum).name


def _leads_to_layers(flow: Flow, named: dict[Step, Level | None]) -> set[Step]:
    """Steps that a numbered layer depends on, in this call or, by way of a state, in the next one."""
    leading = {step for step in flow.steps if step.type == "write_state"}
    for step in reversed(flow.steps):
        users = [user for output in step.outputs for user in output.users]
        if any(user in leading or named[user] is not None for user in users):
            leading.add(step)
    return leading


def _by_inputs(flow: Flow, named: dict[Step, Level | None], leading: set[Step]) -> dict[Step, Level | None]:
    levels: dict[Step, Level | None] = {}
    reached: dict[Datum, Level] = {}
    start = embedding(flow)
    if start is not None and named[start] is not None:
        start = None
    has_layers = any(level is not None for level in named.values())
    for step in flow.steps:
        known = [reached[datum] for _, datum in step.given() if datum in reached]
        own = named[step]
        if own is not None:
            known.append(own)
        elif step is start:
            known.append(_EMBEDDING)
        elif _is_head(step, bool(known) and max(known) > _EMBEDDING and step not in leading):
            known.append(_HEAD)
        level = max(known, default=None)
        levels[step] = level
        # Without layers that begin somewhere, all the rest would be embedding.
        if level is not None and (has_layers or level != _EMBEDDING):
            reached.update((output, level) for output in step.outputs)
    return levels


def _by_users(flow: Flow, levels: dict[Step, Level | None]) -> None:
    for step in reversed(flow.steps):
        if levels[step] is not None:
            continue
        users = {levels[user] for output in step.outputs for user in output.users}
        # What is read of a state goes to the layer's attention and, as the state to update, to the next layer.
        if len(users) == 1 or (step.type == "read_state" and users and None not in users):
            levels[step] = min(user for user in users if user is not None) if users != {None} else None


def _is_head(step: Step, behind_layers: bool) -> bool:
    weights = [root(datum) for _, datum in step.given() if root(datum).constant is not None]
    if any(_HEAD_NAME.search(weight.name) for weight in weights):
        return True
    return behind_layers and any(_is_matrix(weight) or _NORM_NAME.search(weight.name) for weight in weights)


def _is_matrix(datum: Datum) -> bool:
    type_ = datum.type
    if not isinstance(type_, TensorType) or "int" in type_.dtype:
        return False
    return sum(size is None or size > 1 for size in type_.shape) >= 2


def _label(level: Level | None, stacks: dict[int, str]) -> str:
    if level is None:
        return OTHER
    if level in (_EMBEDDING, _HEAD):
        return "embedding" if level == _EMBEDDING else "head"
    order, number = level
    return f"{stacks[order]}.{number}" if len(stacks) > 1 and stacks[order] else str(number)
