"""The end of a Serve application."""

from ray import serve


def begin_delete(name: str) -> None:
    """Has Serve delete an application, and does not wait for it.

    Lost without it: a second signal, and Ray's own end, could not cut the wait short.
    """
    serve.delete(name, _blocking=False)
