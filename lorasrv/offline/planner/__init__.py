"""Capacity planner: replays a trace through the real scheduler on a simulated clock."""
