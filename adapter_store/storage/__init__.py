"""Content-addressed bytes on disk: blobs, pending uploads, leases, refcounts, quarantine, lock file."""
