"""The split output head against `nn.Linear`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from ane_layers.layers import Embedding, OutputHead


@pytest.mark.parametrize(("b", "s"), [(1, 1), (3, 1), (1, 5), (3, 7)])
@pytest.mark.parametrize(("vocab", "pieces"), [(101, 1), (101, 4), (101, 3), (96, 16), (7, 7)])
def test_head_matches_torch_linear(vocab: int, pieces: int, b: int, s: int) -> None:
    generator = torch.Generator().manual_seed(0)
    reference = nn.Linear(13, vocab, bias=False).requires_grad_(False)
    reference.weight.normal_(0, 0.3, generator=generator)
    layer = OutputHead(13, vocab, pieces=pieces)
    layer.load_state_dict(reference.state_dict())
    x = torch.randn(b, 13, 1, s, generator=generator)
    assert len(layer.sizes) == pieces
    assert sum(layer.sizes) == vocab
    assert_close(layer(x), reference(x.squeeze(2).transpose(1, 2)), atol=1e-5, rtol=0)


def test_last_piece_may_be_smaller() -> None:
    assert OutputHead(4, 101, pieces=4).sizes == [26, 26, 26, 23]


@pytest.mark.parametrize(("vocab", "pieces"), [(101, 1), (16384, 1), (16385, 16), (102400, 16)])
def test_default_pieces_fit_one_engine_axis(vocab: int, pieces: int) -> None:
    sizes = OutputHead(1, vocab).sizes
    assert len(sizes) == pieces
    assert max(sizes) <= 16384


def test_assigned_pieces_are_views_of_the_embedding() -> None:
    model = nn.ModuleDict({"embed_tokens": Embedding(101, 6), "lm_head": OutputHead(6, 101, pieces=4)})
    table = torch.randn(101, 6, generator=torch.Generator().manual_seed(0))
    model.load_state_dict({"embed_tokens.weight": table, "lm_head.weight": table}, assign=True)
    head = model["lm_head"]
    start = table.data_ptr()
    assert model["embed_tokens"].weight.data_ptr() == start
    row = 6 * table.element_size()
    assert [piece.weight.data_ptr() for piece in head.pieces] == [start + i * 26 * row for i in range(4)]
    assert {piece.weight.untyped_storage().data_ptr() for piece in head.pieces} == {start}


def test_own_state_dict_round_trip_matches_itself() -> None:
    head, copy = OutputHead(6, 101, pieces=4), OutputHead(6, 101, pieces=4)
    state = head.state_dict()
    copy.load_state_dict(state)
    x = torch.randn(1, 6, 1, 3)
    assert_close(copy(x), head(x), atol=0, rtol=0)
    assert list(state) == [f"pieces.{i}.weight" for i in range(4)]


@pytest.mark.parametrize("pieces", [0, -1, 102])
def test_pieces_out_of_range_are_refused(pieces: int) -> None:
    with pytest.raises(ValueError, match=rf"pieces must be within 1 … 101, got {pieces}"):
        OutputHead(6, 101, pieces=pieces)


def test_pieces_that_leave_an_empty_one_are_refused() -> None:
    with pytest.raises(ValueError, match=r"16 pieces of 7 rows.*vocab_size is 101"):
        OutputHead(6, 101, pieces=16)


@pytest.mark.parametrize("shape", [(100, 6), (101, 7), (101,)])
def test_a_table_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    model = nn.ModuleDict({"lm_head": OutputHead(6, 101, pieces=4)})
    with pytest.raises(ValueError, match=r"lm_head.weight has shape .*expected \[101, 6\]"):
        model.load_state_dict({"lm_head.weight": torch.zeros(shape)})


def test_a_missing_table_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"pieces\.0\.weight"):
        OutputHead(6, 101, pieces=4).load_state_dict({})


@pytest.mark.parametrize("pieces", [1, 4])
def test_scaled_and_capped_logits_match_the_formula(pieces: int) -> None:
    """Gemma's cap and Granite's divisor, as `transformers` writes them; the likeliest tokens stay in order."""
    generator = torch.Generator().manual_seed(0)
    layer = OutputHead(13, 101, pieces=pieces, scale=1 / 0.7, softcap=3.0).requires_grad_(False)
    table = torch.randn(101, 13, generator=generator)
    layer.load_state_dict({"weight": table})
    x = torch.randn(1, 13, 1, 5, generator=generator)
    expected = torch.tanh(x.squeeze(2).transpose(1, 2) @ table.T / 0.7 / 3.0) * 3.0
    assert expected.abs().max() > 2.9
    assert_close(layer(x), expected, atol=1e-5, rtol=0)
    plain = x.squeeze(2).transpose(1, 2) @ table.T
    assert layer.argmax(x).tolist() == plain.argmax(2).tolist()
    tokens, values = layer.top_k(x, 4)
    assert tokens.tolist() == plain.topk(4, dim=2).indices.tolist()
    assert_close(values, expected.gather(2, tokens.long()), atol=1e-5, rtol=0)
