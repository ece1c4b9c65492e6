"""`python -m serve_app`: run the service, check its configuration, chat with a model."""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import yaml

from engines.interface.errors import EngineError
from renderers.base import RenderError
from serve_app.access.auth import hash_key, new_key
from serve_app.base.errors import ConfigRefused, ServiceError
from serve_app.base.model_id import parse_checkpoint_path
from serve_app.cli.api_key import VARIABLE, read_api_key
from serve_app.cli.check import check, check_file, check_here, check_in_child
from serve_app.cli.client import Client, ServiceRefused
from serve_app.cli.conversation import converse
from serve_app.cli.launch import LaunchFailed, up
from serve_app.cli.output import say
from serve_app.config.checking.refusal import parse_section
from serve_app.config.deploy import load_deploy_config
from serve_app.config.keys import DEMO_KEY, KeyConfig, KeyLimits
from serve_app.config.ledger import LedgerConfig
from serve_app.config.options_page import options_page
from serve_app.config.service import ServiceConfig

if TYPE_CHECKING:
    from serve_app.cli.prompt_debug import Token

Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

_URL = "http://127.0.0.1:8000/v1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 for success, 1 for a failure, 2 for wrong arguments."""
    options = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], None] = options.run
    try:
        run(options)
    except ConfigRefused as exc:
        return _complain(exc, 2)
    except (ServiceError, EngineError, RenderError, ServiceRefused, LaunchFailed) as exc:
        return _complain(exc, 1)
    except KeyboardInterrupt:
        return 130
    return 0


def _complain(exc: Exception, status: int) -> int:
    sys.stderr.write(f"{exc}\n")
    return status


def _up(options: argparse.Namespace) -> None:
    up(check_in_child(options.config).bound_to(options.host, options.port), options.config)


def _deploy(options: argparse.Namespace) -> None:
    # Imported late, as below: Ray takes a second.
    from serve_app.cli.deployment import Cluster

    config = check_file(options.config).bound_to(options.host, options.port)
    cluster = Cluster.of_service(config.port) if options.address is None else Cluster(options.address)
    if options.address is None:
        check_here(config)
    cluster.deploy(config)


def _check(options: argparse.Namespace) -> None:
    config = check(options.config)
    say(f"{options.config} is valid: {', '.join([*config.model_ids, *config.slug_ids]) or 'no models'}.")


def _options(options: argparse.Namespace) -> None:
    del options
    sys.stdout.write(options_page())


def _new_key(options: argparse.Namespace) -> None:
    key = new_key()
    limits = {name: getattr(options, name) for name in KeyLimits.model_fields if getattr(options, name) is not None}
    entry = {
        "name": options.name,
        "sha256": hash_key(key).hex(),
        "models": options.models,
        "owner": options.owner,
        "expires_at": options.expires_at,
        "limits": limits or None,
    }
    given = {name: value for name, value in entry.items() if value is not None}
    parse_section(KeyConfig, given, "The key")
    say(f"The key, shown only once: {key}")
    lines = yaml.safe_dump([given], sort_keys=False, allow_unicode=True).rstrip()
    say(f"Under user_config.keys in config.yaml:\n{lines}")


def _models(options: argparse.Namespace) -> None:
    for model_id in _client(options).models():
        say(model_id)


def _chat(options: argparse.Namespace) -> None:
    converse(_client(options), options.model, system=options.system, temperature=options.temperature)


def _client(options: argparse.Namespace) -> Client:
    return Client(options.url, read_api_key(options.key, options.key_file))


def _render(options: argparse.Namespace) -> None:
    """Print the tokens that the model gets for a chat request."""
    # Imported late, here and below: tokenizers take seconds to import, and the other commands do not need them.
    from serve_app.cli.prompt_debug import render_chat

    name = "The standard input" if options.file is None else str(options.file)
    try:
        text = sys.stdin.read() if options.file is None else options.file.read_text(encoding="utf-8")
        body = json.loads(text)
    except OSError as exc:
        raise ConfigRefused(f"{name} cannot be read: {exc.strerror}.") from exc
    except ValueError as exc:
        raise ConfigRefused(f"{name} is not JSON: {exc}.") from exc
    _show(render_chat(_service(options), options.model, body))


def _tokenize(options: argparse.Namespace) -> None:
    from serve_app.cli.prompt_debug import tokenize_text

    _show(tokenize_text(_service(options), options.model, options.text))


def _list_checkpoints(options: argparse.Namespace) -> None:
    from serve_app.cli.checkpoint_debug import list_checkpoints

    for path in asyncio.run(list_checkpoints(load_deploy_config(options.config), options.owner)):
        say(path)


def _check_checkpoint(options: argparse.Namespace) -> None:
    from serve_app.cli.checkpoint_debug import check_checkpoint

    config, path = load_deploy_config(options.config), parse_checkpoint_path(options.path)
    for line in asyncio.run(check_checkpoint(config, path, options.model)):
        say(line)


def _warm_checkpoint(options: argparse.Namespace) -> None:
    """Have every replica load a checkpoint. Raises `ServiceRefused` if one cannot."""
    loads = _client(options).load(options.path)
    for load in loads:
        say(f"{load['replica']}: {load['error'] or format(load['seconds'], '.3f') + ' s'}")
    if any(load["error"] for load in loads):
        raise ServiceRefused(f"{options.path} is not loaded by every replica.")
    say(f"{options.path} is loaded.")


def _usage(options: argparse.Namespace) -> None:
    from serve_app.cli.usage import parse_groups, parse_range, print_usage

    by, within = parse_groups(options.by), parse_range(options.first, options.last)
    variables: Mapping[str, str] = {}
    if options.url is not None:
        ledger = LedgerConfig(url=options.url)
    else:
        config = load_deploy_config(options.config)
        if config.service is None or config.service.ledger is None:
            raise ConfigRefused(f"{options.config} has no ledger.")
        ledger, variables = config.service.ledger, config.ingress_variables
    print_usage(ledger, by, within, key=options.key, form=options.form, more_variables=variables)


def _show(tokens: "Sequence[Token]") -> None:
    from serve_app.cli.prompt_debug import lines_of

    for line in lines_of(tokens, in_colour=sys.stdout.isatty()):
        say(line)


def _service(options: argparse.Namespace) -> ServiceConfig:
    service = load_deploy_config(options.config).service
    if service is None:
        raise ConfigRefused(f"{options.config} has no api application.")
    return service


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m serve_app", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_service_commands(commands)
    _add_key_commands(commands)
    _add_calls(commands)
    _add_checkpoint_commands(commands)
    _add_prompt_commands(commands)
    return parser


def _add_service_commands(commands: Subparsers) -> None:
    command = _add(
        commands, "up", _up, "run the service in the foreground; Ctrl-C ends it and every process it started"
    )
    _add_config(command)
    _add_address(command)

    command = _add(
        commands, "deploy", _deploy, "deploy a config.yaml to a running service, and wait until all applications run"
    )
    _add_config(command)
    _add_address(command)
    command.add_argument(
        "--address", metavar="URL", help="the dashboard address of another cluster; default: the one that `up` started"
    )

    _add_config(_add(commands, "check", _check, "check a config.yaml without starting anything"))

    _add(commands, "options", _options, "print every option of config.yaml with its range and default")


def _add_key_commands(commands: Subparsers) -> None:
    keys = _add_group(commands, "keys", "API keys")
    command = _add(keys, "new", _new_key, "create an API key, and print the lines of config.yaml that accept it")
    command.add_argument("name", help="the caller's name in logs and metrics")
    _add_key_options(command)


def _add_calls(commands: Subparsers) -> None:
    """What a client of a running service can do."""
    _add_client(_add(commands, "models", _models, "list the models of a running service that a key may use"))

    command = _add(commands, "chat", _chat, "chat with a model of a running service")
    command.add_argument("model", help="a model id or a tinker:// path")
    command.add_argument("--system", help="a system message")
    command.add_argument("--temperature", type=float, default=0.7)
    _add_client(command)


def _add_checkpoint_commands(commands: Subparsers) -> None:
    checkpoints = _add_group(commands, "checkpoints", "list, check and load the checkpoints of a config.yaml")
    command = _add(checkpoints, "list", _list_checkpoints, "list the checkpoints in the roots, newest first")
    command.add_argument("--owner", help="also list the private checkpoints of this owner")
    _add_config(command)
    command = _add(
        checkpoints, "check", _check_checkpoint, "check whether a checkpoint can be served, and print the reason if not"
    )
    command.add_argument("path", help="tinker://RUN/sampler_weights/NAME")
    command.add_argument("--model", help="the base model, if the checkpoint does not name it")
    _add_config(command)
    command = _add(checkpoints, "warm", _warm_checkpoint, "have every replica of a running service load a checkpoint")
    command.add_argument("path", help="tinker://RUN/sampler_weights/NAME")
    _add_client(command)


def _add_prompt_commands(commands: Subparsers) -> None:
    command = _add(commands, "render", _render, "print a chat as the model gets it: its text and its tokens, in colour")
    command.add_argument("model", help="a model id of the configuration")
    what = "JSON: a list of messages, or the body of a chat request; default: the standard input"
    command.add_argument("file", nargs="?", type=Path, help=what)
    _add_config(command)

    command = _add(commands, "tokenize", _tokenize, "print the tokens of a text")
    command.add_argument("text")
    _add_config(command)
    command.add_argument("--model", help="a model id of the file; default: the first")

    _add_usage_options(_add(commands, "usage", _usage, "print what keys have used, from the ledger of a config.yaml"))


def _add(
    commands: Subparsers, name: str, run: Callable[[argparse.Namespace], None], description: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=description, description=description.capitalize() + ".")
    command.set_defaults(run=run)
    return command


def _add_group(commands: Subparsers, name: str, description: str) -> Subparsers:
    group = commands.add_parser(name, help=description, description=description.capitalize() + ".")
    return group.add_subparsers(required=True, metavar="COMMAND")


def _add_key_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--models", nargs="+", metavar="ID", help="the base models that the key may use; default: all")
    command.add_argument("--owner", help="the owner whose private checkpoints the key may use; default: none")
    command.add_argument("--expires-at", metavar="TIME", help="such as 2031-01-01T00:00:00Z; default: never")
    for name in KeyLimits.model_fields:
        what = f"{name.replace('_', ' ')}; default: as in limits.per_key"
        kind = float if name.startswith("usd_") else int
        command.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N", help=what)


def _add_usage_options(command: argparse.ArgumentParser) -> None:
    names = "default: key,model,day; also slug and endpoint"
    command.add_argument("--by", default="key,model,day", metavar="NAMES", help=names)
    command.add_argument("--from", dest="first", metavar="DAY", help="first UTC day; default: the first of the ledger")
    command.add_argument("--to", dest="last", metavar="DAY", help="last UTC day; default: the last of the ledger")
    command.add_argument("--key", metavar="NAME", help="the name of one key; default: all")
    where = command.add_mutually_exclusive_group()
    _add_config(where)
    where.add_argument("--url", help="of the ledger's database, instead of --config; other users can see it in `ps`")
    form = command.add_mutually_exclusive_group()
    for name in ("json", "csv"):
        form.add_argument(f"--{name}", dest="form", action="store_const", const=name, default="table")


def _add_config(command: argparse._ActionsContainer) -> None:
    command.add_argument("--config", type=Path, default=Path("config.yaml"), help="default: config.yaml")


def _add_address(command: argparse.ArgumentParser) -> None:
    command.add_argument("--host", help="the address to listen on; default: as in the file")
    command.add_argument("--port", type=int)


def _add_client(command: argparse.ArgumentParser) -> None:
    command.add_argument("--url", default=_URL, help=f"default: {_URL}")
    whose = command.add_mutually_exclusive_group()
    whose.add_argument("--key-file", type=Path, metavar="FILE", help=f"holds the API key; default: ${VARIABLE}")
    whose.add_argument("--key", help=f"the API key; other users can see it in `ps`; default: {DEMO_KEY}")
