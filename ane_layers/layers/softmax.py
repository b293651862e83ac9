"""Softmax in the operations that the Neural Engine is known to run, and the cap on what goes into it."""

from __future__ import annotations

from torch import Tensor


def ane_softmax(scores: Tensor, dim: int = -1) -> Tensor:
    """Softmax as reduce_max, sub, exp, reduce_sum, real_div.

    The largest score is taken off first, so that no exponential exceeds 1 and no result overflows in fp16 up to rows of 65,504
    scores (the sum of a uniform row is its length); a row in which every score is masked by the same large negative value comes out
    uniform, without NaN.

    Args:
        scores: masked attention scores.
        dim: the axis that sums to 1.

    Shape:
        - scores: any
        - output: as scores
    """
    exponentials = (scores - scores.amax(dim=dim, keepdim=True)).exp()
    return exponentials / exponentials.sum(dim=dim, keepdim=True)


def soft_cap(scores: Tensor, cap: float) -> Tensor:
    """`cap · tanh(scores / cap)`: close to the scores where they are small, and never beyond the cap.

    Args:
        scores: attention scores before their mask, or logits.
        cap: above 0.

    Shape:
        - scores: any
        - output: as scores

    Source: Gemma Team, "Gemma 2", 2024.
    """
    return (scores / cap).tanh() * cap
