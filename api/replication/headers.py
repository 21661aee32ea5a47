"""Headers and paths by which servers of one cluster know each other."""

REVISION = "x-lorasrv-revision"
"""In responses: the revision of the names that the server had when it answered."""
MIN_REVISION = "x-lorasrv-min-revision"
"""In requests: answer with names of at least this revision; a client sends what a write's response said."""
CHANGES = "/v1/registry/changes"
BLOBS = "/v1/registry/blobs/"
LEASE = "/v1/registry/lease"
USAGE = "/v1/registry/usage"
REPLICA = "/v1/replica"
LEASE_S = 30.0
"""Time for which a follower answers after it has last known that it is up to date."""
RENEW_S = 1.0
"""Time between two renewals of a lease."""
BETWEEN_S = 0.02
"""Least time between two renewals."""
POLL_S = 20.0
"""Longest time that a request for changes waits for one."""
