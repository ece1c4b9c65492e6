"""A chat in a terminal: the answer goes to standard output, the reasoning before it to standard error."""

import sys
from contextlib import suppress

from serve_app.cli.client import Client

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def converse(client: Client, model: str, *, system: str | None, temperature: float) -> None:
    """Chat line by line until the input ends. Raises `ServiceRefused`."""
    messages: list[dict[str, str]] = []
    if system:
        messages.append({"role": "system", "content": system})
    with suppress(EOFError):
        while True:
            messages.append({"role": "user", "content": input("> " if sys.stdin.isatty() else "")})
            answer = _show_reply(client, model, messages, temperature)
            messages.append({"role": "assistant", "content": answer})


def _show_reply(client: Client, model: str, messages: list[dict[str, str]], temperature: float) -> str:
    """Print the reply as it arrives; return the answer."""
    answer = ""
    is_thinking = False
    begin, end = (_DIM, _PLAIN) if sys.stderr.isatty() else ("", "")
    try:
        for delta in client.chat(model, messages, temperature=temperature):
            if thought := delta.get("reasoning_content"):
                _write_error(thought if is_thinking else begin + thought)
                is_thinking = True
            if text := delta.get("content"):
                if is_thinking:
                    _write_error(f"{end}\n\n")
                    is_thinking = False
                answer += text
                sys.stdout.write(text)
                sys.stdout.flush()
    finally:
        if is_thinking:  # cut off, or a reply with reasoning only
            _write_error(f"{end}\n")
    sys.stdout.write("\n")
    sys.stdout.flush()
    return answer


def _write_error(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
