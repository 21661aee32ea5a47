"""One registry that owns the store, and replicas that follow it: feed, leases, shares of limits, usage;
and the pages that replicas read from each other."""
