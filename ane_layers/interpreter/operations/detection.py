"""What detectors and classifiers end with."""

from __future__ import annotations

import torch
from torch import Tensor

from ane_layers.interpreter.plain import Labels
from ane_layers.interpreter.registry import operation


@operation("non_maximum_suppression", exact=True)
def non_maximum_suppression(
    boxes: Tensor,
    scores: Tensor,
    iou_threshold: float,
    max_boxes: int,
    score_threshold: float | None = None,
    per_class_suppression: bool = False,
) -> tuple[Tensor, ...]:
    """Shape: boxes (B, N, 4), scores (B, N, classes) with `score_threshold`; from iOS17 on, without it, N is last.

    Boxes are (x, y, width, height) around their centre and rank by their best score. Rows that no box fills are 0, their
    index is -1. If no score reaches the threshold, the best box is given all the same, as coremltools' tests expect.
    """
    first = score_threshold is not None
    boxes_first = boxes if first else boxes.transpose(1, 2)
    scores_first = scores if first else scores.transpose(1, 2)
    picked = [
        _suppress(box, score, iou_threshold, score_threshold, per_class_suppression)[:max_boxes]
        for box, score in zip(boxes_first, scores_first, strict=True)
    ]
    indices = torch.stack([_padded(row, max_boxes, -1) for row in picked])
    kept_boxes = torch.stack([_padded(box[row], max_boxes, 0) for box, row in zip(boxes_first, picked, strict=True)])
    kept_scores = torch.stack(
        [_padded(score[row], max_boxes, 0) for score, row in zip(scores_first, picked, strict=True)]
    )
    if not first:
        return kept_boxes.transpose(1, 2), kept_scores.transpose(1, 2), indices
    return kept_boxes, kept_scores, indices, torch.tensor([row.numel() for row in picked])


@operation("classify", plain=True)
def classify(probabilities: Tensor, classes: Labels) -> tuple[str | int, dict[str | int, float]]:
    values = probabilities.reshape(-1).tolist()
    if len(values) != len(classes):
        raise ValueError(f"classes has {len(classes)} labels for {len(values)} probabilities")
    # Two classes of one name would lose a probability without a word.
    if len(set(classes)) != len(classes):
        raise ValueError("classes names a label twice")
    best = int(torch.argmax(probabilities.reshape(-1)))
    return classes[best], dict(zip(classes, values, strict=True))


def _suppress(boxes: Tensor, scores: Tensor, overlap: float, least: float | None, per_class: bool) -> Tensor:
    """Numbers of the boxes that stay, best first."""
    best, classes = scores.max(-1)
    order = torch.argsort(best, descending=True, stable=True)
    if least is not None:
        eligible = order[best[order] >= least]
        order = eligible if eligible.numel() else order[:1]
    low, high = boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2
    area = boxes[:, 2:].prod(-1)
    kept: list[int] = []
    while order.numel():
        first, rest = order[0], order[1:]
        kept.append(int(first))
        sides = (torch.minimum(high[first], high[rest]) - torch.maximum(low[first], low[rest])).clamp(min=0)
        common = sides.prod(-1)
        # Compared without dividing: two boxes of no area have no quotient, and suppress nothing.
        suppressed = common > overlap * (area[first] + area[rest] - common)
        if per_class:
            suppressed &= classes[rest] == classes[first]
        order = rest[~suppressed]
    return torch.tensor(kept, dtype=torch.int64)


def _padded(rows: Tensor, count: int, value: int) -> Tensor:
    missing = rows.new_full((count - rows.shape[0], *rows.shape[1:]), value)
    return torch.cat([rows, missing])
