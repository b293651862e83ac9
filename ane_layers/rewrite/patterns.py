"""Finds attention over repeated keys and values: two matrix products with row-wise operations between them, or the fused operation."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field

from ane_layers.analysis.flow import Datum, Step
from ane_layers.rewrite.draft import is_static, shape_of
from ane_layers.rewrite.repetition import Refusal, Repetition, fold_lead

FUSED = "scaled_dot_product_attention"

# Operations whose result at a place depends on their operands at that place alone.
ELEMENTWISE = frozenset(
    {
        *("abs", "add", "cast", "ceil", "clip", "cos", "equal", "erf", "exp", "exp2", "floor", "gelu", "greater", "greater_equal"),
        *("identity", "inverse", "leaky_relu", "less", "less_equal", "log", "logical_and", "logical_not", "logical_or"),
        *("maximum", "minimum", "mul", "not_equal", "pow", "real_div", "relu", "relu6", "rsqrt", "scaled_tanh", "select"),
        *("sigmoid", "sigmoid_hard", "sign", "silu", "sin", "softplus", "softsign", "sqrt", "square", "sub", "tanh"),
        *("threshold", "thresholded_relu"),
    }
)  # fmt: skip
# Operations along an axis: row by row where that is the last one.
ALONG_LAST = frozenset({"concat", "reduce_max", "reduce_mean", "reduce_min", "reduce_sum", "softmax", "split"})
SLICE = "slice_by_index"


@dataclass(eq=False)
class Product:
    """A matrix product with a repeated operand.

    Attributes:
        step: the operation.
        rows: the other operand, and whether the product transposes it.
        repetition: of the repeated operand.
        transpose: whether the product transposes that, so that it stands on the right.
        left: whether it stands on the left: the result is then the transpose of what a product with it on the right gives.
    """

    step: Step
    rows: Datum
    transpose_rows: bool
    repetition: Repetition
    transpose: bool
    left: bool

    @property
    def result(self) -> Datum:
        return self.step.outputs[0]


@dataclass(eq=False)
class Attention:
    """Products of queries and keys, what is done to the scores, and products with values; in the order of the program."""

    scores: list[Product] = field(default_factory=list)
    between: list[Step] = field(default_factory=list)
    values: list[Product] = field(default_factory=list)

    @property
    def products(self) -> list[Product]:
        return [*self.scores, *self.values]

    def members(self) -> Iterator[Step]:
        yield from self.between
        yield from (product.step for product in self.products)


@dataclass(frozen=True)
class Layout:
    """How scores `[*lead, S, T]` become `[*folded lead, G·S, T]`, by a reshape alone.

    Attributes:
        lead: of the scores.
        rows: S.
        groups: G.
        kept: leading axes that stay.
        tail: what the others become.
    """

    lead: tuple[int, ...]
    rows: int
    groups: int
    kept: int
    tail: tuple[int, ...]

    @classmethod
    def of(cls, product: Product) -> Layout:
        """The layout that a product's rows demand.

        Raises:
            Refusal: they do not have as many heads as the repeated operand.
        """
        groups = product.repetition.groups
        shape, repeated = shape_of(product.rows), shape_of(product.repetition.datum)
        if product.transpose_rows:
            shape = (*shape[:-2], shape[-1], shape[-2])
        split = fold_lead(repeated[:-2], groups)
        if len(shape) != len(repeated) or split is None or shape[split[0] : -2] != repeated[split[0] : -2]:
            raise Refusal(f"{product.rows.name} does not have the heads of the repeated operand of {product.step.name}")
        lead = (*(max(a, b) for a, b in zip(shape[: split[0]], repeated, strict=False)), *shape[split[0] : -2])
        return cls(lead, shape[-2], groups, *split)

    def folded(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The folded shape of a value with all heads and all rows."""
        return (*shape[: self.kept], *self.tail, self.groups * shape[-2], shape[-1])

    def is_full(self, datum: Datum) -> bool:
        return is_static(datum) and shape_of(datum)[:-1] == (*self.lead, self.rows)


def product_with(step: Step, datum: Datum, repetition: Repetition) -> Product:
    """The product `step` whose operand `datum` is repeated. Raises `Refusal` if both operands are that one."""
    x, y = step.one("x"), step.one("y")
    flags = [_flag(step, name) for name in ("transpose_x", "transpose_y")]
    if x is None or y is None or x is y:
        raise Refusal(f"{step.name} multiplies the value with itself")
    if y is datum:
        return Product(step, x, flags[0], repetition, flags[1], left=False)
    # X·Y is the transpose of Yᵀ·Xᵀ.
    return Product(step, y, not flags[1], repetition, not flags[0], left=True)


def between(values: Product, scores: dict[Step, Product]) -> Attention:
    """What stands between a product with values and the products of queries and keys that it goes back to.

    Raises:
        Refusal: an operation on the way is not known to work row by row.
    """
    found = Attention(values=[values])
    layout = Layout.of(values)
    visited: set[Step] = set()
    known: dict[Datum, frozenset[Step]] = {}

    def visit(datum: Datum) -> None:
        step = datum.step
        if step is None or step in visited:
            return
        if not layout.is_full(datum):
            raise Refusal(f"{datum.name} has other rows than the scores")
        visited.add(step)
        if step in scores:
            found.scores.append(scores[step])
            return
        _check_row_wise(step, layout)
        found.between.append(step)
        for _, operand in step.given():
            if scores_behind(operand, scores, known):
                visit(operand)

    visit(values.rows)
    return found


def scores_behind(
    datum: Datum, scores: Container[Step], known: dict[Datum, frozenset[Step]] | None = None
) -> frozenset[Step]:
    """Those of these products that a value goes back to through operations that may work row by row, and keep heads and rows.

    `known` are results so far; they are added to.
    """
    known = {} if known is None else known
    if datum not in known:
        step = datum.step
        if step is None or step.depth or not is_static(datum):
            known[datum] = frozenset()
        elif step in scores:
            known[datum] = frozenset({step})
        else:
            row_wise = step.type in ELEMENTWISE or step.type in ALONG_LAST or step.type == SLICE
            alike = [
                operand
                for _, operand in step.given()
                if row_wise and is_static(operand) and shape_of(operand)[:-1] == shape_of(datum)[:-1]
            ]
            known[datum] = frozenset().union(*(scores_behind(operand, scores, known) for operand in alike))
    return known[datum]


def _check_row_wise(step: Step, layout: Layout) -> None:
    where = f"{step.name} ({step.type})"
    if any(operand.constant is None and not is_static(operand) for _, operand in step.given()):
        raise Refusal(f"an operand of {where} has an open dimension")
    rank = len(layout.lead) + 2
    if step.type == SLICE or step.type in ("concat", "split"):
        if len(layout.folded((*layout.lead, 1, 1))) != rank:
            raise Refusal(f"{where} cuts or joins scores of rank {rank}")
        interleave = step.one("interleave")
        if interleave is not None and (interleave.constant is None or bool(interleave.constant.array())):
            raise Refusal(f"{where} interleaves")
    if step.type == SLICE:
        _check_slice(step, where)
    elif step.type in ALONG_LAST:
        axis = step.one("axes") or step.one("axis")
        last = axis is not None and axis.numbers is not None and [n % rank for n in axis.numbers] == [rank - 1]
        if not last:
            raise Refusal(f"{where} does not work along the last axis")
    if step.type.startswith("reduce_") and not _flag(step, "keep_dims"):
        raise Refusal(f"{where} drops an axis")


def _check_slice(step: Step, where: str) -> None:
    """A slice is row-wise if it takes all but the last axis whole, and says so."""
    for name in ("begin", "end"):
        datum = step.one(name)
        if datum is None or datum.numbers is None:
            raise Refusal(f"{where} is not of fixed size")
    data, stride = step.one("x"), step.one("stride")
    forwards = stride is None or (stride.numbers is not None and set(stride.numbers[:-1]) <= {1})
    if data is None or shape_of(data)[:-1] != shape_of(step.outputs[0])[:-1] or not forwards:
        raise Refusal(f"{where} does not keep all rows in their order")


def _flags(step: Step, name: str) -> list[bool]:
    datum = step.one(name)
    if datum is None or datum.constant is None:
        return []
    return [bool(flag) for flag in datum.constant.array().reshape(-1)]


def _flag(step: Step, name: str) -> bool:
    return any(_flags(step, name))
