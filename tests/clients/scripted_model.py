"""A model that can what the demo's cannot: it calls every function that is declared to it, with fitting arguments.

It stands behind the whole API, on a port, for clients whose tests are about what goes over the wire and need a reply
that makes sense. There is no model in it: the reply is found in the text of the prompt.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.fake import FakeConfig
from engines.interface.protocol import GenerateRequest
from tests.support.files.tiny_tokenizer import save_model_folder
from tests.support.harness import CHAT, CONTEXT, RunningEdge, config_for, running_edge

MODEL = CHAT
_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_TURN = re.compile(r"<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)
_KEYS = re.compile(r"with '(\w+)' and '(\w+)' keys")

Json = dict[str, Any]


@contextmanager
def scripted_service(folder: Path) -> Iterator[RunningEdge]:
    chat = save_model_folder(folder / "chat", context_length=4 * CONTEXT)
    base = save_model_folder(folder / "base", with_template=False, context_length=4 * CONTEXT)
    engine = FakeConfig(vocab_size=512, context_length=4 * CONTEXT)
    with running_edge(config_for({"chat": str(chat), "base": str(base)}), engine) as edge:

        def answer(request: GenerateRequest) -> list[int]:
            tokenizer = edge.script.tokenizer
            text = reply_to(str(tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False)))
            return [*edge.script.encode(text), edge.script.end]

        edge.script.reply = answer
        yield edge


def reply_to(prompt: str) -> str:
    """A call of the first function for a question, a sentence for its result; JSON where its keys are named."""
    declared = _TOOLS.search(prompt)
    question = _TURN.findall(prompt)[-1]
    if declared and not question.startswith("<tool_response>"):
        function = json.loads(declared[1].split("\n")[0])["function"]
        call = {"name": function["name"], "arguments": _arguments(function.get("parameters", {}), question)}
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
    if keys := _KEYS.search(question):
        return json.dumps(dict.fromkeys(keys.groups(), "a cat"))
    return "Here is what you asked for. The rest of the story needs a few more words, so that there is a stream."


def _arguments(schema: Json, question: str) -> Json:
    """One for each property: numbers and quoted names in their order in the question, else the question itself."""
    numbers = map(int, re.findall(r"\d+", question))
    names = iter(re.findall(r"'([^']+)'", question))
    return {
        name: next(numbers, 1) if about.get("type") == "integer" else next(names, question)
        for name, about in schema.get("properties", {}).items()
    }
