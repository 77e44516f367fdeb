"""Checks of this machine by `tandem doctor`: kernels, captured steps, copies, collectives. They load torch."""
