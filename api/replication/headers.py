"""Headers, paths and times of the protocol between servers of one cluster."""

REVISION = "x-lorasrv-revision"
"""In responses: the revision of the names that the server had when it answered."""
MIN_REVISION = "x-lorasrv-min-revision"
"""In requests: answer with names of at least this revision. A client sends the revision that a write returned."""
CHANGES = "/v1/registry/changes"
BLOBS = "/v1/registry/blobs/"
LEASE = "/v1/registry/lease"
USAGE = "/v1/registry/usage"
REPLICA = "/v1/replica"
LEASE_S = 30.0
"""Time for which a follower may answer after it was last known to be up to date."""
RENEW_S = 1.0
"""Usual time between two renewals of a lease."""
BETWEEN_S = 0.02
"""Least time between two renewals."""
POLL_S = 20.0
"""Longest time that a request for changes waits for a change."""
