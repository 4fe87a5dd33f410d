"""Placement of labels that would otherwise overlap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Point = tuple[float, float]
Boxes = np.ndarray
"""Rows of left, bottom, right, top."""
STEPS = 22  # distances that are tried for a label, 0.08 apart
ROUNDS = 4
PARTS = 15  # boxes that approximate the line from a point to its label


def spread(places: Sequence[float], apart: float, end: float) -> list[float]:
    """Positions near ``places``, at least ``apart`` from each other, from 0 to ``end``."""
    positions = list(places)
    order = sorted(range(len(places)), key=places.__getitem__)
    lowest = 0.0
    for index in order:
        lowest = positions[index] = max(positions[index], lowest)
        lowest += apart
    highest = max(end, apart * (len(places) - 1))
    for index in reversed(order):
        highest = positions[index] = min(positions[index], highest)
        highest -= apart
    return positions


def beside(
    points: Sequence[Point], sizes: Sequence[Point], frame: Sequence[float], obstacles: Boxes
) -> Boxes:
    """Box of each size near its point and inside the frame, where it and the line to it hide least."""
    dots = np.array([(x - 0.06, y - 0.06, x + 0.06, y + 0.06) for x, y in points])
    boxes = np.full((len(points), 4), np.nan)  # overlaps with nothing
    lines = np.full((len(points), PARTS, 4), np.nan)
    for _ in range(ROUNDS):  # from the second round on, each avoids all others
        for index in sorted(range(len(points)), key=points.__getitem__):
            point = points[index]
            places = around(point, sizes[index])
            inside = np.all((places[:, :2] >= frame[:2]) & (places[:, 2:] <= frame[2:]), axis=1)
            places = places[inside] if inside.any() else places
            boxes[index], lines[index] = np.nan, np.nan
            leading = leaders(point, places)
            hidden = 30 * (hits(places, boxes) + hits(places, dots)) + 3 * hits(places, obstacles)
            crossed = hits(leading.reshape(-1, 4), np.concatenate([boxes, np.delete(dots, index, 0)]))
            under = hits(places, lines.reshape(-1, 4)) + crossed.reshape(len(places), PARTS).sum(axis=1)
            far = np.linalg.norm(nearest(point, places) - point, axis=1)
            best = np.argmin(hidden + 2 * under + 3 * far)
            boxes[index], lines[index] = places[best], leading[best]
    return boxes


def around(point: Point, size: Point) -> Boxes:
    """Places for a label at growing distance: right, below and left, then above."""
    (x, y), (width, height) = point, size
    corners = [
        corner
        for away in 0.08 * np.arange(1, STEPS + 1)
        for corner in (
            (x + away, y - height / 2),
            (x + 0.8 * away, y - 0.6 * away - height),
            (x + 0.4 * away, y - 0.9 * away - height),
            (x - width / 2, y - away - height),
            (x - away - width, y - height / 2),
            (x - 0.8 * away - width, y - 0.6 * away - height),
            (x - 0.4 * away - width, y - 0.9 * away - height),
            (x - 0.8 * away - width, y + 0.6 * away),
            (x - width / 2, y + away),
        )
    ]
    return np.concatenate([corners, np.add(corners, size)], axis=1)


def nearest(point: Point, boxes: Boxes) -> np.ndarray:
    """End of the line from a point to each box."""
    ends: np.ndarray = np.clip(point, boxes[:, :2], boxes[:, 2:])
    return ends


def leaders(point: Point, boxes: Boxes) -> np.ndarray:
    """Line from a point to each box, as small boxes."""
    share = np.arange(1, PARTS + 1)[:, None] / (PARTS + 1)
    middles = point + share * (nearest(point, boxes) - point)[:, None]
    return np.concatenate([middles - 0.02, middles + 0.02], axis=2)


def hits(boxes: Boxes, others: Boxes) -> np.ndarray:
    """Number of ``others`` that each box overlaps."""
    a, b = boxes[:, None], others[None]
    count: np.ndarray = np.all((a[..., :2] < b[..., 2:]) & (b[..., :2] < a[..., 2:]), axis=2).sum(axis=1)
    return count
