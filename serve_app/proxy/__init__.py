"""What stands between clients and the ingress: Serve's HTTP servers, and HAProxy in front of them.

`middlewares` runs in Serve's HTTP servers; `haproxy_manager.install` runs in Serve's controller. Both are named by
environment variables in config.yaml.
"""

from serve_app.proxy.edge_headers import middlewares

__all__ = ["middlewares"]
