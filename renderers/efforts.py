"""Which `reasoning_effort` a model takes, and what its template is told for each."""

from collections.abc import Mapping
from typing import TypeAlias

from renderers.base import RenderError
from renderers.messages import Effort

Efforts: TypeAlias = Mapping[Effort, Mapping[str, object]]
"""The accepted values, each with the template's own arguments. Without an effort the template decides."""


def switch(variable: str) -> Efforts:
    """Reasoning can be switched on and off by an argument of the template."""
    return {True: {variable: True}, False: {variable: False}, "none": {variable: False}}


def refuse_effort(effort: Effort | None) -> None:
    """For models without a switch for reasoning. Raises `RenderError`."""
    if effort is not None:
        raise RenderError(
            f"reasoning_effort must be left out: this model does not reason, got {effort!r}.", "reasoning_effort"
        )


def check_effort(effort: Effort | None, efforts: Efforts) -> None:
    """Raises `RenderError`, listing the accepted values."""
    if not efforts:
        refuse_effort(effort)
    # 1 equals True in Python, and is not accepted for it.
    elif effort is not None and not any(type(effort) is type(known) and effort == known for known in efforts):
        accepted = ", ".join(known if isinstance(known, str) else str(known).lower() for known in efforts)
        raise RenderError(f"reasoning_effort: this model takes {accepted}, got {effort!r}.", "reasoning_effort")
