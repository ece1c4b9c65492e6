"""Checks a config.yaml without starting anything. It reads everything that a start would read, except weights."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from engines.interface.errors import ModelRefused
from serve_app.access.key_reader import KeyReader
from serve_app.base.errors import ConfigRefused
from serve_app.base.explain import explain, near, path_of
from serve_app.checkpoints import CheckpointStore
from serve_app.cli.output import say
from serve_app.config.api import ApiArgs
from serve_app.config.deploy import DeployConfig, load_deploy_config
from serve_app.config.keys import upstream_key
from serve_app.config.ledger import LedgerConfig
from serve_app.config.marketplace import MarketplaceConfig
from serve_app.config.model import ModelArgs
from serve_app.config.paths import resolve_path
from serve_app.config.service import CheckpointsConfig, ServiceConfig

_T = TypeVar("_T")


def check(path: Path) -> DeployConfig:
    """Raises `ConfigRefused` with one sentence for each error."""
    config = check_file(path)
    check_here(config)
    return config


def check_in_child(path: Path) -> DeployConfig:
    """As `check`, in a process that ends with it. Reading models imports torch, Ray and transformers: 400 MB, which the
    process that then supervises the service would keep.
    """
    command = [sys.executable, "-m", "serve_app.cli.check", str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ConfigRefused(done.stdout.rstrip("\n") or f"{path} could not be checked, see above.")
    return load_deploy_config(path)


def check_file(path: Path) -> DeployConfig:
    """As `load_deploy_config`, and as Serve itself checks it. Raises `ConfigRefused`."""
    config = load_deploy_config(path)
    _refuse(sorted(_of_serve(config, path)))
    return config


def check_here(config: DeployConfig) -> None:
    """Check what the ingress and the models would refuse on this machine. Raises `ConfigRefused`."""
    problems = [*_of_tracing(config), *_of_engines(config)]
    if config.service is not None:
        problems += [*_of_keys(config.service, config.ingress_variables), *_of_catalog(config.service)]
        problems += _of_checkpoints(config.service.checkpoints)
        problems += _of_ledger(config.service.ledger, config.ingress_variables)
        problems += _of_slugs(config.service.marketplace, config.ingress_variables)
    _refuse(problems)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigRefused("\n".join(dict.fromkeys(problems)))


def _of_serve(config: DeployConfig, path: Path) -> Iterator[str]:
    from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

    # Serve ignores what it does not know, so that a misspelt key would go unnoticed.
    yield from _unknown(config.raw, ServeDeploySchema, "")
    for index, application in enumerate(config.raw["applications"]):
        yield from _unknown(application, ServeApplicationSchema, f"applications[{index}].")
    try:
        ServeDeploySchema.model_validate(config.raw)
    except ValidationError as exc:
        yield from (_sentence(error, str(path)) for error in exc.errors())


def _sentence(error: ErrorDetails, whole: str) -> str:
    if error["type"] == "value_error":  # Serve's own words, which are sentences
        words = error["msg"].removeprefix("Value error, ").rstrip(".")
        return f"{path_of(error['loc']) or whole}: {words}."
    return explain(error, whole)[1]


def _unknown(section: Mapping[str, object], schema: type[BaseModel], where: str) -> Iterator[str]:
    known = schema.model_fields
    for name in section:
        if name not in known:
            hint = near(name, known) or f" It has {', '.join(known)}."
            yield f"{where}{name} is not a key of Serve.{hint}"


def _of_keys(service: ServiceConfig, more_variables: Mapping[str, str]) -> Iterator[str]:
    reader = KeyReader(more_variables)
    try:
        _, refusals = asyncio.run(reader.read(service.keys, service.limits))
    finally:
        reader.close()
    yield from map(str, refusals)


def _of_slugs(marketplace: MarketplaceConfig, more_variables: Mapping[str, str]) -> Iterator[str]:
    for slug in marketplace.slugs:
        for endpoint in slug.endpoints:
            key = None if endpoint.upstream is None else endpoint.upstream.key
            if key is not None:
                what = f"The key of the endpoint {f'{slug.id}/ep/{endpoint.name}'!r}"
                yield from _complaints(what, partial(upstream_key, what, key.env, key.file), more_variables)


def _of_catalog(service: ServiceConfig) -> Iterator[str]:
    from serve_app.catalog.served_model import load_model  # takes seconds to import

    for model in service.models:
        yield from _complaints(f"The model {model.id!r}", load_model, model)


def _of_tracing(config: DeployConfig) -> Iterator[str]:
    if any(isinstance(args, ApiArgs) and args.tracing is not None for args in config.apps.values()):
        from serve_app.deployments.tracing import require_packages  # imports what a request needs

        try:
            require_packages()
        except ConfigRefused as exc:
            yield str(exc)


def _of_engines(config: DeployConfig) -> Iterator[str]:
    for name, args in config.apps.items():
        if isinstance(args, ModelArgs) and args.engine == "torch":
            from engines.model.loader import check_source  # torch takes seconds to import

            problems = _complaints("The model", check_source, args.engine_config())
            yield from (f"applications ({name}): {problem}" for problem in problems)


def _of_checkpoints(config: CheckpointsConfig) -> Iterator[str]:
    for index, root in enumerate(config.roots):
        place = resolve_path(root.removeprefix("file://"))
        if "://" not in place and not Path(place).is_dir():
            yield f"checkpoints.roots[{index}] must be a folder that exists, got {root!r}."
    yield from _complaints("The store of checkpoints", lambda roots: CheckpointStore.of(roots).close(), config)


def _of_ledger(config: LedgerConfig | None, more_variables: Mapping[str, str]) -> Iterator[str]:
    if config is not None:
        from serve_app.ledger.ledger import Ledger  # its database takes a moment to import

        yield from _complaints("The ledger", lambda ledger: Ledger.check(ledger, more_variables), config)


def _complaints(what: str, look: Callable[[_T], object], at: _T) -> Iterator[str]:
    try:
        look(at)
    except (ConfigRefused, ModelRefused) as exc:
        yield str(exc)
    except Exception as exc:  # tokenizers and config.json files can raise any exception
        yield f"{what} cannot be loaded: {type(exc).__name__}: {' '.join(str(exc).split())}"


def _main(path: Path) -> int:
    """Exit status; a refusal goes to stdout."""
    try:
        check(path)
    except ConfigRefused as exc:
        say(str(exc))
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(_main(Path(sys.argv[1])))
