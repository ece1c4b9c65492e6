"""One base model of the catalogue: its id for clients, its application, and the source of its tokenizer."""

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, Field
from typing_extensions import Doc

from serve_app.config.paths import resolve_source
from serve_app.config.price import Price
from serve_app.config.section import Count, Section, Text
from serve_app.explain import Complaint


def model_name(value: str) -> str:
    if not value or re.search(r"[:;\s]|/ep/", value) or not value.isprintable():
        raise Complaint('must be a name without ":", ";", "/ep/" or spaces', value)
    return value


def _variant(value: str) -> str:
    if not value or re.search(r"[;\s]|/ep/", value) or not value.isprintable():
        raise Complaint('must be a name without ";", "/ep/" or spaces', value)
    return value


class ModelConfig(Section):
    """One base model of the catalogue."""

    id: Annotated[
        str,
        AfterValidator(model_name),
        Doc('Id that clients send as `model`, unique, without ":", ";", "/ep/" and spaces.'),
    ]
    app: Annotated[Text, Doc("The application of this file whose replicas run the model.")]
    source: Annotated[
        Text, Doc("Folder, `.gguf` file or hub id with tokenizer, template and config; as in the `args` of `app`.")
    ]
    revision: Annotated[Text | None, Doc("Branch, tag or commit of a hub id; as in the `args` of `app`.")] = None
    renderer: Annotated[
        Text | None,
        Doc("The model's family, of those in `renderers/README.md`; null: found from its vocabulary and template."),
    ] = None
    context_length: Annotated[
        Count | None,
        Doc(
            "Longest prompt and reply together, in tokens; null: the model's `max_position_embeddings`, which is also "
            "the limit. Where the `args` of `app` set it, it is required and must not be larger."
        ),
    ] = None
    variants: Annotated[
        Mapping[Annotated[str, AfterValidator(_variant)], Count],
        Doc("Other context lengths by name: with `peft:32768: 32768`, clients may ask for `<id>:peft:32768`."),
    ] = {}
    allow_checkpoint_chat_template: Annotated[
        bool,
        Doc(
            "Whether a checkpoint's own `chat_template.jinja` is used. "
            "The template is code of the checkpoint's owner, and it runs in the ingress."
        ),
    ] = False
    fetch_images: Annotated[bool, Doc("Whether images may be `https://` URLs beside data URLs.")] = False
    also_known_as: Annotated[
        tuple[Text, ...],
        Field(strict=False),
        Doc("Other names of this base model in checkpoints, such as its path on the training machine."),
    ] = ()
    owned_by: Annotated[Text, Doc("Shown by `GET /models`.")] = "roundhouse"
    price: Annotated[
        Price | None,
        Doc("What its tokens cost, and those of its checkpoints, for the ledger and budgets; null: nothing."),
    ] = None

    @property
    def weights(self) -> tuple[str, str | None]:
        """Equal for models that a checkpoint cannot tell apart."""
        return resolve_source(self.source), self.revision
