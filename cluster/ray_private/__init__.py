"""The only folder that names what Ray and Serve keep private; tests/unit/cluster/ray_private/ tests each name."""
