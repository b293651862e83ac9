"""Bits for each module, so that the predicted harm is least within a budget of bytes."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ane_layers.compression.ranking import Ranking
from ane_layers.compression.recipe import Allocation
from ane_layers.compression.setting import Setting
from ane_layers.compression.units import Unit


@dataclass(frozen=True)
class Choice:
    """One way to store a module: its bytes, tables included, and the harm it does alone."""

    setting: Setting
    stored_bytes: int
    harm: float


def allocate(found: Sequence[Unit], allocation: Allocation, ranking: Ranking) -> dict[str, Setting]:
    """A setting for each module, by its name.

    The budget is `bits_per_weight` times the elements of all modules. The harms of single modules are added up, which holds as long as
    each is small.

    Args:
        found: the modules.
        allocation: budget and candidates.
        ranking: with the harm of every module at the candidates.

    Raises:
        ValueError: if the ranking lacks a module or its settings, or the budget is below the smallest settings.
    """
    harms = {module.name: module.harm for module in ranking.modules}
    choices: dict[str, list[Choice]] = {}
    for unit in found:
        if unit.name not in harms:
            raise ValueError(f"[allocation] the ranking has no module {unit.name}; rank the model as it is converted")
        known = [setting for setting in allocation.candidates if setting.key in harms[unit.name]]
        if len({setting.bits for setting in known}) < len(allocation.bits):
            missing = sorted(set(allocation.bits) - {setting.bits for setting in known})
            raise ValueError(
                f"[allocation] the ranking has no harm of {unit.name} at {missing[0]} bits; "
                f"run `ane-layers sensitivity` with --bits {','.join(map(str, allocation.bits))}"
            )
        choices[unit.name] = [
            Choice(setting, stored_bytes(unit, setting), harms[unit.name][setting.key]) for setting in known
        ]
    budget = int(allocation.bits_per_weight * sum(unit.elements for unit in found) / 8)
    return {name: choice.setting for name, choice in least_harm(choices, budget).items()}


def harm_of(ranking: Ranking, name: str, setting: Setting) -> float:
    """Harm of a module at a setting, as the ranking has it."""
    return next(module.harm[setting.key] for module in ranking.modules if module.name == name)


def stored_bytes(unit: Unit, setting: Setting) -> int:
    """Bytes of a module at a setting, tables included."""
    total = 0
    for path, weight in unit.weights.items():
        shape = tuple(weight.shape)
        total += sum(setting.fitted(path, shape).stored_bytes(shape))
    return total


def least_harm(choices: Mapping[str, Sequence[Choice]], budget: int) -> dict[str, Choice]:
    """One choice for each module with the least sum of harms whose bytes fit the budget.

    Steps are taken in the order of harm saved per byte along each module's convex hull, which is optimal up to the last step that does
    not fit; after it, smaller steps fill what is left.

    Raises:
        ValueError: if even the smallest choices do not fit.
    """
    hulls = {name: _hull(options) for name, options in choices.items()}
    chosen = dict.fromkeys(hulls, 0)
    left = budget - sum(hull[0].stored_bytes for hull in hulls.values())
    if left < 0:
        raise ValueError(f"the smallest settings take {budget - left} bytes, more than the budget of {budget}")
    steps = [(-_gain(hull, 0), name) for name, hull in hulls.items() if len(hull) > 1]
    heapq.heapify(steps)
    while steps:
        _, name = heapq.heappop(steps)
        hull, at = hulls[name], chosen[name]
        cost = hull[at + 1].stored_bytes - hull[at].stored_bytes
        if cost > left:
            continue  # a cheaper step of another module may still fit
        left -= cost
        chosen[name] = at + 1
        if at + 2 < len(hull):
            heapq.heappush(steps, (-_gain(hull, at + 1), name))
    best = {name: hulls[name][at] for name, at in chosen.items()}
    return _filled(best, choices, left)


def _filled(best: dict[str, Choice], choices: Mapping[str, Sequence[Choice]], left: int) -> dict[str, Choice]:
    """Uses what is left for any single exchange that lowers the harm, the best one first."""
    while True:
        exchanges = [
            (best[name].harm - option.harm, name, option)
            for name, options in choices.items()
            for option in options
            if option.harm < best[name].harm and option.stored_bytes - best[name].stored_bytes <= left
        ]
        if not exchanges:
            return best
        _, name, option = max(exchanges, key=lambda exchange: exchange[0])
        left -= option.stored_bytes - best[name].stored_bytes
        best[name] = option


def _hull(options: Sequence[Choice]) -> list[Choice]:
    """The lower convex hull of bytes and harm: from the smallest choice on, each step saves less per byte than the one before."""
    hull: list[Choice] = []
    for option in sorted(options, key=lambda choice: (choice.stored_bytes, choice.harm)):
        if hull and option.harm >= hull[-1].harm:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _slope(first: Choice, second: Choice) -> float:
    return (first.harm - second.harm) / (second.stored_bytes - first.stored_bytes)


def _gain(hull: Sequence[Choice], at: int) -> float:
    return _slope(hull[at], hull[at + 1])
