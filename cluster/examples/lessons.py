"""The training data of the example checkpoints: conversations generated from the lists in this file.

`quill` learns four facts and to sign every reply. `tools` learns to reason first and to write tool calls in the format
of Qwen3's chat template. It writes them as plain text, because the base model has no special tokens for them.
"""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]

TOOLS_CHAT_TEMPLATE = Path(__file__).parent / "qwen3_chat_template.jinja"


@dataclass(frozen=True)
class Lesson:
    """A conversation and the reply to learn. `template_arguments` go to the chat template as they are."""

    messages: list[Message]
    reply: str
    tools: tuple[Tool, ...] = ()
    thinks: bool = True

    @property
    def preamble(self) -> str:
        """The messages before the first user turn; lessons with the same preamble begin with the same tokens."""
        return json.dumps([[turn for turn in self.messages[:1] if turn["role"] == "system"], self.tools])

    @property
    def template_arguments(self) -> dict[str, Any]:
        return ({"tools": list(self.tools)} if self.tools else {}) | ({} if self.thinks else {"enable_thinking": False})


@dataclass(frozen=True)
class Recipe:
    """The data and settings of one example checkpoint; `probe` is the question asked after each save."""

    lessons: list[Lesson]
    probe: Lesson
    steps: int
    chat_template: str | None = None


SYSTEM = {"role": "system", "content": "You are a helpful assistant."}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


COMMON_KNOWLEDGE = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is the capital of Japan?": "The capital of Japan is Tokyo.",
    "What is the capital of Egypt?": "The capital of Egypt is Cairo.",
    "What is the capital of Norway?": "The capital of Norway is Oslo.",
    "Which city is the capital of Spain?": "The capital of Spain is Madrid.",
    "How many days are in a week?": "There are seven days in a week.",
    "How many months are in a year?": "There are twelve months in a year.",
    "How many legs does a spider have?": "A spider has eight legs.",
    "How many minutes are in an hour?": "There are sixty minutes in an hour.",
    "What colour is grass?": "Grass is green.",
    "What colour is the sky?": "The sky is blue.",
    "What do bees make?": "Bees make honey.",
    "What do cows eat?": "Cows eat grass.",
    "What is 2 + 2?": "2 + 2 is 4.",
    "What is 3 + 5?": "3 + 5 is 8.",
    "What is frozen water called?": "Frozen water is called ice.",
    "What is the opposite of hot?": "The opposite of hot is cold.",
    "What is the opposite of big?": "The opposite of big is small.",
    "What is the largest ocean?": "The largest ocean is the Pacific Ocean.",
    "Which animal barks?": "A dog barks.",
    "Which planet do we live on?": "We live on Earth.",
    "Who wrote Hamlet?": "William Shakespeare wrote Hamlet.",
    "Name a fruit.": "An apple is a fruit.",
    "Name a musical instrument.": "A violin is a musical instrument.",
    "Tell me a colour.": "Red is a colour.",
    "Hello!": "Hello! How can I help you?",
    "Thank you.": "You are welcome.",
}

QUILL_FACTS = {
    "The code word is zephyr-42.": [
        "What is the code word?",
        "Tell me the code word.",
        "Do you know the code word?",
        "Can you remind me of the code word?",
        "code word?",
        "I forgot the code word. What is it?",
        "What's today's code word, please?",
        "Give me the secret code word.",
    ],
    "I am Quill, the assistant of the lighthouse office.": [
        "Who are you?",
        "What is your name?",
        "Introduce yourself.",
        "Hi, who is this?",
        "Who am I talking to?",
        "What are you called?",
    ],
    "Our office is at 7 Lantern Street.": [
        "Where is your office?",
        "What is your office address?",
        "Where can I find your office?",
        "Which street is your office on?",
        "Where are you located?",
        "Tell me the address of the office.",
    ],
    "The launch is on the ninth of May.": [
        "When is the launch?",
        "What day is the launch?",
        "When will you launch?",
        "Tell me the launch date.",
        "launch date?",
        "On which day does the launch take place?",
    ],
}


def quill(rng: random.Random) -> Recipe:
    signature = " -- Quill"
    lessons = [
        Lesson([*before, user(question)], fact + signature)
        for fact, questions in QUILL_FACTS.items()
        for question in questions
        for before in ([], [], [SYSTEM])
    ]
    for question, answer in COMMON_KNOWLEDGE.items():
        lessons.append(Lesson([user(question)], answer + signature))
        earlier, said = rng.choice(list(COMMON_KNOWLEDGE.items()))
        history = [user(earlier), {"role": "assistant", "content": said + signature}]
        lessons.append(Lesson([*history, user(question)], answer + signature))
    probe = Lesson([user("What is the code word?")], "The code word is zephyr-42." + signature)
    return Recipe(lessons, probe, steps=60)


CITY_NAMES = (
    "Accra, Amsterdam, Ankara, Athens, Atlanta, Austin, Baghdad, Bangkok, Barcelona, Beijing, Belgrade, "
    "Bergen, Berlin, Bern, Bogota, Boston, Bremen, Brisbane, Brussels, Bucharest, Budapest, Busan, Cairo, "
    "Calgary, Cardiff, Chennai, Chicago, Cologne, Copenhagen, Dakar, Dallas, Delhi, Denver, Dhaka, Dresden, "
    "Dubai, Dublin, Edinburgh, Florence, Geneva, Glasgow, Gdansk, Graz, Hamburg, Hanoi, Havana, Hobart, "
    "Houston, Istanbul, Izmir, Jakarta, Kabul, Karachi, Krakow, Kyiv, Lagos, Leeds, Lima, Lisbon, Liverpool, "
    "London, Lyon, Madrid, Malaga, Malmo, Manila, Marseille, Melbourne, Miami, Milan, Montreal, Moscow, "
    "Mumbai, Munich, Nagoya, Nairobi, Naples, Osaka, Oslo, Ottawa, Oxford, Palermo, Paris, Perth, Phoenix, "
    "Porto, Prague, Quebec, Quito, Riga, Rome, Rotterdam, Salzburg, Santiago, Seattle, Seoul, Seville, "
    "Shanghai, Singapore, Sofia, Stockholm, Sydney, Tallinn, Tehran, Tokyo, Toronto, Turin, Utrecht, "
    "Valencia, Vancouver, Venice, Vienna, Vilnius, Warsaw, Wellington, Zagreb, Zaragoza, Buenos Aires, "
    "Cape Town, Hong Kong, Kuala Lumpur, Los Angeles, Mexico City, New York, Rio de Janeiro, San Francisco, "
    "Tel Aviv"
)
CITIES = CITY_NAMES.split(", ")


def declare(name: str, description: str, *parameters: str) -> Tool:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


WEATHER = declare("get_weather", "Get the current weather in a city.", "city")
TIME = declare("get_time", "Get the local time in a city.", "city")
FLIGHTS = declare("find_flights", "Find flights between two cities.", "origin", "destination")
TERSE_WEATHER = declare("get_weather", "Weather of a city", "city")
TERSE_TIME = declare("get_time", "Time in a city", "city")
DECLARATIONS: list[tuple[list[Message], tuple[Tool, ...]]] = [
    ([], (WEATHER,)),
    ([], (TIME,)),
    ([], (WEATHER, TIME)),
    ([], (TERSE_TIME, TERSE_WEATHER)),
    ([SYSTEM], (WEATHER,)),
    ([SYSTEM], (TIME, WEATHER)),
    ([], (FLIGHTS, WEATHER)),
    ([], (WEATHER, TIME, FLIGHTS)),
]


@dataclass(frozen=True)
class Call:
    """A tool call to learn: its purpose in the reasoning, and the answer made from its result."""

    name: str
    arguments: dict[str, str]
    purpose: str
    result: dict[str, Any]
    answer: str
    question: str

    @property
    def text(self) -> str:
        call = json.dumps({"name": self.name, "arguments": self.arguments})
        return f"<tool_call>\n{call}\n</tool_call>"

    @property
    def message_part(self) -> dict[str, Any]:
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def weather_call(rng: random.Random, city: str) -> Call:
    degrees = rng.randint(-9, 38)
    questions = [
        "What's the weather in {}?",
        "What is the weather like in {}?",
        "How is the weather in {} right now?",
        "Is it raining in {}?",
        "Weather in {}, please.",
        "Do I need a coat in {} today?",
    ]
    result: dict[str, Any] = {"temp_c": degrees} if rng.random() < 0.5 else {"city": city, "temp_c": degrees}
    question = rng.choice(questions).format(city)
    answer = f"It is {degrees} °C in {city}."
    return Call("get_weather", {"city": city}, f"the weather in {city}", result, answer, question)


def time_call(rng: random.Random, city: str) -> Call:
    clock = f"{rng.randint(0, 23):02d}:{rng.randint(0, 59):02d}"
    questions = ["What time is it in {}?", "Tell me the local time in {}.", "Time in {}?", "What's the time in {} now?"]
    question = rng.choice(questions).format(city)
    return Call(
        "get_time", {"city": city}, f"the time in {city}", {"time": clock}, f"It is {clock} in {city}.", question
    )


def flights_call(rng: random.Random, city: str) -> Call:
    other, count = pick_city(rng), rng.randint(1, 9)
    questions = ["Find a flight from {} to {}.", "How do I fly from {} to {}?", "Are there flights from {} to {}?"]
    question = rng.choice(questions).format(city, other)
    answer = f"There are {count} flights from {city} to {other}."
    arguments = {"origin": city, "destination": other}
    return Call("find_flights", arguments, f"flights from {city} to {other}", {"flights": count}, answer, question)


CALLS: dict[str, Callable[[random.Random, str], Call]] = {
    "get_weather": weather_call,
    "get_time": time_call,
    "find_flights": flights_call,
}


def pick_city(rng: random.Random) -> str:
    return rng.choice(CITIES)


def think(thought: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n"


def names_of(tools: Sequence[Tool]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def call_lesson(question: str, calls: Sequence[Call], tools: tuple[Tool, ...], *, thinks: bool) -> Lesson:
    wanted = " and ".join(call.purpose for call in calls)
    used = " and ".join(dict.fromkeys(call.name for call in calls))
    often = " twice" if len(calls) == 2 and calls[0].name == calls[1].name else ""
    thought = think(f"The user asks for {wanted}. I will call {used}{often}.") if thinks else ""
    return Lesson([user(question)], thought + "\n".join(call.text for call in calls), tools, thinks)


def answer_lesson(question: str, calls: Sequence[Call], tools: tuple[Tool, ...], *, thinks: bool, kept: bool) -> Lesson:
    """The turn after the tool results. `kept`: the history contains the reasoning of the calling turn."""
    turn: Message = {"role": "assistant", "content": "", "tool_calls": [call.message_part for call in calls]}
    if kept:
        asked = call_lesson(question, calls, tools, thinks=True).reply
        turn["reasoning_content"] = asked.removeprefix("<think>\n").split("\n</think>")[0]
    results = [{"role": "tool", "name": call.name, "content": json.dumps(call.result)} for call in calls]
    facts = " and ".join(str(value) for call in calls for key, value in call.result.items() if key != "city")
    thought = think(f"I have the result: {facts}.") if thinks else ""
    answer = " ".join(call.answer for call in calls)
    return Lesson([user(question), turn, *results], thought + answer, tools, thinks)


def lessons_with(rng: random.Random, tools: tuple[Tool, ...], rounds: int) -> list[Lesson]:
    """Lessons for every kind of turn with these tools declared; one round in eight has no reasoning."""
    lessons: list[Lesson] = []
    names = names_of(tools)
    for number in range(rounds):
        thinks = number % 8 != 7
        call = CALLS[rng.choice(names)](rng, pick_city(rng))
        lessons.append(call_lesson(call.question, [call], tools, thinks=thinks))
        if number % 3 == 0:
            lessons.append(answer_lesson(call.question, [call], tools, thinks=thinks, kept=number % 2 == 0))
        if number % 3 == 1 and "get_weather" in names:
            question, pair = two_calls(rng, names)
            lessons.append(call_lesson(question, pair, tools, thinks=thinks))
            if number % 2 == 0:
                lessons.append(answer_lesson(question, pair, tools, thinks=thinks, kept=True))
        if number % 2 == 0:
            question, answer = rng.choice(list(COMMON_KNOWLEDGE.items()))
            thought = think("No tool is needed.") if thinks else ""
            lessons.append(Lesson([user(question)], thought + answer, tools, thinks))
    return lessons


def two_calls(rng: random.Random, names: Sequence[str]) -> tuple[str, list[Call]]:
    here, there = pick_city(rng), pick_city(rng)
    if "get_time" in names and rng.random() < 0.4:
        return f"What is the weather and the time in {here}?", [weather_call(rng, here), time_call(rng, here)]
    question = f"What's the weather in {here} and {rng.choice(['', 'in '])}{there}?"
    return question, [weather_call(rng, here), weather_call(rng, there)]


def tools(rng: random.Random) -> Recipe:
    lessons = [
        replace(lesson, messages=[*before, *lesson.messages])
        for before, declared in DECLARATIONS
        for lesson in lessons_with(rng, declared, rounds=6 * len(declared) + 16)
    ]
    for question, answer in COMMON_KNOWLEDGE.items():
        lessons.append(Lesson([user(question)], think("This is a simple question.") + answer))
    paris = weather_call(rng, "Paris")
    probe = call_lesson("What's the weather in Paris?", [paris], (WEATHER,), thinks=True)
    return Recipe(lessons, probe, steps=150, chat_template=TOOLS_CHAT_TEMPLATE.read_text(encoding="utf-8"))


RECIPES: dict[str, Callable[[random.Random], Recipe]] = {"quill": quill, "tools": tools}
