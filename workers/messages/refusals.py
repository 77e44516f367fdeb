"""Ends of requests that no engine has ended: groups make them, and gateways for groups that are gone."""

from tandem.workers.messages.request import Ended, GenerationRequest, Loss, Usage

GROUP_LOST, GROUP_ENDED, GROUP_UNUSABLE = "group_lost", "group_ended", "group_unusable"
"""Codes of refusals: the request ran in a group that was lost; it ran in, or reached, one that ends as planned; its
group speaks another version of the token channel (version.py)."""


def refused(
    request: GenerationRequest, status: int, code: str, param: str | None, message: str, loss: Loss | None = None
) -> Ended:
    """Returns the end of a request that will not run (any further) in its group. status: of HTTP; loss: what the
    group's end says of the request, None where no group was lost."""
    return Ended(
        request_id=request.request_id,
        attempt=request.attempt,
        positions=[],
        finish_reasons=[],
        usage=Usage(prompt_tokens=0, completion_tokens=0),
        refused=(status, code, param, message),
        loss=loss,
    )


def lost(request: GenerationRequest, message: str, loss: Loss) -> Ended:
    """Returns the end that a lost group did not send."""
    return refused(request, 503, GROUP_LOST, None, message, loss)
