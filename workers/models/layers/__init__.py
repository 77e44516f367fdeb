"""The layers that the decoder is built from."""
