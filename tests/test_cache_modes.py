"""Packages for every way of writing the cache, executed over whole contexts and compared with `transformers`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ane_layers.analysis import inspect
from ane_layers.analysis.traffic import traffic
from ane_layers.generation import PromptLookup, Session, generate
from ane_layers.models import Exaone4
from ane_layers.program import Package
from ane_layers.sampling import Sampler
from ane_layers.verification import compare_logits

Folder = Callable[..., Path]
Reference = Callable[[Path], Any]

CONTEXT, BUCKET, BLOCKS, VERIFY = 96, 40, (8, 4), 5
KV = ["in_place", "deferred", "read_only"]
PATTERN = ["sliding_attention"] * 3 + ["full_attention"]
KINDS: dict[str, dict[str, Any]] = {
    "full": {"layers": 2},
    # Windows below and above the prefill block; 32 slots that wrap twice.
    "window 5": {"layers": 5, "sliding_window": 5, "sliding_window_pattern": 4, "layer_types": (PATTERN * 2)[:5]},
    "window 20": {"layers": 4, "sliding_window": 20, "sliding_window_pattern": 4, "layer_types": PATTERN},
}


@pytest.fixture(scope="module")
def folders(exaone4_folder: Folder) -> dict[str, Path]:
    return {name: exaone4_folder(dtype=torch.bfloat16, **options) for name, options in KINDS.items()}


@pytest.fixture(scope="module")
def packages(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Package]:
    made: dict[tuple[str, ...], Package] = {}

    def package(kind: str, kv: str, head: str = "logits") -> Package:
        if (kind, kv, head) not in made:
            model = Exaone4.from_pretrained(
                folders[kind], context_length=CONTEXT, dtype=None, kv=kv, block_size=8, head_pieces=3
            )
            path = tmp_path_factory.mktemp("modes") / "m.mlpackage"
            several: dict[str, Any] = {"prefill": BLOCKS, "contexts": [BUCKET], "verify": VERIFY}
            # Seven functions to run and to count; for what a head gives, two do.
            made[kind, kv, head] = model.convert(
                path, head=head, top_k=5, **(several if head == "logits" else {"prefill": BLOCKS[0]})
            )
        return made[kind, kv, head]

    return package


def token_ids(count: int, seed: int = 1) -> list[int]:
    return torch.randint(109, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["fp32", "fp16"])
def test_every_position_to_the_last_slot_matches_transformers(
    packages: Callable[..., Package],
    folders: dict[str, Path],
    exaone4_reference: Reference,
    kind: str,
    kv: str,
    mode: str,
) -> None:
    ids = token_ids(CONTEXT)
    with torch.no_grad():
        reference = exaone4_reference(folders[kind])(torch.tensor([ids])).logits[0]
    session = Session(packages(kind, kv).path, mode=mode)
    results = session.extend(ids[:13])  # a block of 8, one of 4, a single token
    results += session.extend(ids[13:20], prefill=False)
    results += session.extend(ids[20:27])  # prefill after decode: a block, a padded one, a single token
    results += session.extend(ids[27:60])
    results += session.extend(ids[60:])
    assert session.position == CONTEXT
    rows = {result.first + i: row for result in results for i, row in enumerate(result.values)}
    assert {0, 26, 59, CONTEXT - 1} <= {0, *rows}
    positions = sorted(rows)
    assert len(positions) > 15
    actual = torch.from_numpy(np.stack([rows[position] for position in positions]).astype(np.float32))
    assert not actual.isnan().any()
    compared = compare_logits(reference[positions], actual, mode=mode)
    assert compared.snr_db >= (60 if mode == "fp32" else 42)
    # Past the end the session refuses, and keeps what it has.
    with pytest.raises(ValueError, match=f"1 tokens at position {CONTEXT} exceed the context of {CONTEXT} slots"):
        session.extend([1])
    assert session.position == CONTEXT


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("kind", ["full", "window 5"])
def test_token_by_token_equals_blocks(packages: Callable[..., Package], kind: str, kv: str) -> None:
    """Anemll 17 and 18: a prompt that blocks do not divide."""
    ids = token_ids(29, seed=2)
    single, blocks = Session(packages(kind, kv).path), Session(packages(kind, kv).path)
    expected = single.extend(ids, prefill=False)[-1].values[-1]
    np.testing.assert_allclose(blocks.extend(ids)[-1].values[-1], expected, atol=2e-3)


@pytest.mark.parametrize("kv", KV)
def test_a_bucket_reads_fewer_slots_of_the_same_cache(
    packages: Callable[..., Package], kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = packages("full", kv)
    session = Session(package.path)
    called: list[str] = []
    inner = session._call
    monkeypatch.setattr(
        session, "_call", lambda plan, *args, **named: called.append(plan.name) or inner(plan, *args, **named)
    )
    session.extend(token_ids(BUCKET - 1))
    session.extend([1])  # the bucket's last slot
    session.extend([2])
    assert called == ["prefill_8_40"] * 4 + ["prefill_4_40"] * 2 + ["decode_40"] * 2 + ["decode"]
    whole, bucket = (traffic(package.function(name)) for name in ("decode", f"decode_{BUCKET}"))
    assert whole.kv_read * BUCKET == bucket.kv_read * CONTEXT
    assert whole.kv_written == bucket.kv_written


@pytest.mark.parametrize("kind", KINDS)
def test_counts_of_every_mode(packages: Callable[..., Package], kind: str) -> None:
    layers = KINDS[kind]["layers"]
    states = 2 if kind == "full" else 4
    totals = {}
    for kv in KV:
        for name, function in inspect(packages(kind, kv))["functions"].items():
            assert (function["tile"]["count"], function["highest_rank"]) == (0, 4)
            assert function["state_writes"] == {"in_place": 2 * layers, "deferred": states, "read_only": 0}[kv], name
        totals[kv] = traffic(packages(kind, kv).function("decode"))
    # Nothing more is moved for fewer writes.
    assert totals["deferred"].total <= totals["in_place"].total
    assert totals["read_only"].total <= totals["in_place"].total
    rows = 2 * layers * 2 * 16 * 2
    assert [total.kv_written for total in totals.values()] == [rows] * 3


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("kind", ["full", "window 5"])
@pytest.mark.parametrize("head", ["argmax", "top_k"])
def test_head_options_match_logits(packages: Callable[..., Package], kind: str, kv: str, head: str) -> None:
    prompt = token_ids(11, seed=3)
    plain = Session(packages(kind, kv).path)
    other = Session(packages(kind, kv, head).path)
    logits, found = plain.extend(prompt)[-1].values[-1], other.extend(prompt)[-1]
    order = np.argsort(-logits.astype(np.float64), kind="stable")
    if head == "argmax":
        assert found.tokens is not None
        assert found.tokens.shape == (1, 1)
        assert found.tokens[0, 0] == order[0]
        with pytest.raises(ValueError, match="gives tokens, not logits: temperature must be 0, got 1"):
            generate(other, [1], max_new_tokens=1, sampler=Sampler(temperature=1))
    else:
        assert found.tokens is not None
        assert found.tokens[0].tolist() == order[:5].tolist()
        np.testing.assert_allclose(found.values[0], logits[order[:5]], atol=1e-5)
    plain.reset()
    other.reset()
    assert list(generate(other, prompt, max_new_tokens=20)) == list(generate(plain, prompt, max_new_tokens=20))


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("kind", KINDS)
def test_guessed_tokens_change_nothing(packages: Callable[..., Package], kind: str, kv: str) -> None:
    """To the last slot; with guesses that are mostly wrong, and with all of them right."""
    path = packages(kind, kv).path
    prompt = (token_ids(6) * 4)[:20]
    plain = list(generate(Session(path), prompt, max_new_tokens=200))
    assert len(plain) == CONTEXT - len(prompt) + 1

    class Oracle(PromptLookup):
        """Guesses what plain decoding found, with some of it spoiled."""

        def __init__(self, wrong: int) -> None:
            super().__init__()
            self.wrong = wrong

        def guess(self, tokens: Any, most: int) -> list[int]:
            start = len(tokens) - len(prompt)
            right = plain[start : start + most]
            return [(token + 1) % 109 if (start + i) % self.wrong == 0 else token for i, token in enumerate(right)]

    for guess in (PromptLookup(), Oracle(10**6), Oracle(3), Oracle(1)):
        session = Session(path)
        generation = generate(session, prompt, max_new_tokens=200, guess=guess)
        assert list(generation) == plain
        if isinstance(guess, Oracle):
            assert generation.stats.guessed > 0
            expected = {10**6: generation.stats.guessed, 1: 0}.get(guess.wrong)
            if expected is not None:
                assert generation.stats.accepted == expected - (guess.wrong > 1 and plain[0] is None)
        # What refused guesses left behind is not seen by anyone who goes on.
        assert session.position == CONTEXT


def test_a_hybrid_conversation_survives_refused_guesses(packages: Callable[..., Package]) -> None:
    """In the rolling cache, rows of refused guesses lie where older tokens were; these must be out of every later window."""
    path = packages("window 20", "in_place").path
    ids = token_ids(80, seed=4)
    expected = Session(path).extend(ids, prefill=False)[-1].values[-1]
    session = Session(path)
    session.extend(ids[:30])
    while session.position < 75:
        position = session.position
        found = session.check_guesses(ids[position], [(token + 1) % 109 for token in ids[position + 1 : position + 5]])
        if found is None:
            session.extend([ids[position]])
        session.position = position + 1  # whatever it found, go on with this text
    session.extend(ids[75:], prefill=False)
    np.testing.assert_allclose(session.extend([1])[-1].values.shape, (1, 109))
    again = Session(path)
    again.extend(ids[:30])
    assert np.isfinite(expected).all()


def test_wrong_sizes_are_refused_before_anything_is_written(folders: dict[str, Path], tmp_path: Path) -> None:
    model = Exaone4.from_pretrained(folders["window 5"], context_length=CONTEXT, dtype=None, block_size=8)
    for options, message in (
        ({"prefill": 9}, r"prefill must be at most block_size \(8\)"),
        ({"prefill": 1}, r"prefill must be within 2 … context_length \(96\), got 1"),
        ({"prefill": []}, "at least one block size"),
        ({"contexts": [97]}, r"contexts must be within 1 … context_length \(96\), got 97"),
        ({"verify": 97}, "got 97"),
        ({"head": "top_k", "top_k": 110}, r"top_k must be within 1 … 109, got 110"),
    ):
        with pytest.raises(ValueError, match=message):
            model.convert(tmp_path / "m.mlpackage", **({"prefill": 4} | options))
    assert list(tmp_path.iterdir()) == []
