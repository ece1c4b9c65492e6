"""HTTP: the ASGI application, its middleware, request bodies, server-sent events, and the OpenAPI description."""
