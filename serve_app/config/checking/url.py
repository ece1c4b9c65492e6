"""URLs in the configuration."""

from typing import Annotated, Final

from pydantic import AfterValidator
from yarl import URL

from serve_app.base.explain import Complaint

_MAX_CHARACTERS: Final = 2048


def _url(value: str) -> str:
    limit = f"must be an http or https URL of at most {_MAX_CHARACTERS} characters without user, query and fragment"
    try:
        url = URL(value)
        is_good = bool(url.host) and url.scheme in ("http", "https") and url.port is not None
    except ValueError:
        raise Complaint(limit, value) from None
    is_plain = url.user is None and url.password is None and "?" not in value and "#" not in value
    if not (is_good and is_plain and len(value) <= _MAX_CHARACTERS and value.isprintable()):
        raise Complaint(limit, value)
    return value


HttpUrl = Annotated[str, AfterValidator(_url)]
"""The URL of a server, which shows no secret."""
