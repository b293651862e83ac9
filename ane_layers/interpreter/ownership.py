"""Decides when a state may be changed in place, and when a written value may become the state without a copy.

In the file an update is `read_state`, `slice_update`, `write_state`, and every value keeps what it held when it was
made. Copying the whole cache for each would cost far more than the attention itself. So each value is given a root: the
memory it may share. A slice_update of a state's own tensor happens in place if nothing that shares the tensor's root is
used later, and the state's next use is to be written with the result.

Nested blocks run any number of times: in them every value is a copy. A state that one of them writes holds something
unknown from then on, and is not changed in place before a value of its own is handed over to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ane_layers.interpreter.registry import Implementation
from ane_layers.program import Function, Operation, Reference

_NEVER = 1 << 62


@dataclass(frozen=True)
class Ownership:
    """What was decided, by number of operation; `kept` are the outputs of the function that share memory with a state,
    a constant, an input or each other, and are copied before a caller gets them."""

    in_place: Mapping[int, str]
    handed_over: frozenset[int]
    kept: frozenset[str]


def decide(function: Function, operations: Sequence[Operation], table: Mapping[str, Implementation]) -> Ownership:
    """Looks through the operations that run (constants left out) in order."""
    return _Decision(function, operations, table).decide()


class _Decision:
    def __init__(
        self, function: Function, operations: Sequence[Operation], table: Mapping[str, Implementation]
    ) -> None:
        self._function = function
        self._operations = operations
        self._table = table
        self._states = {state.name for state in function.states}
        self._last_use = {name: _NEVER for name in function.block.outputs}
        for index, operation in enumerate(operations):
            for name in names(operation):
                self._last_use[name] = max(self._last_use.get(name, -1), index)
        self._roots: dict[str, frozenset[str]] = {}
        self._own: set[str] = set()
        # The root of the tensor that each state holds now, and the values that are this very tensor.
        self._held = {state: f"state {state}" for state in self._states}
        self._whole: dict[str, str] = {}
        self._unknown: set[str] = set()

    def decide(self) -> Ownership:
        in_place: dict[int, str] = {}
        handed_over: set[int] = set()
        for index, operation in enumerate(self._operations):
            if operation.type == "read_state":
                self._name_whole(operation.outputs[0].name, _name(operation, "input"))
            elif operation.type == "write_state":
                if self._write(_name(operation, "input"), _name(operation, "data"), index):
                    handed_over.add(index)
            elif operation.type == "slice_update" and (state := self._updated_state(index)) is not None:
                in_place[index] = state
                self._name_whole(operation.outputs[0].name, state)
            else:
                self._share(operation, index)
        return Ownership(in_place, frozenset(handed_over), self._kept())

    def _name_whole(self, value: str, state: str) -> None:
        self._whole[value] = state
        self._roots[value] = frozenset({self._held[state]})

    def _share(self, operation: Operation, index: int) -> None:
        implementation = self._table[operation.type]
        used = names(operation)
        shared = frozenset().union(*(self._root(name) for name in used))
        # Only a nested block names a state here: its results may be what the state holds before or after.
        shared |= {self._held[state] for state in self._states.intersection(used)}
        for state in _written_states(operation):
            self._held[state] = f"nested {index}"
            self._unknown.add(state)
            shared |= {self._held[state]}
        for value in operation.outputs:
            self._roots[value.name] = shared if implementation.view else frozenset({value.name})
            if not implementation.view:
                self._own.add(value.name)

    def _root(self, name: str) -> frozenset[str]:
        # Inputs and constants have no root yet: each is its own, and not the program's to give away.
        return self._roots.get(name, frozenset({name}))

    def _is_held(self, value: str, state: str) -> bool:
        return self._whole.get(value) == state and self._root(value) == {self._held[state]}

    def _write(self, state: str, data: str, index: int) -> bool:
        """Notes what the state holds from now on; True if the value itself becomes the state."""
        if self._is_held(data, state):
            return False
        give = data in self._own and data not in self._held.values()
        if give:
            self._unknown.discard(state)
        self._held[state] = data if give else f"copy {index}"
        return give

    def _updated_state(self, index: int) -> str | None:
        operation = self._operations[index]
        x, update = _name(operation, "x"), _name(operation, "update")
        state = self._whole.get(x)
        if state is None or state in self._unknown:
            return None
        if not self._is_held(x, state) or self._held[state] in self._root(update):
            return None
        root = self._held[state]
        if any(root in roots and self._last_use.get(name, -1) > index for name, roots in self._roots.items()):
            return None
        return state if self._is_written_next(state, operation.outputs[0].name, index) else None

    def _is_written_next(self, state: str, result: str, index: int) -> bool:
        for operation in self._operations[index + 1 :]:
            if state not in names(operation):
                # Several updates may follow each other before the last result is written.
                if operation.type == "slice_update" and _name(operation, "x") == result:
                    result = operation.outputs[0].name
                continue
            return operation.type == "write_state" and _name(operation, "data") == result
        return False

    def _kept(self) -> frozenset[str]:
        taken = set(self._held.values())
        kept = set()
        for name in self._function.block.outputs:
            if name not in self._own or name in taken:
                kept.add(name)
            taken.add(name)
        return frozenset(kept)


def names(operation: Operation) -> list[str]:
    """Names of all values that an operation uses, those in its nested blocks included."""
    used = [
        argument.name
        for arguments in operation.inputs.values()
        for argument in arguments
        if isinstance(argument, Reference)
    ]
    for block in operation.blocks:
        used.extend(block.outputs)
        for inner in block.operations:
            used.extend(names(inner))
    return used


def _written_states(operation: Operation) -> list[str]:
    """The states that an operation's nested blocks may write."""
    return [
        _name(inner, "input") for block in operation.blocks for inner in block.walk() if inner.type == "write_state"
    ]


def _name(operation: Operation, parameter: str) -> str:
    arguments = operation.inputs.get(parameter, ())
    return arguments[0].name if arguments and isinstance(arguments[0], Reference) else ""
