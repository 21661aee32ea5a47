"""Who may use the server: keys, what each may do and see, and how much."""
