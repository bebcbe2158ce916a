"""Topics in the plane: those with the same words lie close together."""

from __future__ import annotations

import numpy as np


def distances(H: np.ndarray) -> np.ndarray:
    """Hellinger distances (k × k) between topics as probabilities of words: 0 for the same, 1 without a common word."""
    mass = H.sum(axis=1, keepdims=True, dtype=np.float64)
    roots = np.sqrt(H / np.where(mass > 0, mass, 1.0))
    return np.sqrt(np.clip(1.0 - roots @ roots.T, 0.0, None)) * (1 - np.eye(len(H)))


def positions(H: np.ndarray) -> np.ndarray:
    """Places (k × 2) within the unit square whose distances are near those of the topics (classical scaling).

        B = −½ J D² J,  J = I − 11ᵀ/k;  places are its two leading eigenvectors times the roots of their eigenvalues

    The same topics have the same places: the largest entry of each axis is positive.
    """
    k = len(H)
    centre = np.eye(k) - 1.0 / k
    values, vectors = np.linalg.eigh(-0.5 * centre @ distances(H) ** 2 @ centre)
    leading = np.argsort(-values, kind="stable")[:2]
    axes = vectors[:, leading] * np.sqrt(np.clip(values[leading], 0.0, None))
    axes = np.pad(axes, ((0, 0), (0, 2 - axes.shape[1])))
    signs = np.where(axes[np.abs(axes).argmax(axis=0), [0, 1]] < 0, -1.0, 1.0)
    reach = np.abs(axes).max() or 1.0
    return np.asarray(0.5 + 0.5 * axes * signs / reach)


def apart(places: np.ndarray, radii: np.ndarray, steps: int = 200) -> np.ndarray:
    """Places from which discs that overlap have been moved away from each other, little by little."""
    moved = places.copy()
    angles = np.arange(len(places)) * 2.399963  # golden angle: a direction for those in one place
    for _ in range(steps):
        between = moved[:, None, :] - moved[None, :, :]
        gaps = np.linalg.norm(between, axis=2)
        overlap = np.clip(radii[:, None] + radii[None, :] - gaps, 0.0, None) * (1 - np.eye(len(places)))
        if not overlap.any():
            break
        away = np.stack([np.cos(angles), np.sin(angles)], axis=1)[:, None, :]
        away = away - away.transpose(1, 0, 2)
        directions = np.where(gaps[..., None] > 1e-9, between / np.maximum(gaps, 1e-9)[..., None], away)
        moved = moved + 0.25 * (overlap[..., None] * directions).sum(axis=1)
    return moved
