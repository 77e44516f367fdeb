"""One generation: dispatched to a group, resumed, streamed, settled."""
