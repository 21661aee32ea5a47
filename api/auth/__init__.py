"""API keys: principal, scopes, key store and cache, auth middleware, rate limits."""
