"""Prometheus collectors."""
