"""The texts of the OpenAPI description."""

from collections.abc import Mapping

from serve_app.api.requests import SAMPLING_DEFAULTS

ABOUT = """\
Serves base language models and LoRA checkpoints trained on them, for OpenAI's clients.

Every response but 200 has the body `ErrorReply`. Integers are written without a fraction: `1.0` is refused.
Which models there are, how long their context is and whether they chat, call tools or see is not said here: ask
`/v1/models`.
"""

_MODEL_RULES = """\
Prompt and reply must fit into the model's context. With `stream: true` the reply is a stream of server-sent events;
`stream_options` needs it.
"""

_SLUG_RULES = """\
If `model` is a marketplace slug or one endpoint of it, the body is a `Slug{body}`: these fields are checked here, and
everything goes on to the endpoint, other fields too. `stream` must be true, unless the slug allows whole replies.
Endpoints that are up and within `price` are tried until one answers; the header `x-endpoint` names it.
"""

CHAT_RULES = f"""\
The next message of a conversation.

{_MODEL_RULES}
`top_logprobs` needs `logprobs`. `tool_choice` other than `none` and `auto` needs `tools`, and a model that calls tools.
A message has the fields of its role only: `reasoning_content` and `tool_calls` are an assistant's, `tool_call_id` is a
tool's, which needs it: the id of a call in an earlier message. Only an assistant's `content` may be null. The names of
tools are unique.

{_SLUG_RULES.format(body="ChatBody")}"""

COMPLETION_RULES = f"""\
The continuation of a prompt.

{_MODEL_RULES}
Exactly one of `prompt` and `prompt_chunks` is set. `echo` needs `prompt`, and `max_tokens: 0` needs `echo`.

{_SLUG_RULES.format(body="CompletionBody")}"""

USAGE_RULES = """\
What the key has used, from the requests that have ended. Those of the last seconds may be missing. A service without a
ledger answers 404. A range has at most 366 days. The days that a range of times cuts may have at most 200,000 requests
of the key. The question counts as a request of the key, and a key may ask twice at a time.
"""

USAGE_PARAMETERS: Mapping[str, str] = {
    "from": "A UTC date, or a time with its zone (RFC 3339). Unset: the first day of this month.",
    "to": "A UTC date, which is included, or a time, which is not. Unset: today.",
    "by": "`day` or `model`. Unset: `day`.",
}

STREAM = """\
With `stream: true`: `data: ` and a `{chunk}`, again and again, then `data: [DONE]`. A stream that fails ends with
`data: ` and an `ErrorReply`, without `[DONE]`. Lines that begin with a colon are comments.
"""


def _unset(field: str) -> str:
    return f"Unset: {SAMPLING_DEFAULTS[field]:g}."


FIELDS: Mapping[str, str] = {
    "model": (
        "A base model, a variant of it, a checkpoint (`tinker://run/sampler_weights/name`), or base`;`checkpoint; "
        "or a marketplace slug, or slug`/ep/`endpoint."
    ),
    "temperature": f"0: the most likely token. {_unset('temperature')}",
    "top_p": f"Sample from the most likely tokens whose probabilities add up to this. {_unset('top_p')}",
    "top_k": "Sample from this many tokens. 0, -1 or unset: from all.",
    "min_p": "Sample from tokens at least this likely relative to the most likely one.",
    "presence_penalty": "Subtracted from the logits of tokens that are already in the reply.",
    "frequency_penalty": "Subtracted once for each occurrence of the token in the reply.",
    "repetition_penalty": (
        "Divides the logits of tokens of prompt and reply; above 1 makes them less likely. "
        + _unset("repetition_penalty")
    ),
    "logit_bias": "Added to the logits of these tokens, by their ids in decimal.",
    "seed": "The same seed, request and model give the same reply. Unset: a random seed.",
    "stop": "Text that ends the reply and is not part of it, or token ids. The model's own end tokens always end it.",
    "stream": "Send the reply as it is generated.",
    "stream_options": "`include_usage`: one more chunk with the usage. Needs `stream`.",
    "return_token_ids": "Return the ids of prompt and reply.",
    "prompt_cache_key": (
        "Requests with the same key prefer the same replica, or endpoint of a slug, where their prompts may be cached."
    ),
    "price": (
        "`max_prompt`, `max_completion`: endpoints that cost more USD per million tokens are left out. "
        "`sort`: which to prefer, by `price` if unset, or by recent `latency` or `throughput`."
    ),
    "prompt": "Text or token ids; a list that holds one prompt is that prompt.",
    "prompt_chunks": "A prompt in pieces: token ids, and images for models that see.",
    "max_tokens": "Of the reply. Unset: up to the end of the context.",
    "logprobs": "Return log-probabilities; for completions a number, of how many alternatives per token.",
    "echo": "Repeat the prompt before the reply, with its log-probabilities if they are asked for.",
    "messages": "The conversation.",
    "max_completion_tokens": "The same as `max_tokens`; if both are set, this one is used.",
    "reasoning_effort": "The allowed values depend on the model; an error message lists them.",
    "separate_reasoning": "false: reasoning is in `content`, before the text. Unset: true.",
    "tools": "The functions that the model may call.",
    "tool_choice": "The reply is checked against it; a violation is 422. Unset: `auto`.",
    "parallel_tool_calls": "false: a reply with more than one call is 422.",
    "top_logprobs": "Alternatives per token. Needs `logprobs`.",
}

STATUSES: Mapping[int, str] = {
    400: "The request is invalid; the message names field, limit and value.",
    401: "No key, or an invalid one.",
    404: "No such model, or this key may not use it.",
    413: "The body is too large.",
    415: "The body is not declared as plain JSON.",
    422: "The reply broke `tool_choice` or `parallel_tool_calls`, or the checkpoint cannot be served.",
    429: "The queue is full or a limit of the key is reached; nothing was run.",
    500: "A fault of the service.",
    503: "Nothing can serve the request now.",
}
