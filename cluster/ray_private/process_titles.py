"""Titles of processes started by Ray."""

import ray


def use_rays_titles() -> None:
    """Has setproctitle work in a Ray worker, whose argument memory Ray has moved: only Ray's own function finds it.

    Lost without it: the titles of ranks in ps.
    """
    import setproctitle

    setproctitle.setproctitle = ray._raylet.setproctitle
