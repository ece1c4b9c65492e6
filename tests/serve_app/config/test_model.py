"""The arguments of the applications in config.yaml."""

from pathlib import Path

import pytest

from serve_app.base.errors import ConfigRefused
from serve_app.config.api import parse_api_args
from serve_app.config.model import parse_model_args
from serve_app.config.paths import resolve_path, resolve_source

MINIMAL = {"id": "m", "source": "owner/model"}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"max_runing": 3}, "max_runing is not a known key. Did you mean 'max_running'?"),
        ({"least_busy": 3}, "least_busy is now called load_floor."),
        ({"prefill_ratio": float("nan")}, "prefill_ratio must be a finite number, got NaN."),
        (
            {"health": {"build": "x"}},
            "health.build is not a known key; the keys here are stalled_after_s, restart_after_s, silent_after_s.",
        ),
        (
            {"fake": {"tokens_per_step": 2}},
            "fake.tokens_per_step is not a known key; the keys here are step_s, reply_tokens, vocab_size.",
        ),
        ({"id": None}, "id must be a string, got null."),
        ({"engine": "vllm"}, "engine must be 'torch' or 'fake', got \"vllm\"."),
        ({"gpus_per_replica": 65}, "gpus_per_replica must be at most 64, got 65."),
        ({"gpus_per_replica": 1.5}, "gpus_per_replica must be a whole number above 1, got 1.5."),
        (
            {"gpus_per_replica": 2, "tensor_parallel": 4},
            "tensor_parallel must be as many as gpus_per_replica, got 4.",
        ),
        ({"tensor_parallel": 2, "exact": True}, "tensor_parallel must be 1 with exact, not 2."),
        ({"max_running": 0}, "max_running must be at least 1, got 0."),
        ({"max_running": True}, "max_running must be an integer, got true."),
        ({"replicas": {"min": 3, "max": 2}}, "replicas.min must be at most max, which is 2, got 3."),
        (
            {"replicas": {"most": 2}},
            "replicas.most is not a known key; the keys here are "
            "min, max, look_back_period_s, upscale_delay_s, downscale_delay_s, target, target_kv, drain_s.",
        ),
        ({"health": {"stalled_after_s": 0}}, "health.stalled_after_s must be greater than 0, got 0."),
        ({"exact": True, "dtype": "bfloat16"}, "exact needs dtype float32, not 'bfloat16'."),
    ],
)
def test_what_is_wrong_with_a_model_is_said_in_one_sentence(change, sentence):
    with pytest.raises(ConfigRefused) as refused:
        parse_model_args({**MINIMAL, **change})
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"replica": 2}, "replica is not a known key. Did you mean 'replicas'?"),
        ({"transport": "grpc"}, "transport must be 'channel' or 'serve', got \"grpc\"."),
        ([], "args must be an object, got a list of 0."),
    ],
)
def test_what_is_wrong_with_the_api_is_said_in_one_sentence(args, sentence):
    with pytest.raises(ConfigRefused) as refused:
        parse_api_args(args)
    assert str(refused.value) == sentence


@pytest.mark.parametrize("args", [None, [], "x"])
def test_arguments_that_are_no_object_are_refused(args):
    with pytest.raises(ConfigRefused, match=r"^args must be an object, got "):
        parse_model_args(args)


def test_settings_reach_the_engine():
    args = parse_model_args({**MINIMAL, "max_running": 7, "dtype": "float32", "context_length": 99, "exact": True})
    config = args.engine_config()
    assert (config.source, config.max_running, config.dtype, config.context_length) == ("owner/model", 7, "float32", 99)
    assert config.exact


@pytest.mark.parametrize(
    ("gpus", "device", "tensor_parallel"), [(0, "cpu", 1), (0.5, "cuda", 1), (1, "cuda", 1), (2, "cuda", 2)]
)
def test_the_devices_follow_from_what_ray_reserves(gpus, device, tensor_parallel):
    config = parse_model_args({**MINIMAL, "gpus_per_replica": gpus}).engine_config()
    assert (config.device, config.tensor_parallel) == (device, tensor_parallel)


def test_the_fake_engine_takes_the_limits_of_the_model():
    args = parse_model_args({**MINIMAL, "engine": "fake", "max_waiting": 5, "fake": {"step_s": 0, "vocab_size": 500}})
    config = args.fake_config()
    assert (config.max_waiting, config.step_s, config.vocab_size, config.context_length) == (5, 0, 500, 32_768)


def test_autoscaling_aims_below_the_batch_so_that_there_is_room_until_the_next_replica_is_up():
    assert parse_model_args({**MINIMAL, "max_running": 64}).target_requests == 51
    assert parse_model_args({**MINIMAL, "max_running": 1}).target_requests == 1
    assert parse_model_args({**MINIMAL, "replicas": {"target": 9}}).target_requests == 9


@pytest.mark.parametrize("source", [".cache/models/m", "./m", "models/m.gguf"])
def test_relative_sources_start_at_the_project_root(source, monkeypatch):
    monkeypatch.setenv("ROUNDHOUSE_ROOT", "/srv/project")
    assert resolve_source(source) == f"/srv/project/{source.removeprefix('./')}"


@pytest.mark.parametrize("source", ["owner/model", "/models/m", "/models/m.gguf"])
def test_hub_ids_and_absolute_sources_stay_as_they_are(source):
    assert resolve_source(source) == source


def test_without_the_variable_the_project_root_is_the_checkout(monkeypatch):
    monkeypatch.delenv("ROUNDHOUSE_ROOT", raising=False)
    assert resolve_path("config.yaml") == str(Path(__file__).parents[3] / "config.yaml")


def test_urls_are_no_paths():
    assert resolve_path("s3://bucket/runs") == "s3://bucket/runs"
