"""Messages between gateways, coordinators and ranks, their ZeroMQ channel, and errors. Torch-free."""
