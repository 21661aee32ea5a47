"""The edge: one address in front of many replicas, each of them a whole server. Only this room may import ray."""
