"""Records of requests that have ended, and the lines that are written about them."""
