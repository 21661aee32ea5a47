"""Access middleware, logs, traces, Prometheus collectors."""
