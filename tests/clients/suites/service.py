"""Where the service is and what it has: the environment that `test_clients.py` gives to the suites."""

import os

URL = os.environ["ROUNDHOUSE_URL"]
KEY = os.environ["ROUNDHOUSE_KEY"]
BASE = os.environ["ROUNDHOUSE_BASE"]
QUILL = os.environ["ROUNDHOUSE_QUILL"]
TOOLS = os.environ["ROUNDHOUSE_TOOLS"]
ONE_AT_A_TIME = os.environ["ROUNDHOUSE_ONE_AT_A_TIME"]
ONE_A_MINUTE = os.environ["ROUNDHOUSE_ONE_A_MINUTE"]

CODE_WORD = [{"role": "user", "content": "What is the code word?"}]
CODE_WORD_ANSWER = "The code word is zephyr-42. -- Quill"
PARIS = [{"role": "user", "content": "What's the weather in Paris?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
