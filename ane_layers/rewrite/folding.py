"""Writes attention anew with its queries folded: `[B, H, S, D] → [B, K, G·S, D]`, keys and values as they are stored."""

from __future__ import annotations

import numpy as np

from ane_layers.analysis.flow import Datum, Flow, Step
from ane_layers.rewrite.draft import Argument, Draft, Operand, is_static, shape_of
from ane_layers.rewrite.patterns import SLICE, Attention, Layout, Product
from ane_layers.rewrite.repetition import Refusal, Repetition


class Folder:
    """Drafts foldings, one attention after the other.

    Everything between the two products works row by row, so that it can be done to folded rows; what it takes besides the scores is lined
    up with them. A mask is lined up once, however many layers use it.
    """

    def __init__(self, flow: Flow) -> None:
        self.draft = Draft(flow)
        self._order = {step: number for number, step in enumerate(flow.steps)}
        # Values that something else than a step needs: outputs of the function, and of nested blocks, which may name values around them.
        self._needed = {datum.name for datum in flow.outputs} | nested_outputs(flow)
        self._aligned: dict[tuple[Datum, Layout], Operand] = {}

    def check(self, attention: Attention, layout: Layout) -> None:
        """Whether `fold` will succeed, before anything is drafted.

        Raises:
            Refusal: an operand of the operations in between cannot be lined up, or products differ in their heads.
        """
        for product in attention.products:
            own = Layout.of(product)
            if own != layout:
                raise Refusal(
                    f"groups or rows differ: {product.step.name} has {own.groups} query heads for a KV head and {own.rows} rows, "
                    f"{attention.products[0].step.name} has {layout.groups} and {layout.rows}"
                )
        for product in attention.scores:
            if product.left:
                raise Refusal(f"keys stand on the left in {product.step.name}: its scores are transposed")
        for product in attention.values:
            if product.transpose_rows:
                raise Refusal(f"{product.step.name} transposes the weights of attention")
        inner = {output for step in attention.members() for output in step.outputs}
        for step in attention.between:
            for name, datum in step.given():
                if datum not in inner and not _is_setting(step, name):
                    self.check_aligned(datum, layout)

    def check_aligned(self, datum: Datum, layout: Layout) -> None:
        """Whether a mask or the like can be lined up. Raises `Refusal` if it differs by head and not by row."""
        _alignment(datum, layout)

    def fold(self, attention: Attention, layout: Layout) -> None:
        folded: dict[Datum, Operand] = {}
        products = {product.step: product for product in attention.products}
        members = sorted(set(attention.members()), key=self._order.__getitem__)
        inside = set(members)
        scores = {product.step for product in attention.scores}
        for step in members:
            if step in scores:
                product = products[step]
                rows = self._folded_rows(product, layout)
                results: tuple[Operand, ...] = (self._product(product, rows),)
            elif step in products:
                self._values(products[step], folded[products[step].rows], layout)
                continue
            else:
                results = self._between(step, folded, layout)
            for old, new in zip(step.outputs, results, strict=True):
                folded[old] = new
                if old.name in self._needed or any(user not in inside for user in old.users):
                    self.draft.reshape(new, shape_of(old), step, instead_of=old)
        self.draft.removed.update(members)

    def fold_fused(self, step: Step, key: Repetition, value: Repetition, layout: Layout) -> None:
        """The same for the fused operation, which scales, masks and multiplies by itself."""
        query, mask = step.one("query"), step.one("attn_mask")
        assert query is not None
        inputs: dict[str, Argument] = {
            "query": self.draft.reshape(query, layout.folded(shape_of(query)), step),
            "key": self._once(key, step, transposed=False),
            "value": self._once(value, step, transposed=False),
        }
        if mask is not None:
            inputs["attn_mask"] = self.aligned(mask, layout, step)
        out = step.outputs[0]
        (result,) = self.draft.copy(step, inputs, [layout.folded(shape_of(out))])
        self.draft.reshape(result, shape_of(out), step, instead_of=out)
        self.draft.removed.add(step)

    def aligned(self, datum: Datum, layout: Layout, before: Step) -> Operand:
        """A mask or the like as folded scores need it: as it is if it broadcasts, its rows G times if it has rows, else viewed anew."""
        key = datum, layout
        if key not in self._aligned:
            shape, repeat = _alignment(datum, layout)
            viewed = self.draft.reshape(datum, shape, before)
            self._aligned[key] = self.draft.repeat_rows(viewed, layout.groups, before) if repeat else viewed
        return self._aligned[key]

    def _folded_rows(self, product: Product, layout: Layout) -> Operand:
        query, step = product.rows, product.step
        shape = shape_of(query)
        rows: Operand = query
        if product.transpose_rows:
            rank = len(shape)
            shape = (*shape[:-2], shape[-1], shape[-2])
            if layout.rows > 1:  # one row is a view
                rows = self.draft.transpose(query, [*range(rank - 2), rank - 1, rank - 2], step)
        return self.draft.reshape(rows, layout.folded(shape), step)

    def _product(self, product: Product, rows: Operand) -> Operand:
        repetition = product.repetition
        once = self._once(repetition, product.step, transposed=repetition.swapped)
        return self.draft.matmul(rows, once, product.transpose != repetition.swapped, product.step)

    def _values(self, product: Product, weights: Operand, layout: Layout) -> None:
        result, step = product.result, product.step
        out = self._product(product, weights)  # [*folded lead, G·S, D]
        shape = (*layout.lead, layout.rows, shape_of(out)[-1])
        if product.left:
            rank = len(shape)
            unfolded = self.draft.reshape(out, shape, step)
            self.draft.transpose(unfolded, [*range(rank - 2), rank - 1, rank - 2], step, instead_of=result)
        else:
            self.draft.reshape(out, shape, step, instead_of=result)

    def _once(self, repetition: Repetition, before: Step, *, transposed: bool) -> Operand:
        """Every head once; with `transposed`, its last two axes as they are in the source, for the product to transpose."""
        perm, shape = repetition.perm, repetition.shape
        viewed = [0] * len(shape)
        for axis, size in zip(perm, shape, strict=True):
            viewed[axis] = size
        value = self.draft.reshape(repetition.source, viewed, before)
        if perm != tuple(range(len(perm))) and not transposed:
            value = self.draft.transpose(value, perm, before)
        for step in repetition.pointwise:
            inputs = {name: data[0] for name, data in step.inputs.items()}
            changed: dict[str, Argument] = {
                name: datum if datum.constant is not None else value for name, datum in inputs.items()
            }
            value = self.draft.copy_before(before, step, changed, shape_of(value))
        return value

    def _between(self, step: Step, folded: dict[Datum, Operand], layout: Layout) -> tuple[Operand, ...]:
        shapes = [layout.folded(shape_of(output)) for output in step.outputs]
        inputs: dict[str, Argument] = {}
        for name, data in step.inputs.items():
            setting = _is_setting(step, name)
            new = tuple(
                folded[datum] if datum in folded else datum if setting else self.aligned(datum, layout, step)
                for datum in data
            )
            inputs[name] = new if name == "values" else new[0]
        if len(shapes[0]) != len(shape_of(step.outputs[0])):
            if "axis" in inputs:
                inputs["axis"] = np.array(-1, np.int32)
            if "axes" in inputs:
                inputs["axes"] = np.array([-1], np.int32)
        if step.type == SLICE:
            inputs |= _slice(step, len(shapes[0]))
        return self.draft.copy(step, inputs, shapes)


def nested_outputs(flow: Flow) -> set[str]:
    """Names of values that nested blocks give as their results."""
    return {name for operation in flow.function.block.walk() for block in operation.blocks for name in block.outputs}


# Operands that are data; every other one is a setting of the operation.
_DATA = frozenset({"a", "b", "cond", "values", "x", "y"})


def _is_setting(step: Step, name: str) -> bool:
    return name not in _DATA


def _alignment(datum: Datum, layout: Layout) -> tuple[tuple[int, ...], bool]:
    """The shape in which an operand is viewed, and whether its rows are then repeated for every group."""
    if not is_static(datum):
        raise Refusal(f"{datum.name} has an open dimension")
    own = shape_of(datum)
    rank = len(layout.lead) + 2
    full = (1,) * (rank - len(own)) + own
    heads, rows = full[layout.kept : -2], full[-2]
    if all(size == 1 for size in heads):
        if rows not in (1, layout.rows):
            raise Refusal(f"{datum.name} has {rows} rows for {layout.rows}")
        small = (*full[: layout.kept], *(1 for _ in layout.tail), *full[-2:])
        # What broadcasts anyway stays as it is.
        as_it_is = rows == 1 and (1,) * (len(small) - len(own)) + own == small
        return (own if as_it_is else small), rows > 1
    if heads != layout.lead[layout.kept :] or rows != layout.rows:
        raise Refusal(f"{datum.name} differs by query head, and not by row as the scores do")
    return layout.folded(full), False


def _slice(step: Step, rank: int) -> dict[str, Argument]:
    """Bounds of a slice along the last axis that takes every other one whole, whatever its size."""

    def last(name: str, otherwise: int) -> int:
        datum = step.one(name)
        if datum is None or datum.constant is None:
            return otherwise
        return int(datum.constant.array().reshape(-1)[-1])

    inputs: dict[str, Argument] = {
        name: np.array([0] * (rank - 1) + [last(name, 0)], np.int32) for name in ("begin", "end")
    }
    inputs["stride"] = np.array([1] * (rank - 1) + [last("stride", 1)], np.int32)
    for name in ("begin_mask", "end_mask"):
        inputs[name] = np.array([True] * (rank - 1) + [bool(last(name, 0))])
    return inputs
