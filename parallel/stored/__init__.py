"""A checkpoint as it stands in a folder: files, headers, tensors, and reading their bytes ahead."""
