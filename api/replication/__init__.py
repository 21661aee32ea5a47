"""Replication: a registry that owns the store and the servers that follow it (feed, leases, loans and shares of limits,
usage), and prefix pages that replicas read from each other."""
