"""How one model becomes many shards: mesh, groups, collectives, layers, checkpoint. Knows no request and no KV."""
