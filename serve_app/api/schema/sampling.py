"""The request fields that both endpoints share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from serve_app.api.bodies.ignored_fields import Known, known
from serve_app.api.schema.input_types import BIAS_MAX, TOKEN_ID_MAX, LogitBiasInput, StopInput
from serve_app.base.errors import InvalidRequest
from serve_app.base.explain import Complaint, explain

MAX_LOGPROBS = 20
_INT64_MIN, _UINT64_MAX = -(2**63), 2**64 - 1

_Body = TypeVar("_Body", bound=BaseModel)


class Section(BaseModel):
    """A part of a request body: strict types, unknown fields dropped, null means unset."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends a generation besides the model's own end tokens; one of the two is empty."""

    strings: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()


def parse_body(kind: type[_Body], raw: Mapping[str, object]) -> _Body:
    """Raises `InvalidRequest` with the first error."""
    try:
        return kind.model_validate(raw)
    except ValidationError as exc:
        path, sentence = explain(exc.errors(include_url=False)[0], "The request")
        raise InvalidRequest(sentence, path or None) from exc


def _stops(value: object) -> Stops | None:
    if value is None or value == []:
        return None
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        if "" in value:
            raise Complaint("must not hold an empty string", value)
        return Stops(strings=tuple(dict.fromkeys(value)))
    if isinstance(value, list) and set(map(type, value)) == {int}:
        return Stops(token_ids=tuple(dict.fromkeys(token_ids(value, ""))))
    raise Complaint("must be a string, a list of strings or a list of token ids", value)


def token_ids(value: list[Any], suffix: str) -> tuple[int, ...]:
    """A list of token ids that is not empty. The vocabulary is checked later."""
    if not value:
        raise Complaint("must not be empty", value, suffix)
    if set(map(type, value)) != {int}:  # also true and false, which are numbers in Python
        index = next(i for i, item in enumerate(value) if type(item) is not int)
        raise Complaint("must be a token id", value[index], f"{suffix}[{index}]")
    if min(value) < 0 or max(value) > TOKEN_ID_MAX:
        index = next(i for i, item in enumerate(value) if not 0 <= item <= TOKEN_ID_MAX)
        raise Complaint("must be a token id", value[index], f"{suffix}[{index}]")
    return tuple(value)


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise Complaint("must be an object from token ids to biases", value)
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise Complaint("must have token ids as keys", key)
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -BIAS_MAX <= bias <= BIAS_MAX:
            raise Complaint(f"must be a number from -{BIAS_MAX} to {BIAS_MAX}", bias, f".{key}")
        biases[int(key)] = float(bias)
    return biases


Number = Annotated[float, Field(allow_inf_nan=False)]


class StreamOptions(Section):
    include_usage: bool | None = None


class SamplingFields(Section):
    """Sampling, stopping and how the reply is sent."""

    model: str
    temperature: Annotated[Number, Field(ge=0)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Number, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[
        dict[int, float] | None, PlainValidator(_logit_bias, json_schema_input_type=LogitBiasInput)
    ] = None
    seed: Annotated[int, Field(ge=_INT64_MIN, le=_UINT64_MAX)] | None = None
    stop: Annotated[Stops | None, PlainValidator(_stops, json_schema_input_type=StopInput)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = None

    @classmethod
    def names(cls) -> Known:
        """The names of the fields that are read, at every level."""
        return known(cls.model_fields, stream_options=known(StreamOptions.model_fields))
