"""The text of HAProxy's configuration. What it does: `test_haproxy.py`."""

from pathlib import Path

import pytest
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

from serve_app.proxy.error_pages import Pages
from serve_app.proxy.haproxy_config import Hardening, TemplateChanged, harden

SERVES = """global
    stats socket /tmp/admin.sock mode 666 level admin
    maxconn 4096
    tune.bufsize 16384
defaults
    errorfile 503 /tmp/500.http
frontend prometheus
    bind :9101
frontend http_frontend
    bind 127.0.0.1:8000
    default_backend default_backend
backend default_backend
    http-request return status 404
listen stats
  bind *:8404
"""
HARDENING = Hardening(Pages({}, Path("/tmp/431.json")), max_connections=1000)


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ("mode 666", "The section 'global' has no 'mode 666'."),
        ("    maxconn 4096", "The section 'global' has no line 'maxconn'."),
        ("    errorfile 503 /tmp/500.http", "The section 'defaults' has no line 'errorfile'."),
        ("    bind :9101", "The section 'frontend prometheus' has no line 'bind'."),
        ("    default_backend default_backend", "The section 'frontend http_frontend' has no line 'default_backend'."),
        ("listen stats", "There is no section 'listen stats'."),
    ],
)
def test_a_configuration_that_is_not_serves_is_refused_by_what_it_lacks(gone, message):
    with pytest.raises(TemplateChanged) as refused:
        harden(SERVES.replace(gone, ""), HARDENING)
    assert str(refused.value) == message


def test_a_limit_of_zero_connections_per_source_is_none():
    assert "tcp-request" in harden(SERVES, HARDENING)
    unlimited = Hardening(HARDENING.pages, max_connections=1000, connections_per_source=0)
    assert "tcp-request" not in harden(SERVES, unlimited)


def test_the_template_of_the_installed_ray_has_all_that_is_replaced():
    for piece in ("mode 666", "tune.bufsize", "frontend prometheus", "frontend http_frontend", "listen stats"):
        assert piece in HAPROXY_CONFIG_TEMPLATE
