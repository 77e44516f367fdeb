"""Events of background responses that are streamed: kept in Redis while they are made, read through any gateway."""
