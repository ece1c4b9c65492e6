"""The OpenAPI description as a check of what the service says."""

from typing import Any

import jsonschema_rs


def validator_of(name: str, document: Any) -> Any:
    """Of a schema of the description."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return jsonschema_rs.validator_for({**schema, "$schema": "https://json-schema.org/draft/2020-12/schema"})


def closed(schema: Any) -> Any:
    """The same, but objects hold nothing that is not named."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(value) for name, value in schema.items()}
    return {**found, "additionalProperties": False} if "properties" in found else found
