"""The environment of every Ray that tests start. Ray reads it once, when it is imported: conftest.py sets it first."""

import os
import secrets


def set_ray_environment() -> None:
    os.environ.update(
        RAY_USAGE_STATS_ENABLED="0",
        RAY_AUTH_MODE="token",  # as Ray has it; a token of these tests, not one that Ray writes into the home folder
        RAY_AUTH_TOKEN=secrets.token_hex(32),
        RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S="1",
        RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S="60",  # as in config.yaml
        RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S="0.5",
        RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S="0.5",
        RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS="1",
        RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH="serve_app.proxy:middlewares",
    )
    os.environ.pop("RAY_ADDRESS", None)
