"""/v1/batches: files of requests that run on idle rows, by one gateway at a time."""
