"""Model families as data, and the one decoder that reads them."""
