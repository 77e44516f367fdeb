"""Groups of body fields with a room of their own: tools, thinking, structured output."""
