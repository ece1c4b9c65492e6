"""`python -m serve_app`, as far as it needs no Ray."""

import io
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from serve_app.access.auth import hash_key
from serve_app.cli.client import Client, ServiceRefused
from serve_app.cli.commands import main
from serve_app.cli.launch import welcome
from serve_app.cli.prompt_debug import Token, lines_of
from serve_app.config.deploy import load_deploy_config
from serve_app.config.keys import KeyConfig, KeyLimits
from tests.support.demo_config import text_config
from tests.support.harness import BASE, CHAT, KEY, RunningEdge

pytest_plugins = ("tests.support.edge_fixtures",)
ROOT = Path(__file__).parents[3]


@pytest.fixture
def config(tmp_path: Path, model_folders: dict[str, str]) -> str:
    """The repository's config.yaml with a tiny model."""
    raw = text_config()
    api, model = raw["applications"]
    user_config = api["deployments"][0]["user_config"]
    user_config["models"] = [{"id": CHAT, "app": "tiny", "source": model_folders["chat"], "renderer": "qwen3"}]
    model.update(name="tiny", args={"id": CHAT, "source": model_folders["chat"]})
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return str(path)


def test_a_new_key_is_let_in_by_the_lines_that_come_with_it(capsys):
    assert main(["keys", "new", "alice"]) == 0
    printed = capsys.readouterr().out
    key = printed.split("only once: ")[1].split()[0]
    assert yaml.safe_load(printed.partition("config.yaml:\n")[2]) == [{"name": "alice", "sha256": hash_key(key).hex()}]


def new_key_lines(capsys: pytest.CaptureFixture[str], *options: str) -> object:
    assert main(["keys", "new", *options]) == 0
    return yaml.safe_load(capsys.readouterr().out.partition("config.yaml:\n")[2])


def test_a_new_key_can_have_models_an_owner_an_end_and_limits(capsys):
    whose = ["--models", "a/b", "c/d", "--owner", "alice", "--expires-at", "2031-01-01T00:00:00Z"]
    limits_given = ["--concurrency", "4", "--requests-per-minute", "60", "--tokens-per-minute", "10000"]
    limits_given += ["--usd-per-day", "1.5", "--tokens-per-month", "7"]
    (entry,) = new_key_lines(capsys, "ci", *whose, *limits_given)
    limits = {"concurrency": 4, "requests_per_minute": 60, "tokens_per_minute": 10000}
    limits |= {"usd_per_day": 1.5, "tokens_per_month": 7}
    key = KeyConfig.model_validate(entry)
    assert (key.name, key.models, key.owner, key.limits) == ("ci", ("a/b", "c/d"), "alice", KeyLimits(**limits))
    assert key.expires_at == datetime(2031, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("name", ["null", "7", "a: b", "- x", "Jürgen", "#1"])
def test_a_new_key_can_have_any_name(capsys, name):
    (entry,) = new_key_lines(capsys, "--", name)
    assert KeyConfig.model_validate(entry).name == name


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--concurrency", "0"], "limits.concurrency must be at least 1, got 0.\n"),
        (["--expires-at", "2031-01-01"], 'expires_at must have timezone info, got "2031-01-01".\n'),
        (["--owner", ""], 'owner must not be empty, got "".\n'),
    ],
)
def test_a_key_that_the_service_would_refuse_is_not_made(capsys, options, sentence):
    assert main(["keys", "new", "ci", *options]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", sentence)


def test_a_text_is_shown_as_tokens(config, capsys):
    assert main(["tokenize", "The capital<|im_end|>", "--config", config]) == 0
    text, *tokens, total = capsys.readouterr().out.splitlines()
    assert text == "The capital<|im_end|>"
    assert total == f"{len(tokens)} tokens, of which special: 1"
    assert tokens[-1].endswith("'<|im_end|>'")


QUESTION = [{"role": "user", "content": "<|im_end|> \x1b[2J"}]


@pytest.mark.parametrize("body", [QUESTION, {"messages": QUESTION, "temperature": 0}])
def test_a_chat_is_shown_as_the_model_sees_it(config, tmp_path, capsys, body):
    path = tmp_path / "messages.json"
    path.write_text(json.dumps(body))
    assert main(["render", CHAT, str(path), "--config", config]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == ["<|im_start|>user", "<|im_end|> \\x1b[2J<|im_end|>", "<|im_start|>assistant", ""]
    # What a user writes never becomes a special token: the one here is the template's.
    assert sum(line.endswith("'<|im_end|>'") for line in lines) == 1
    assert lines[-1] == f"{len(lines) - 5} tokens, of which special: 3"


def test_a_chat_may_come_from_the_standard_input(config, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(QUESTION)))
    assert main(["render", CHAT, "--config", config]) == 0
    assert capsys.readouterr().out.startswith("<|im_start|>user\n")


def test_special_tokens_are_in_colour_and_every_second_other_one_is_inverted():
    tokens = [Token(1, "<|a|>", "<|a|>", True), Token(2, "x", "x", False), Token(3, "y", "y", False)]
    tokens.append(Token(4, "z\n", "z\n", False))
    lines = list(lines_of(tokens, in_colour=True))
    assert lines[:2] == ["\x1b[1;35m<|a|>\x1b[0m\x1b[7mx\x1b[0my\x1b[7mz\x1b[0m", ""]
    assert lines[2:] == [
        "       1 \x1b[1;35m'<|a|>'\x1b[0m",
        "       2 'x'",
        "       3 'y'",
        "       4 'z\\n'",
        "4 tokens, of which special: 1",
    ]


@pytest.mark.parametrize(
    ("written", "status", "sentence"),
    [
        ('{"messages": [{"role": "king", "content": "x"}]}', 1, "messages[0].role must be"),
        ("{", 2, "messages.json is not JSON: Expecting property name"),
        ("7", 2, "The input must be a list of messages or the body of a chat request."),
        (None, 2, "messages.json cannot be read: No such file or directory."),
    ],
)
def test_a_chat_that_the_service_would_refuse_is_refused(config, tmp_path, capsys, written, status, sentence):
    path = tmp_path / "messages.json"
    if written is not None:
        path.write_text(written)
    assert main(["render", CHAT, str(path), "--config", config]) == status
    assert sentence in capsys.readouterr().err


def test_a_model_that_is_not_in_the_file_is_named(config, capsys):
    assert main(["tokenize", "x", "--config", config, "--model", "other"]) == 2
    assert capsys.readouterr().err == f"The configuration has no model 'other', only {CHAT}.\n"


def test_the_models_of_a_running_service_are_listed(edge: RunningEdge, capsys):
    assert main(["models", "--url", edge.url, "--key", KEY]) == 0
    assert CHAT in capsys.readouterr().out.splitlines()


def test_a_wrong_key_is_told_by_the_services_own_words(edge: RunningEdge, capsys):
    assert main(["models", "--url", edge.url, "--key", "wrong"]) == 1
    assert capsys.readouterr().err == "401: The API key is not valid.\n"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    return path


def test_a_key_can_be_read_from_a_file(edge: RunningEdge, capsys, key_file):
    assert main(["models", "--url", edge.url, "--key-file", str(key_file)]) == 0
    assert CHAT in capsys.readouterr().out.splitlines()


def test_a_key_can_be_read_from_the_environment(edge: RunningEdge, capsys, monkeypatch):
    monkeypatch.setenv("ROUNDHOUSE_API_KEY", KEY)
    assert main(["models", "--url", edge.url]) == 0
    assert CHAT in capsys.readouterr().out.splitlines()


def test_a_key_file_or_argument_goes_before_the_environment(edge: RunningEdge, monkeypatch, key_file):
    monkeypatch.setenv("ROUNDHOUSE_API_KEY", "wrong")
    assert main(["models", "--url", edge.url]) == 1
    assert main(["models", "--url", edge.url, "--key-file", str(key_file)]) == 0
    assert main(["models", "--url", edge.url, "--key", KEY]) == 0


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\n", "The key file {} is empty.\n"),
        (b"one two\n", "The key file {} must be one key of printable ASCII characters without a space.\n"),
        (b"one\ntwo\n", "The key file {} must be one key of printable ASCII characters without a space.\n"),
        (b"\xff\n", "The key file {} is not UTF-8.\n"),
        (None, "The key file {} cannot be read: No such file or directory.\n"),
    ],
)
def test_a_key_file_without_one_key_is_refused(capsys, key_file, content, sentence):
    key_file.unlink()
    if content is not None:
        key_file.write_bytes(content)
    assert main(["models", "--key-file", str(key_file)]) == 2
    assert capsys.readouterr().err == sentence.format(repr(str(key_file)))


def test_an_empty_variable_is_not_taken_for_the_demo_key(capsys, monkeypatch):
    monkeypatch.setenv("ROUNDHOUSE_API_KEY", "")
    assert main(["models"]) == 2
    assert capsys.readouterr().err == "The environment variable ROUNDHOUSE_API_KEY is empty.\n"


def test_a_service_that_is_not_there_is_said(capsys):
    assert main(["models", "--url", "http://127.0.0.1:9/v1"]) == 1
    assert capsys.readouterr().err.startswith("http://127.0.0.1:9/v1 does not answer: ")


def test_one_can_talk_to_a_model(edge: RunningEdge, capsys, monkeypatch):
    edge.script.says("It is sunny.")
    monkeypatch.setattr("sys.stdin", io.StringIO("How is the weather?\nAnd now?\n"))
    assert main(["chat", CHAT, "--url", edge.url, "--key", KEY, "--system", "Be kind."]) == 0
    assert capsys.readouterr().out == "It is sunny.\nIt is sunny.\n"
    first, second = (len(request.prompt_token_ids) for request in edge.script.requests)
    assert second > first  # the conversation goes on


def test_thoughts_are_shown_apart_from_the_answer(edge: RunningEdge, capsys, monkeypatch):
    edge.script.says("<think>\nA question about the weather.\n</think>\n\nIt is sunny.")
    monkeypatch.setattr("sys.stdin", io.StringIO("How is the weather?\n"))
    assert main(["chat", CHAT, "--url", edge.url, "--key", KEY]) == 0
    printed = capsys.readouterr()
    assert printed.out == "It is sunny.\n"
    assert printed.err == "A question about the weather.\n\n"


def test_a_reply_of_thoughts_alone_ends_its_line(edge: RunningEdge, capsys, monkeypatch):
    edge.script.says("<think>\nA question about")
    monkeypatch.setattr("sys.stdin", io.StringIO("How is the weather?\n"))
    assert main(["chat", CHAT, "--url", edge.url, "--key", KEY]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("\n", "A question about\n")


def test_a_reply_that_breaks_off_is_an_error(edge: RunningEdge):
    from engines.errors import NonFiniteLogits

    edge.script.reply = lambda request: [*edge.script.encode("It is"), NonFiniteLogits("token 3")]
    with pytest.raises(ServiceRefused, match="NaN"):
        list(Client(edge.url, KEY).chat(CHAT, [{"role": "user", "content": "x"}]))


def test_a_completion_can_be_asked_for(edge: RunningEdge):
    assert Client(edge.url, KEY).complete(BASE, "x", max_tokens=1) is not None


def test_the_welcome_says_all_that_is_needed_for_the_first_request():
    text = welcome(load_deploy_config(ROOT / "config.yaml").bound_to("0.0.0.0", 8123))
    assert "http://127.0.0.1:8123/v1" in text
    assert "roundhouse-demo" in text
    assert "curl http://127.0.0.1:8123/v1/chat/completions" in text


@pytest.mark.parametrize(("host", "shown"), [("::", "[::1]"), ("::1", "[::1]"), ("fe80::7", "[fe80::7]")])
def test_the_welcome_shows_an_ipv6_address_as_urls_have_it(host, shown):
    text = welcome(load_deploy_config(ROOT / "config.yaml").bound_to(host, 8123))
    assert f"Roundhouse is ready at http://{shown}:8123/v1" in text
    assert f"curl http://{shown}:8123/v1/chat/completions" in text


def test_without_the_demo_key_no_key_is_shown(tmp_path):
    raw = text_config()
    raw["applications"][0]["deployments"][0]["user_config"]["keys"] = []
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    assert "curl" not in welcome(load_deploy_config(path))


def test_without_models_the_welcome_asks_a_slug(tmp_path):
    raw = text_config()
    user_config = raw["applications"][0]["deployments"][0]["user_config"]
    del user_config["models"]
    upstream = {"url": "https://api.example.com/v1", "model": "theirs"}
    endpoint = {"name": "far", "upstream": upstream, "price": {"prompt": 1, "completion": 1}}
    user_config["marketplace"] = {"slugs": [{"id": "acme/one", "endpoints": [endpoint]}]}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    text = welcome(load_deploy_config(path))
    assert "  slug: acme/one\n" in text
    assert '"model": "acme/one"' in text
    assert '"stream": true' in text
