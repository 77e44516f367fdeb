"""The launcher of `tandem serve` and its hold on Ray and Serve."""
