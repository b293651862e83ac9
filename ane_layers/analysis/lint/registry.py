"""The rules by id, and their run over a function."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from ane_layers.analysis.lint.finding import SEVERITIES, Case, Confidence, Finding, Rule, Severity
from ane_layers.analysis.lint.graph import Graph
from ane_layers.program import Function, Package

Check: TypeAlias = Callable[[Graph], Iterable[Case]]

_NAMED = 5
_SHOWN = 3

_rules: dict[str, Rule] = {}
_checks: dict[str, Check] = {}


def rule(
    *,
    id: str,
    title: str,
    severity: Severity,
    confidence: Confidence,
    chips: str,
    source: str,
    reason: str,
    remedy: str,
) -> Callable[[Check], Check]:
    """Registers a function that gives the cases of a rule.

    Raises:
        ValueError: the id is taken.
    """
    if id in _rules:
        raise ValueError(f"lint: two rules have the id {id!r}")

    def register(check: Check) -> Check:
        _rules[id] = Rule(
            id=id,
            title=title,
            severity=severity,
            confidence=confidence,
            chips=chips,
            source=source,
            reason=reason,
            remedy=remedy,
        )
        _checks[id] = check
        return check

    return register


def rules() -> Mapping[str, Rule]:
    """Every rule by id, grouped by subject."""
    return MappingProxyType(_rules)


def rules_by_subject() -> Mapping[str, tuple[Rule, ...]]:
    """The same rules, by the file that they stand in: `shapes`, `states` and so on."""
    subjects: dict[str, list[Rule]] = {}
    for id, check in _checks.items():
        subjects.setdefault(check.__module__.rpartition(".")[2], []).append(_rules[id])
    return {subject: tuple(members) for subject, members in subjects.items()}


def lint(package: Package, function: Function, *, suppress: Collection[str] = ()) -> list[Finding]:
    """Holds one function of a package against every rule.

    Args:
        package: the package the function is of: for its metadata and weight files.
        function: one of its functions.
        suppress: ids of rules to leave out. Their findings are still in the result, marked as suppressed.

    Returns:
        At most one finding a rule: unexplained ones first, severe ones before others, else in the order of `rules()`.

    Raises:
        ValueError: an id in `suppress` is none of a rule.
    """
    unknown = [id for id in suppress if id not in _rules]
    if unknown:
        raise ValueError(f"suppress: no rule {unknown[0]!r}; the rules are {', '.join(_rules)}")
    graph = Graph(package, function)
    findings = []
    for id, check in _checks.items():
        cases = list(check(graph))
        if cases:
            findings.append(_finding(_rules[id], function, cases, id in suppress))
    findings.sort(key=lambda f: (f.suppressed, f.expected is not None, -SEVERITIES.index(f.severity)))
    return findings


def fails(findings: Iterable[Finding], level: Severity) -> bool:
    """Whether any finding is at least as severe as `level`; expected and suppressed ones do not count.

    Raises:
        ValueError: an unknown level.
    """
    if level not in SEVERITIES:
        raise ValueError(f"level must be one of {', '.join(SEVERITIES)}, got {level!r}")
    severe = SEVERITIES[SEVERITIES.index(level) :]
    return any(f.severity in severe and f.expected is None and not f.suppressed for f in findings)


def _finding(rule: Rule, function: Function, cases: list[Case], suppressed: bool) -> Finding:
    explained = [case for case in cases if case.expected is not None]
    told = [case for case in cases if case.expected is None] or explained
    reasons = "; ".join(dict.fromkeys(case.expected for case in explained if case.expected is not None))
    told.sort(key=lambda case: -case.size)  # the order of the file among equals
    message = f"{function.name}: {rule.title} ({len(told)}): " + "; ".join(case.text for case in told[:_SHOWN])
    if len(told) > _SHOWN:
        message += f"; {len(told) - _SHOWN} more"
    if told is not explained and explained:
        message += f". Not counted because expected: {len(explained)} ({reasons})"
    return Finding(
        rule=rule.id,
        severity=rule.severity,
        confidence=rule.confidence,
        chips=rule.chips,
        message=message,
        source=rule.source,
        operations=tuple(dict.fromkeys(case.name for case in told))[:_NAMED],
        count=len(told),
        expected=reasons if told is explained else None,
        suppressed=suppressed,
    )
