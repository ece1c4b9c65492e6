"""Checks a reply against `tool_choice` and `parallel_tool_calls`. The model is not forced to follow them."""

from renderers.messages import ToolCall
from serve_app.api.requests import ToolRules
from serve_app.api.schema.chat import NamedFunction
from serve_app.base.errors import ReplyRefused


class ToolCheck:
    """Sees every call of one reply before the caller does."""

    def __init__(self, rules: ToolRules) -> None:
        self._rules = rules
        self._num_calls = 0

    def see(self, call: ToolCall) -> None:
        """Raises `ReplyRefused`."""
        self._num_calls += 1
        choice = self._rules.choice
        if choice == "none":
            raise ReplyRefused("The model called a function, against tool_choice 'none'.", "tool_choice")
        if isinstance(choice, NamedFunction) and call.name != choice.name:
            raise ReplyRefused(f"The model called a function other than tool_choice {choice.name!r}.", "tool_choice")
        if self._num_calls > 1 and not self._rules.parallel:
            raise ReplyRefused(
                "The model called more than one function, against parallel_tool_calls false.", "parallel_tool_calls"
            )

    def finish(self, finish_reason: str | None, *, malformed: bool) -> None:
        """At the end of the reply. `malformed`: it is not in the model's own format. Raises `ReplyRefused`."""
        choice = self._rules.choice
        if self._num_calls or choice in ("none", "auto"):
            return
        shown = choice.name if isinstance(choice, NamedFunction) else choice
        if finish_reason == "length":
            why = "the reply was cut by the token limit before a call was complete; raise max_tokens"
        elif malformed:
            why = "it wrote a call that cannot be parsed; try again"
        else:
            why = "it answered in text; ask for the call in the conversation, or try again"
        raise ReplyRefused(f"The model called no function, against tool_choice {shown!r}: {why}.", "tool_choice")
