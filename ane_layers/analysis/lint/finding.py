"""Records of the lint: a rule, a place where it applies, and what is told about a function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

Severity: TypeAlias = Literal["error", "warning", "info"]
Confidence: TypeAlias = Literal["high", "medium", "low", "disputed"]

SEVERITIES: tuple[Severity, ...] = ("info", "warning", "error")
"""In rising order."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A claim of others about the Neural Engine or the tool chain that a saved file can be held against.

    Attributes:
        id: in kebab-case.
        title: what is found, as a noun phrase.
        severity: `error`: reported to fail or to give wrong results; `warning`: reported to leave the engine, to cost much or to lose
            precision; `info`: disputed, or nothing in the graph needs to change.
        confidence: in the claim, not in that the file shows it.
        chips: for which it was reported.
        source: who says so.
        reason: why it matters.
        remedy: what to do.
    """

    id: str
    title: str
    severity: Severity
    confidence: Confidence
    chips: str
    source: str
    reason: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Case:
    """One place where a rule applies.

    Attributes:
        name: of the operation, input, state or constant.
        text: the same with its type, shape or bytes.
        size: what the worst cases are chosen by.
        expected: why it cannot be otherwise in this function, from facts in the file; None if nothing explains it.
    """

    name: str
    text: str
    size: int = 0
    expected: str | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rule says about one function.

    Attributes:
        rule: the rule's id; `severity`, `confidence`, `chips` and `source` are the rule's.
        message: names the function, the worst cases and their shapes or bytes.
        operations: names of the worst cases, at most five.
        count: number of all cases.
        expected: why all of them must be as they are. None if any is unexplained; `count` and `operations` are then of the unexplained.
        suppressed: the caller asked to leave the rule out.
    """

    rule: str
    severity: Severity
    confidence: Confidence
    chips: str
    message: str
    source: str
    operations: tuple[str, ...]
    count: int
    expected: str | None = None
    suppressed: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The finding ready to be written as JSON."""
        return {
            "rule": self.rule,
            "severity": self.severity,
            "confidence": self.confidence,
            "chips": self.chips,
            "message": self.message,
            "source": self.source,
            "operations": list(self.operations),
            "count": self.count,
            "expected": self.expected,
            "suppressed": self.suppressed,
        }
