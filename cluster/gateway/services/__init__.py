"""Services that the handlers of all routes use: the model's text, the accounts, the names of models."""
