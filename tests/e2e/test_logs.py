"""The log of a real service as JSON: every line of a request has its id, in each process that the request passes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Service
from tests.e2e.test_images import VISION, with_vision
from tests.support.files.image_files import data_url, encoded, picture
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

PROCESSES = ("ingress", "engine", "preprocessor")


@pytest.fixture(scope="module")
def logging_json(session_service: Service) -> Iterator[Service]:
    config = with_vision(session_service.config)
    for application in config["applications"]:
        application["logging_config"] = {"encoding": "JSON", "log_level": "DEBUG", "enable_access_log": False}
    with session_service.serving(VISION, config) as service:
        yield service


def lines(app: str, deployment: str) -> list[dict[str, Any]]:
    """What the processes of a deployment wrote as JSON. An ingress that ran before wrote text before."""
    from ray.serve._private.logging_utils import get_serve_logs_dir

    written = [path.read_text() for path in Path(get_serve_logs_dir()).glob(f"replica_{app}_{deployment}_*.log")]
    return [json.loads(line) for text in written for line in text.splitlines() if line.startswith("{")]


def ask(service: Service, request_id: str) -> Any:
    url = data_url(encoded(picture("red")))
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What colour is the shape?"}]
    return service.sdk().chat.completions.create(
        model=VISION,
        messages=[{"role": "user", "content": parts}],  # type: ignore[misc,list-item]
        max_completion_tokens=4,
        extra_headers={"x-request-id": request_id},
    )


def test_each_process_of_a_request_writes_its_id(logging_json: Service) -> None:
    def all_have_written() -> bool:
        ask(logging_json, "json-1")  # again: an ingress that was running takes a moment to write JSON
        places = zip(("api", "vision", "images"), PROCESSES, strict=True)
        return all(any(line.get("request_id") == "json-1" for line in lines(*place)) for place in places)

    eventually(all_have_written, 60)
    (image_line, *_) = [line for line in lines("images", "preprocessor") if line.get("request_id") == "json-1"]
    assert image_line["message"].startswith("1 images in ")
    assert image_line["deployment"] == "images_preprocessor"
    (engine_line, *_) = [line for line in lines("vision", "engine") if line.get("request_id") == "json-1"]
    assert engine_line["message"].startswith("takes json-1/chatcmpl-")


def test_the_line_of_a_request_has_its_numbers_as_fields(logging_json: Service) -> None:
    used = ask(logging_json, "json-2").usage

    def written() -> list[dict[str, Any]]:
        return [line for line in lines("api", "ingress") if line.get("request_id") == "json-2" and "outcome" in line]

    eventually(written)
    (line,) = written()
    told = (line["key"], line["model"], line["status"], line["outcome"], line["prompt_tokens"])
    assert told == ("e2e", VISION, 200, "done", used.prompt_tokens)
    assert line["completion_tokens"] == used.completion_tokens
