"""The bodies of requests and responses as pydantic types, from which the OpenAPI description is made."""
