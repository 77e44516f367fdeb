"""Serve's logging_config, as it holds for the replica that asks."""

import logging
from typing import NamedTuple

from ray import serve
from ray.serve.schema import LoggingConfig

SERVES = "ray.serve"


class ReplicaLogging(NamedTuple):
    """The parts of it that count for lines of ours."""

    is_json: bool
    has_access_lines: bool


def replica_logging() -> ReplicaLogging:
    """Returns what holds for this replica. Where nobody has configured anything, Serve's own lines are warnings alone
    from now on: it would write one for each call of a group.

    Lost without it: the log files of an application have another form than `logging_config` of its Serve file says.
    """
    given = serve.get_replica_context()._deployment_config.logging_config
    if given is None:
        logging.getLogger(SERVES).setLevel(logging.WARNING)
        given = {}
    config = given if isinstance(given, LoggingConfig) else LoggingConfig(**given)
    return ReplicaLogging(is_json=config.encoding == "JSON", has_access_lines=config.enable_access_log)
