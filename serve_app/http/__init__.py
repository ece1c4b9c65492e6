"""Bytes in and out: the ASGI application, its middleware, bodies, server-sent events, the OpenAPI description."""
