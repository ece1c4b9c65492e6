"""config.yaml as a whole."""

import copy
import errno
import socket
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.base.errors import ConfigRefused
from serve_app.config.deploy import (
    DeployConfig,
    free_port,
    free_ports,
    is_free,
    load_deploy_config,
    require_free,
)
from serve_app.config.keys import DEMO_KEY
from serve_app.config.proxy import CONNECTIONS_PER_SOURCE, HEALTH_PORT
from tests.support.processes.demo_config import text_config

ROOT = Path(__file__).parents[3]
STATS_PORT = "RAY_SERVE_HAPROXY_STATS_PORT"


@pytest.fixture
def raw() -> dict[str, Any]:
    loaded: dict[str, Any] = text_config()
    return loaded


@pytest.fixture
def load(tmp_path: Path):
    def write_and_load(raw: object) -> DeployConfig:
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(raw))
        return load_deploy_config(path)

    return write_and_load


def refusal(load, raw: object) -> list[str]:
    with pytest.raises(ConfigRefused) as refused:
        load(raw)
    return str(refused.value).splitlines()


def environment(config: DeployConfig) -> dict[str, str]:
    variables: dict[str, str] = config.raw["controller_options"]["runtime_env"]["env_vars"]
    return variables


def test_the_config_of_the_repository_is_in_order_and_is_the_demo():
    config = load_deploy_config(ROOT / "config.yaml")
    assert config.model_ids == ["HuggingFaceTB/SmolLM2-135M-Instruct", "roundhouse/tiny-vision"]
    assert config.has_demo_key
    assert (config.host, config.port) == ("127.0.0.1", 8000)
    assert DEMO_KEY not in (ROOT / "config.yaml").read_text().replace('"roundhouse-demo"', "")


def test_everything_that_is_wrong_is_said_at_once(load, raw):
    raw["applications"][0]["args"]["replica"] = 2
    raw["applications"][1]["args"]["max_runing"] = 3
    assert refusal(load, raw) == [
        "applications[0] (api): replica is not a known key. Did you mean 'replicas'?",
        "applications[1] (smollm2-135m): max_runing is not a known key. Did you mean 'max_running'?",
    ]


def test_a_mistake_in_the_catalogue_is_found(load, raw):
    raw["applications"][0]["deployments"][0]["user_config"]["models"][0]["sorce"] = "x"
    assert refusal(load, raw) == ["applications[0] (api): models[0].sorce is not a known key. Did you mean 'source'?"]


def test_a_model_of_the_catalogue_must_have_an_application(load, raw):
    raw["applications"][1]["name"] = "other"
    (sentence,) = refusal(load, raw)
    assert "names the application 'smollm2-135m', which is not in this file." in sentence


@pytest.mark.parametrize(
    ("served", "args", "sentences"),
    [
        ({"source": "/a"}, {"source": "/b"}, ["the source of {id} must be that {app}, '/b', got '/a'."]),
        ({"source": "./a"}, {"source": str(ROOT / "a")}, []),
        ({}, {"revision": "v1"}, ["the revision of {id} must be that {app}, 'v1', got None."]),
        ({"revision": "v1"}, {"revision": "v1"}, []),
        ({}, {"context_length": 4096}, ["{id} needs a context_length of at most 4096, which is that {app}."]),
        (
            {"context_length": 8192, "variants": {"peft:4096": 4096, "peft:4097": 4097}},
            {"context_length": 4096},
            [
                "the context_length of {id} must be at most that {app}, 4096, got 8192.",
                "the context_length of {id:peft:4097} must be at most that {app}, 4096, got 4097.",
            ],
        ),
        ({"context_length": 4096}, {"context_length": 4096}, []),
        ({"context_length": 4096}, {"context_length": 8192}, []),
        ({"source": "/a"}, {"source": "/b", "engine": "fake"}, []),
    ],
)
def test_what_the_catalogue_says_must_be_what_the_models_application_keeps(load, raw, served, args, sentences):
    raw["applications"][0]["deployments"][0]["user_config"]["models"][0].update(served)
    raw["applications"][1]["args"].update(args)
    model, app = "HuggingFaceTB/SmolLM2-135M-Instruct", "of its application 'smollm2-135m'"
    said = [
        "models: "
        + text.replace("{id}", repr(model)).replace("{id:peft:4097}", repr(f"{model}:peft:4097")).replace("{app}", app)
        for text in sentences
    ]
    if said:
        assert refusal(load, raw) == said
    else:
        load(raw)


def test_an_api_without_a_catalogue_is_refused(load, raw):
    del raw["applications"][0]["deployments"]
    assert refusal(load, raw) == [
        "applications[0] (api): deployments must have one named 'ingress' with a user_config."
    ]


@pytest.mark.parametrize("raw", [[], {}, {"applications": {}}, "text"])
def test_what_is_no_config_is_refused(load, raw):
    assert "must be an object with a list of applications." in refusal(load, raw)[0]


def test_an_application_must_be_an_object_with_a_name(load, raw):
    raw["applications"].append("text")
    assert refusal(load, raw) == ["applications[2] must be an object with a name."]


def test_a_file_that_is_not_there_or_not_yaml_is_refused(tmp_path):
    with pytest.raises(ConfigRefused, match="cannot be read: No such file or directory"):
        load_deploy_config(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigRefused, match="is not YAML"):
        load_deploy_config(tmp_path / "bad.yaml")


def test_applications_of_others_are_left_alone(load, raw):
    raw["applications"].append({"name": "mine", "import_path": "my.module:app", "args": {"anything": 1}})
    assert list(load(raw).apps) == ["api", "smollm2-135m"]


def test_host_and_port_can_be_chosen(load, raw):
    config = load(raw)
    moved = config.bound_to("0.0.0.0", 9000)
    assert (moved.host, moved.port) == ("0.0.0.0", 9000)
    assert moved.raw["http_options"] == {"host": "0.0.0.0", "port": 9000}
    assert config.bound_to(None, None).raw["http_options"] == raw["http_options"]


def test_haproxy_gets_ports_of_its_own(load, raw):
    before = copy.deepcopy(raw)
    config = load(raw)
    chosen = environment(config.with_own_ports())
    assert environment(config) == before["controller_options"]["runtime_env"]["env_vars"]
    ports = [int(value) for name, value in chosen.items() if name.endswith("_PORT")]
    assert len(set(ports)) == 5
    assert all(is_free("127.0.0.1", port) for port in ports)


def test_a_port_that_the_file_names_for_haproxy_is_kept_or_refused(load, raw):
    port = free_port()
    raw["controller_options"]["runtime_env"]["env_vars"][STATS_PORT] = str(port)
    config = load(raw)
    assert environment(config.with_own_ports())[STATS_PORT] == str(port)
    with socket.create_server(("0.0.0.0", port)), pytest.raises(ConfigRefused, match=f"Port {port} .* {STATS_PORT}"):
        config.with_own_ports()


def test_the_port_for_probes_moves_when_it_is_taken(load, raw):
    port = free_port()
    raw["controller_options"]["runtime_env"]["env_vars"][HEALTH_PORT] = str(port)
    config = load(raw)
    assert config.with_own_ports().health_port == port
    with socket.create_server(("127.0.0.1", port)):
        assert config.with_own_ports().health_port not in (None, port)


@pytest.mark.parametrize(("name", "least", "most"), [(HEALTH_PORT, 1, 65535), (CONNECTIONS_PER_SOURCE, 0, 1_000_000)])
@pytest.mark.parametrize("value", ["", "-1", "1.5", "many", "99999999999999999999999"])
def test_a_variable_for_haproxy_that_is_no_such_number_is_refused(load, raw, name, least, most, value):
    raw["controller_options"]["runtime_env"]["env_vars"][name] = value
    message = f"controller_options: {name} must be an integer from {least} to {most}, got {value!r}."
    assert refusal(load, raw) == [message]


def test_without_haproxy_no_port_is_needed(load, raw):
    del raw["controller_options"]
    config = load(raw)
    assert config.with_own_ports() == config


def test_a_port_may_be_written_as_a_string_and_nothing_else_is_taken_for_one(load, raw):
    raw["http_options"]["port"] = "8123"
    assert load(raw).port == 8123
    for value in (None, "many", 80.5, True):
        raw["http_options"]["port"] = value
        assert refusal(load, raw) == [f"http_options.port must be an integer, got {value!r}."]


def test_a_host_or_haproxy_port_of_the_wrong_type_is_refused(load, raw):
    raw["controller_options"]["runtime_env"]["env_vars"][STATS_PORT] = "many"
    with pytest.raises(ConfigRefused, match=f"^{STATS_PORT} must be an integer, got 'many'"):
        load(raw).with_own_ports()
    raw["http_options"]["host"] = 7
    assert refusal(load, raw) == ["http_options.host must be a string, got 7."]
    raw["http_options"] = ["x"]
    assert refusal(load, raw) == ["http_options must be an object."]


@pytest.mark.parametrize(
    ("host", "port", "sentence"),
    [
        ("127.0.0.1", 70000, "The port must be from 1 to 65535, got 70000."),
        ("127.0.0.1", 0, "The port must be from 1 to 65535, got 0."),
        ("127.0.0.1", -1, "The port must be from 1 to 65535, got -1."),
        ("203.0.113.1", 8000, "Port 8000 on '203.0.113.1' cannot be used: Cannot assign requested address."),
    ],
)
def test_an_address_that_cannot_be_is_refused_with_the_reason(host, port, sentence):
    with pytest.raises(ConfigRefused) as refused:
        require_free(host, port, "unused")
    assert str(refused.value) == sentence


def test_a_host_without_an_address_is_refused_by_its_name():
    with pytest.raises(ConfigRefused, match=r"^Port 8000 on 'no\.such\.host\.invalid' cannot be used: .*[Nn]ame"):
        require_free("no.such.host.invalid", 8000, "unused")


def test_a_port_that_only_the_system_may_open_is_not_said_to_be_taken(monkeypatch):
    def refuse(self, address):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ConfigRefused, match=r"^Port 80 on '127\.0\.0\.1' cannot be used: Permission denied\.$"):
        require_free("127.0.0.1", 80, "unused")


def test_free_ports_are_none_of_those_that_the_system_gives_to_clients():
    """A client of anybody could take such a port before the service opens it."""
    first, second = islice(free_ports(), 2)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert max(first, second) < client.getsockname()[1]
    assert first != second


def test_a_port_is_free_until_somebody_listens():
    port = free_port()
    assert is_free("127.0.0.1", port)
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free("127.0.0.1", port)
    assert is_free("127.0.0.1", port)
