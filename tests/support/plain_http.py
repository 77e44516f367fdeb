"""plain_http: one httpx client for all plain requests of tests, from any thread. `httpx.get` and the like read all root
certificates at each call, 25 ms of CPU. Connections are not kept: the service at the other end may be another soon."""

import httpx

plain_http = httpx.Client(verify=False, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))
