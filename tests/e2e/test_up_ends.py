"""How `python -m serve_app up` ends: refused, failed, without its Ray, interrupted; and two on one machine."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from serve_app.config.deploy import free_port
from tests.support.engines import engine_harness
from tests.support.files.tiny_tokenizer import save_model_folder
from tests.support.processes.running_up import MODEL, ROOT, Up, processes, title, with_catalogue, write
from tests.support.waiting import eventually


def test_a_port_in_use_is_said_before_anything_starts(config, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        started = time.monotonic()
        status, printed = Up(write(config, tmp_path), "--port", str(port)).end(signal.SIGCONT)
    assert status == 2
    assert printed.startswith(f"Port {port} on 127.0.0.1 is in use by another process")
    assert "--port" in printed
    assert time.monotonic() - started < 20


def test_a_mistake_in_the_file_is_said_before_anything_starts(config, tmp_path):
    broken = {**config, "applications": [{**config["applications"][0], "args": {"replica": 2}}]}
    status, printed = Up(write(broken, tmp_path)).end(signal.SIGCONT)
    assert status == 2
    assert "applications[0] (api): replica is not a known key. Did you mean 'replicas'?\n" in printed
    assert status == 2


def test_a_key_that_cannot_be_read_is_said_before_anything_starts(config, tmp_path):
    broken = with_catalogue(config, keys=[{"name": "ci", "env": "NO_SUCH_VARIABLE_HERE"}])
    status, printed = Up(write(broken, tmp_path)).end(signal.SIGCONT)
    assert status == 2
    assert printed == "The key 'ci' is empty in the environment variable 'NO_SUCH_VARIABLE_HERE'.\n"


@pytest.mark.slow
@pytest.mark.alone
def test_a_catalogue_that_the_ingress_refuses_ends_it_with_the_reason(config, model_folder, monkeypatch, tmp_path):
    """The ingress' relative paths start elsewhere than those of this machine's `check`."""
    folder = Path(model_folder)
    monkeypatch.setenv("ROUNDHOUSE_ROOT", str(folder.parent))
    (served,) = config["applications"][0]["deployments"][0]["user_config"]["models"]
    models = [{**served, "source": f"./{folder.name}"}]
    broken = with_catalogue(config, models=models, checkpoints={"roots": [str(tmp_path)]})
    broken["applications"][0]["runtime_env"] = {"env_vars": {"ROUNDHOUSE_ROOT": "/nowhere"}}
    with Up(write(broken, tmp_path), "--port", str(free_port())) as up:
        up.read_until("failed to deploy: ")  # Serve tries three times: on a busy machine longer than `end` waits
        status, printed = up.end(signal.SIGCONT)
    assert status == 1
    reason = f"The source of the model '{MODEL}' does not exist: '/nowhere/{folder.name}'."
    assert f"The application 'api' failed to deploy: {reason}" in printed
    assert up.left_over() == []


def test_when_serve_dies_early_it_says_so_and_leaves_nothing(config, tmp_path):
    with Up(write(config, tmp_path), "--port", str(free_port())) as up:
        up.read_until("Starting Ray")
        children: list[int] = []

        def has_child() -> bool:
            children[:] = [pid for pid in processes(up) if "serve_app.cli.driver" in title(pid)]
            return bool(children)

        eventually(has_child, 20)
        os.kill(children[0], signal.SIGKILL)
        status, printed = up.end(signal.SIGCONT)
    assert status == 1
    assert "Ray Serve ended with status -9. The log is " in printed
    assert up.left_over() == []


def test_a_model_that_cannot_be_started_is_said_before_anything_starts(config, model_folder, tmp_path):
    api, model = config["applications"]
    args = {"id": MODEL, "source": model_folder, "cpus_per_replica": 0.1}
    broken = write({**config, "applications": [api, {**model, "args": args}]}, tmp_path)
    status, printed = Up(broken).end(signal.SIGCONT)
    assert status == 2
    reason = f"The folder '{model_folder}' holds no weights, such as model.safetensors."
    assert printed == f"applications (smollm2-135m): {reason}\n"


@pytest.mark.slow
@pytest.mark.alone
def test_a_model_that_cannot_be_loaded_is_named_with_the_reason(config, tmp_path):
    """Its weights are of another size than it says: to see that they have to be loaded."""
    source = save_model_folder(tmp_path / "model")
    for file in engine_harness.model_folder("llama").iterdir():
        shutil.copy(file, source)
    facts = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**facts, "intermediate_size": 77}))
    api, model = config["applications"]
    (served,) = api["deployments"][0]["user_config"]["models"]
    broken = with_catalogue(config, models=[{**served, "source": str(source)}])
    broken["applications"][1] = {**model, "args": {"id": MODEL, "source": str(source), "cpus_per_replica": 0.1}}
    with Up(write(broken, tmp_path), "--port", str(free_port())) as up:
        up.read_until("failed to deploy: ")  # three times torch is loaded first
        status, printed = up.end(signal.SIGCONT)
    assert status == 1
    assert "The application 'smollm2-135m' failed to deploy: " in printed
    assert "in model.safetensors has the shape [64, 96], its configuration asks for [64, 77]" in printed
    assert up.left_over() == []


@pytest.mark.slow
@pytest.mark.alone
def test_two_signals_end_it_at_once(config, tmp_path):
    with Up(write(config, tmp_path), "--port", str(free_port())) as up:
        up.read_until("Starting Ray")
        eventually(lambda: any("raylet" in title(pid) for pid in processes(up)))
        up.process.send_signal(signal.SIGTERM)
        up.read_until("Stopping")
        asked_at = time.monotonic()
        status, printed = up.end(signal.SIGTERM)
    assert status == 0
    assert "Stopping at once." in printed
    assert time.monotonic() - asked_at < 15
    assert up.left_over() == []


def raylet_of(up: Up) -> int:
    (pid,) = [pid for pid in processes(up) if Path(title(pid).split(" ")[0]).name == "raylet"]
    return pid


@pytest.mark.slow
@pytest.mark.alone
def test_two_run_side_by_side_and_a_dead_raylet_ends_its_own(config, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    ports = [free_port(), free_port()]
    with (
        Up(write(config, tmp_path / "a"), "--port", str(ports[0])) as one,
        Up(write(config, tmp_path / "b"), "--port", str(ports[1])) as other,
    ):
        for up in (one, other):
            up.read_until("-d ")
            assert up.command("to change it").returncode == 0
        os.kill(raylet_of(one), signal.SIGKILL)
        killed_at = time.monotonic()
        status, printed = one.end(signal.SIGCONT)
        assert time.monotonic() - killed_at < 10
        assert status == 1
        assert printed.count("Ray's raylet has ended unexpectedly; the service cannot continue without it.") == 1
        assert one.left_over() == []
        assert httpx.get(f"http://127.0.0.1:{ports[1]}/readyz").status_code == 200


@pytest.mark.slow
@pytest.mark.alone
def test_a_ray_that_is_not_up_in_time_is_tried_again(config, tmp_path):
    with Up(write(config, tmp_path), "--port", str(free_port())) as up:
        up.read_until("Starting Ray")
        eventually(lambda: any(Path(title(pid).split(" ")[0]).name == "raylet" for pid in processes(up)))
        os.kill(raylet_of(up), signal.SIGSTOP)
        up.read_until("Trying again, 2 of 3.")
        up.read_until("is ready")
        assert "Traceback" not in "".join(up.printed)


BARE_CLUSTER = """
import signal, sys, ray
from ray import serve
memory = {"object_store_memory": 100 << 20}
context = ray.init(address="local", num_cpus=8, include_dashboard=True, _temp_dir=sys.argv[1], **memory)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell started in the background
print(f"http://{context.dashboard_url}", flush=True)
try:
    signal.pause()
except KeyboardInterrupt:
    serve.shutdown()
"""


@pytest.mark.slow
@pytest.mark.alone
def test_a_first_deployment_into_another_cluster_does_not_get_in_the_way_of_a_service(config, tmp_path):
    """Both would want HAProxy's usual ports; Ray's token comes from the environment, as its documentation has it."""
    with Up(write(config, tmp_path), "--port", str(free_port())) as up:
        up.read_until("is ready")
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        cluster = subprocess.Popen(
            [sys.executable, "-c", BARE_CLUSTER, up.folder + "/ray"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert cluster.stdout is not None
            dashboard = next(line.strip() for line in cluster.stdout if line.startswith("http"))
            port = free_port()
            deploy = ["deploy", "--config", str(tmp_path / "config.yaml"), "--port", str(port), "--address", dashboard]
            command = [sys.executable, "-m", "serve_app", *deploy]
            done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=180)
            assert done.returncode == 0, done.stderr
            eventually(lambda: httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200)
        finally:
            cluster.send_signal(signal.SIGINT)
            cluster.wait(90)
