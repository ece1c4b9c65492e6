"""Types for the OpenAPI description of fields that our own validators check."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

TOKEN_ID_MAX = 2**31 - 1
BIAS_MAX = 100
EFFORT_MAX = 1_000_000

TokenId = Annotated[int, Field(ge=0, le=TOKEN_ID_MAX)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
_Text = Annotated[str, Field(min_length=1)]

StopInput = _Text | list[_Text] | list[TokenId] | None
LogitBiasInput = (
    Annotated[
        dict[str, float],
        WithJsonSchema(
            {
                "type": "object",
                "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                "additionalProperties": {"type": "number", "minimum": -BIAS_MAX, "maximum": BIAS_MAX},
            }
        ),
    ]
    | None
)
PromptInput = (
    _Text
    | TokenIds
    | Annotated[list[_Text], Field(min_length=1, max_length=1)]
    | Annotated[list[TokenIds], Field(min_length=1, max_length=1)]
    | None
)
EffortInput = str | bool | Annotated[float, Field(ge=-EFFORT_MAX, le=EFFORT_MAX)] | None
ArgumentsInput = Annotated[
    str,
    WithJsonSchema({"type": "string", "contentMediaType": "application/json", "contentSchema": {"type": "object"}}),
]


class _Written(BaseModel):
    model_config = ConfigDict(extra="allow")


class ImageUrl(_Written):
    url: _Text


class ImagePart(_Written):
    """An image, for vision models."""

    type: Literal["image_url"]
    image_url: ImageUrl | _Text


class TextPart(_Written):
    type: Literal["text"]
    text: str


class TokensPart(_Written):
    """Prompt tokens."""

    type: Literal["tokens"]
    tokens: TokenIds


class FunctionName(_Written):
    name: str


class FunctionChoice(_Written):
    """The one function that must be called."""

    type: Literal["function"]
    function: FunctionName


RequiredContentInput = str | list[TextPart | ImagePart]
ContentInput = RequiredContentInput | None
PromptChunksInput = Annotated[list[TokensPart | ImagePart], Field(min_length=1)] | None
ToolChoiceInput = Literal["none", "auto", "required"] | FunctionChoice | None
