"""Which attacks there are on what a party has sent."""

from __future__ import annotations

from partsong.evaluate.leakage_scene import Scene


def tried_on(scene: Scene, party: str) -> tuple[str, ...]:
    """The attacks that have something to work on, in words; none says that there is none for such uploads."""
    has_factors = [upload for _, upload in scene.seen(party, "H") if "place" not in upload.arrays]
    is_game = hasattr(scene.program, "game") and getattr(scene.program, "repeats", 1) == 1
    attempts = {
        "rows, or their span, from WᵀW and WᵀX": bool(scene.seen(party, "gram", "cross")),
        "rows from sketches, by linear algebra or as sparse ones": bool(scene.seen(party, "data", "weights")),
        "what all H_p of a party with few rows have in common": len(has_factors) > 1,
        "the row space of the one H_p of a party with few rows": len(has_factors) == 1,
        "a single row from how the columns that it played have moved": is_game
        and bool(scene.seen(party, "H", "place", "totals")),
        "columns of H_p, or rows of W_p, that a sketch leaves as they are": bool(
            scene.seen(party, "sketch") or scene.seen(party, "sketched_W")
        ),
    }
    return tuple(attempt for attempt, is_possible in attempts.items() if is_possible)
