"""HTTP below the OpenAI protocol: server, middleware, auth, bodies, errors, events."""
