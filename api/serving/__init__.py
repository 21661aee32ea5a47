"""Convert request bodies to engine requests, and outputs to responses, for each protocol."""
