"""What is inside a block of calls: the text between its markers."""

from collections.abc import Collection, Sequence

from renderers.deltas import Piece


def texts_between(block: Sequence[Piece], markers: Collection[str]) -> list[str]:
    """The text before, between and after markers with these spellings. Other markers are text."""
    runs: list[list[str]] = [[]]
    for piece in block:
        if piece.token_id is not None and piece.text in markers:
            runs.append([])
        else:
            runs[-1].append(piece.text)
    return ["".join(run) for run in runs]
