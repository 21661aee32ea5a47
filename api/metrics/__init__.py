"""What /metrics shows, by where it comes from. Read when somebody asks; nothing here is told of steps."""
