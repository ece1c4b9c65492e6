"""A part of the configuration: a frozen pydantic value. Every option has its range and one sentence."""

from typing import Annotated, Final

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict

from engines.interface.config import Bytes, Count, Seconds, Text

__all__ = ["RULES", "Bytes", "Count", "Cpus", "Delay", "Seconds", "Section", "Text"]

Cpus = Annotated[float, Ge(0), Le(1024)]
Delay = Annotated[float, Ge(0), Le(7 * 86400)]

RULES: Final = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class Section(BaseModel):
    """Refuses unknown keys and values of another type."""

    model_config = ConfigDict(**RULES, frozen=True)
