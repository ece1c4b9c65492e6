"""config.yaml as tests start it: with its language model alone."""

from typing import Any

import yaml

from tests.support.readme_blocks import ROOT


def text_config() -> dict[str, Any]:
    """Without the vision model and what prepares images: two applications less that a start waits for. Without the
    ledger, which is in the checkout.
    """
    raw: dict[str, Any] = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))
    raw["applications"] = raw["applications"][:2]
    user_config = raw["applications"][0]["deployments"][0]["user_config"]
    user_config["models"] = user_config["models"][:1]
    del user_config["images"], user_config["ledger"]
    return raw
