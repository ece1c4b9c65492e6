"""Reading why Serve gave up, from what its controller logged."""

from serve_app.base.logs import plain
from serve_app.cli.serve_log import deploy_failure

STAMP = "2026-11-29 20:29:42,026 controller 9328 --"
STARTED = f"INFO {STAMP} Deploying new app 'api'.\nINFO {STAMP} Importing and building app 'api'.\n"
REFUSED = f"""\
ERROR {STAMP} Exception in Replica(id='1i1wrnu7', deployment='engine', app='small'), the replica will be stopped.
Traceback (most recent call last):
  File "replica.py", line 43, in __init__
\x1b[36mray::ServeReplica:small:engine.initialize_and_get_metadata()\x1b[39m (pid=10366)
OSError: no such folder

The above exception was the direct cause of the following exception:

engines.interface.errors.ModelRefused: '/models/x' cannot be loaded: no such folder
INFO {STAMP} Stopping Replica(id='1i1wrnu7', deployment='engine', app='small') (currently ReplicaState.STARTING).
"""
FAILED = f"ERROR {STAMP} Deploying app 'small' failed with exception:\n"
GIVEN_UP = f"ERROR {STAMP} Failed to update the deployments ['engine'].\n"


def test_a_service_that_starts_has_not_failed():
    assert deploy_failure("") is None
    assert deploy_failure(STARTED) is None


def test_a_bad_argument_is_said_in_the_builders_own_words():
    log = (
        f"{STARTED}ERROR {STAMP} Deploying app 'small' failed with exception:\nmax_runing is not a known key, got 3.\n"
    )
    expected = "The application 'small' failed to deploy: max_runing is not a known key, got 3."
    assert deploy_failure(log) == expected
    assert deploy_failure(log + STARTED) == expected


def test_of_a_traceback_the_last_line_is_said():
    log = f"{STARTED}{FAILED}Traceback:\n  File a\nImportError: no such name\n"
    assert deploy_failure(log) == "The application 'small' failed to deploy: no such name"


def test_a_replica_that_is_tried_again_is_no_failure_yet():
    assert deploy_failure(STARTED + REFUSED) is None


def test_a_model_that_cannot_be_loaded_is_a_failure_once_serve_gives_up():
    expected = "The application 'small' failed to deploy: '/models/x' cannot be loaded: no such folder"
    assert deploy_failure(STARTED + REFUSED + REFUSED + GIVEN_UP) == expected


def test_colours_are_taken_out():
    assert plain("\x1b[36m(raylet)\x1b[0m died") == "(raylet) died"
