"""The proxies between clients and the ingress: Serve's HTTP servers, and HAProxy in front of them.

`edge_headers.middlewares` runs in Serve's HTTP servers. `haproxy_manager.install` runs in Serve's controller.
Environment variables in config.yaml name both.
"""

from serve_app.proxy.edge_headers import middlewares

__all__ = ["middlewares"]
