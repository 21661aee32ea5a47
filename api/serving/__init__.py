"""From a request body to an engine request and back to a response, for each protocol."""
