"""Decides, for every repetition in a function, whether it is folded away or left alone, and why."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial

from ane_layers.analysis.counts import is_compute
from ane_layers.analysis.flow import Datum, Flow, Step
from ane_layers.analysis.movement import repeats
from ane_layers.program import Function
from ane_layers.rewrite.draft import NewOperation
from ane_layers.rewrite.folding import Folder, nested_outputs
from ane_layers.rewrite.moves import passes
from ane_layers.rewrite.patterns import FUSED, Attention, Layout, Product, between, product_with, scores_behind
from ane_layers.rewrite.repetition import Arrangement, Refusal, Repetition, prove
from ane_layers.rewrite.report import Folded, Refused, Repeated


@dataclass(frozen=True, eq=False)
class Plan:
    """What is to be done to one function.

    Attributes:
        operations: to insert.
        removed: steps to remove.
        folded: what that amounts to.
        refused: repetitions that stay.
    """

    operations: tuple[NewOperation, ...]
    removed: frozenset[Step]
    folded: tuple[Folded, ...]
    refused: tuple[Refused, ...]


def plan(function: Function) -> Plan:
    """The folding of all attention in a function that reads repeated keys and values."""
    return _Planner(Flow(function)).plan()


def repeated(function: Function) -> Repeated:
    """The repetitions of a function in figures."""
    steps = Flow(function).steps
    repetitions = [step for step in steps if repeats(step)]
    tiles = [step for step in repetitions if step.type == "tile"]
    return Repeated(
        tiles=sum(step.type == "tile" for step in steps),
        tile_bytes=sum(step.outputs[0].bytes or 0 for step in tiles),
        repetitions=len(repetitions),
        repetition_bytes=sum(step.outputs[0].bytes or 0 for step in repetitions),
        operations=sum(is_compute(operation.type) for operation in function.block.walk()),
    )


class _Planner:
    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._folder = Folder(flow)
        self._needed = {datum.name for datum in flow.outputs} | nested_outputs(flow)
        self._cache: dict[Hashable, Arrangement | Refusal] = {}
        self._reasons: dict[Step, str] = {}
        self._folded: list[Folded] = []
        self._gone: set[Step] = set()

    def plan(self) -> Plan:
        repeating = [step for step in self._flow.steps if repeats(step)]
        products: dict[Step, Product] = {}
        fused: dict[Step, dict[str, Repetition]] = {}
        for step in repeating:
            try:
                for use, parameter, datum in self._uses(step):
                    self._read(use, parameter, datum, products, fused)
            except Refusal as refusal:
                self._reasons[step] = str(refusal)
        self._fold_pairs(products)
        for step, repetitions in fused.items():
            self._attempt(partial(self._fold_fused, step, repetitions), list(repetitions.values()))
        draft = self._folder.draft
        # Of a repetition, what nothing uses any longer.
        for step in reversed(self._flow.steps):
            used = any(user not in draft.removed for output in step.outputs for user in output.users)
            if step in self._gone and not used and not any(output.name in self._needed for output in step.outputs):
                draft.removed.add(step)
        left = [step for step in repeating if step not in draft.removed]
        return Plan(
            tuple(draft.operations), frozenset(draft.removed), tuple(self._folded), tuple(map(self._refused, left))
        )

    def _uses(self, step: Step) -> Iterator[tuple[Step, str, Datum]]:
        """What becomes of a repeated value: the operations that do more with it than move it.

        Raises:
            Refusal: something else than a product needs it.
        """
        if step.depth:
            raise Refusal("it is in a nested block")
        seen = list(step.outputs)
        for datum in seen:
            if datum.name in self._needed:
                raise Refusal(f"{datum.name} is an output as well")
            for user in dict.fromkeys(datum.users):
                if user.depth:
                    raise Refusal(f"{datum.name} is used in a nested block as well")
                if passes(user):
                    seen += [output for output in user.outputs if output not in seen]
                    continue
                for parameter, given in user.given():
                    if given is datum:
                        if user.type != "matmul" and (user.type, parameter) not in ((FUSED, "key"), (FUSED, "value")):
                            raise Refusal(f"it goes into {user.name} ({user.type}), which is no product of attention")
                        yield user, parameter, datum

    def _read(
        self,
        use: Step,
        parameter: str,
        datum: Datum,
        products: dict[Step, Product],
        fused: dict[Step, dict[str, Repetition]],
    ) -> None:
        repetition = prove(datum, self._cache)
        if repetition is None:
            raise Refusal(f"how it comes to {use.name} is not understood")
        if use.type == FUSED:
            fused.setdefault(use, {})[parameter] = repetition
            return
        products[use] = product_with(use, datum, repetition)

    def _fold_pairs(self, products: dict[Step, Product]) -> None:
        """A product that is fed with scores multiplies values; any other gives scores. In the program's order, so that the next layer's
        queries are not taken for scores because they come straight from the values of this one."""
        scores: dict[Step, Product] = {}
        found: list[Attention] = []
        for step in [step for step in self._flow.steps if step in products]:
            product = products[step]
            behind = scores_behind(product.rows, scores)
            if not behind:
                scores[step] = product
                continue
            try:
                found.append(between(product, scores))
            except Refusal as refusal:
                involved = [product, *(scores[other] for other in behind)]
                self._refuse([each.repetition for each in involved], str(refusal))
        used = {product.step for attention in found for product in attention.scores}
        for step, product in scores.items():
            if step not in used:
                self._refuse([product.repetition], f"no other product of the same attention is found for {step.name}")
        for attention in _joined(found):
            self._attempt(partial(self._fold, attention), [product.repetition for product in attention.products])

    def _attempt(self, fold: Callable[[], None], repetitions: list[Repetition]) -> None:
        try:
            for repetition in repetitions:
                if reason := next((self._reasons[step] for step in repetition.steps if step in self._reasons), None):
                    raise Refusal(reason)
            fold()
        except Refusal as refusal:
            self._refuse(repetitions, str(refusal))
        else:
            self._gone.update(step for repetition in repetitions for step in repetition.steps)

    def _refuse(self, repetitions: list[Repetition], reason: str) -> None:
        for repetition in repetitions:
            for step in repetition.steps:
                self._reasons.setdefault(step, reason)

    def _fold(self, attention: Attention) -> None:
        layout = Layout.of(attention.products[0])
        self._folder.check(attention, layout)
        self._folder.fold(attention, layout)
        self._note([p.step for p in attention.scores], [p.step for p in attention.values], layout,
                   [p.repetition for p in attention.products])  # fmt: skip

    def _fold_fused(self, step: Step, repetitions: dict[str, Repetition]) -> None:
        key, value, query = repetitions.get("key"), repetitions.get("value"), step.one("query")
        if key is None or value is None or query is None:
            raise Refusal(f"only one of key and value of {step.name} is repeated")
        layouts = [Layout.of(Product(step, query, False, each, True, left=False)) for each in (key, value)]
        if layouts[0] != layouts[1]:
            raise Refusal(f"keys and values of {step.name} are repeated {key.groups} and {value.groups} times")
        mask = step.one("attn_mask")
        if mask is not None:
            self._folder.check_aligned(mask, layouts[0])
        self._folder.fold_fused(step, key, value, layouts[0])
        self._note([step], [step], layouts[0], [key, value])

    def _note(self, scores: list[Step], values: list[Step], layout: Layout, repetitions: list[Repetition]) -> None:
        gone = dict.fromkeys(step.name for repetition in repetitions for step in repetition.steps if repeats(step))
        self._folded.append(
            Folded(
                tuple(step.name for step in scores),
                tuple(step.name for step in values),
                layout.groups,
                layout.rows,
                tuple(gone),
            )
        )

    def _refused(self, step: Step) -> Refused:
        reason = self._reasons.get(step, "nothing else is known of it")
        return Refused(step.name, step.type, step.outputs[0].bytes, reason)


def _joined(found: list[Attention]) -> list[Attention]:
    """Attentions that share operations as one: two products with values may read parts of the same weights."""
    joined: list[Attention] = []
    for attention in found:
        members = set(attention.members())
        for other in [other for other in joined if members & set(other.members())]:
            joined.remove(other)
            attention = Attention(
                list(dict.fromkeys([*other.scores, *attention.scores])),
                list(dict.fromkeys([*other.between, *attention.between])),
                list(dict.fromkeys([*other.values, *attention.values])),
            )
            members = set(attention.members())
        joined.append(attention)
    return joined
