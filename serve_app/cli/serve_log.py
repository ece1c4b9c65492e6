"""Finds in the log of Serve's controller why an application cannot be deployed, without the traceback."""

import re

from serve_app.base.logs import plain

_STAMP = r"^[A-Z]+ \d{4}-\d\d-\d\d "
# An entry: its first line, and lines without a level and date of their own.
_ENTRY = re.compile(rf"{_STAMP}[^\n]*? -- (?P<text>.*?)(?={_STAMP}|\Z)", re.M | re.S)
_BUILD = re.compile(r"Deploying app '(?P<app>[^']+)' failed with exception:\n(?P<why>.+)", re.S)
_REPLICA = re.compile(r"Exception in Replica\(.*?app='(?P<app>[^']+)'\)[^\n]*\n(?P<why>.+)", re.S)
_GIVEN_UP = "Failed to update the deployments"
_EXCEPTION = re.compile(r"[\w.]+: ")


def deploy_failure(log: str) -> str | None:
    """One sentence about the first application that Serve failed to deploy; None while there is none.

    Serve retries a replica that fails to start; that alone is no failure.
    """
    last_failure = None
    for entry in _ENTRY.finditer(plain(log)):
        text = entry["text"]
        if found := _BUILD.match(text):
            return _sentence(found)
        last_failure = _REPLICA.match(text) or last_failure
        if text.startswith(_GIVEN_UP) and last_failure is not None:
            return _sentence(last_failure)
    return None


def last_exception(text: str) -> str:
    """The message of the exception that a log ends with."""
    last = next((line.strip() for line in reversed(plain(text).splitlines()) if line.strip()), "")
    return _EXCEPTION.sub("", last, count=1)


def _sentence(found: "re.Match[str]") -> str:
    return f"The application {found['app']!r} failed to deploy: {last_exception(found['why'])}"
